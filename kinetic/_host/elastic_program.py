"""The programs of an elastic job whose hosts are programs: the head, and a host that it leads.

In: an identity, the plan, a store. Out: a `ProgramCode`; from the head, what the leader writes. The
head runs no function, so that the loss of any slice leaves it alone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace

from kinetic._core import layout
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.elastic import Failure, too_many
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.options import Elastic
from kinetic._core.outcome import Outcome, Verdict, judge_leaderless, program_code
from kinetic._core.plan import Plan
from kinetic._host import leader, pod
from kinetic._host.agent import datasets
from kinetic._host.agent.identity import Identity
from kinetic._host.agent.mountpoints import Mountpoints
from kinetic._host.agents import Agents
from kinetic._host.leader import Attempt
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic._system import memory_folder, processes

_STARTS = range(2, 1 << 31)
"""Numbers of starts: never used before, so that the head knows a new one. 1 is that of a host whose
leader counts."""


class Head:
    """Leads the job."""

    def __init__(self, who: Identity, plan: Plan, elastic: Elastic, store: Store) -> None:
        self._who = who
        self._plan = plan
        self._elastic = elastic
        self._store = store

    def run(self) -> int:
        """Lead the job; return once the outcome is written."""
        # Until it is served, and again when it has finished.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if self._who.is_pod and self._store.has(layout.outcome(self._plan.job_id)):
            sys.stderr.write(f"kinetic.runner: {self._plan.job_id} has ended.\n")
            return ProgramCode.DELIVERED
        ended = self._attempt()
        shutil.rmtree(self._who.scratch, ignore_errors=True)
        memory_folder.remove_unused(self._plan.job_id)
        leader.conclude(self._store, self._plan.job_id, ended, self._plan)
        first = ended.outcome.first
        return ProgramCode.DELIVERED if first is None else program_code(first)

    def _attempt(self) -> Attempt:
        attempt = 1
        try:
            if self._who.is_pod and (lost := self._judge_lost()) is not None:
                leader.write_verdict(self._store, self._plan.job_id, lost)
                _, _, retries = self._read_history()
                is_final = _has_failed_by_itself(lost) and not retries
                if lost.ok or lost.verdict is not Verdict.FAILED or is_final:
                    return Attempt(lost)  # Nobody was left to say it.
                leader.repeat(self._store, self._plan.job_id, lost)
            failures: tuple[Failure, ...] = ()
            retries = self._plan.options.retries
            if self._who.is_pod:
                attempt, failures, retries = self._read_history()
            if len(failures) > self._elastic.max_failures:
                why = too_many(self._elastic, failures)
                outcome = attempts.verdict(self._store, self._plan.job_id, attempt - 1)
                return Attempt(replace(outcome, reason=why, given_up=why))
            return self._lead(attempt, failures, retries)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the job must get a verdict
            reason = f"The head could not lead the job: {type(error).__name__}: {error}"
            now = time.time()
            return Attempt(Outcome(Verdict.FAILED, (), reason, ended_at=now, attempt=attempt))

    def _judge_lost(self) -> Outcome | None:
        """The verdict on the attempt that another head has led and left, or None: a cluster
        replaces the pod of a head without saying so."""
        number = attempts.newest(self._store, self._plan.job_id)
        formed = pod.count_formed(self._plan, self._store, number)
        if formed is None:
            return None
        reports = attempts.reports(self._store, self._plan.job_id, number, formed)
        return judge_leaderless(formed, reports, head=True, now=time.time(), attempt=number)

    def _read_history(self) -> tuple[int, tuple[Failure, ...], int]:
        """The attempt to begin with, the failures of those before, and how many retries are
        left."""
        store, job_id = self._store, self._plan.job_id
        number = attempts.newest(store, job_id)
        told = {each: attempts.verdict(store, job_id, each) for each in range(1, number)}
        repeated = {each for each, outcome in told.items() if _has_failed_by_itself(outcome)}
        failures = tuple(
            Failure(each, (), outcome.reason)
            for each, outcome in told.items()
            if each not in repeated
            and any(report.exit is not Exit.LEFT for report in outcome.reports)
        )
        return number, failures, max(self._plan.options.retries - len(repeated), 0)

    def _lead(self, attempt: int, failures: tuple[Failure, ...], retries: int) -> Attempt:
        from kinetic._host.elastic_leader import ElasticLeader
        from kinetic._host.hosts import RemoteHosts

        who, plan = self._who, self._plan
        return ElasticLeader(
            plan,
            self._elastic,
            self._store,
            RemoteHosts(plan.hosts),
            attempt=attempt,
            failures=failures,
            retries=retries,
            is_cancelled=self._is_cancelled if who.is_pod else None,
            reads_questions=who.is_pod,
            heartbeat_timeout_s=10 * who.heartbeat_s,
            has_records=lambda: self._store.has(layout.plan(plan.job_id)),
        ).lead(who.endpoint, who.key)

    def _is_cancelled(self) -> bool:
        return pod.is_cancelled(self._store, self._plan.job_id)


def _has_failed_by_itself(outcome: Outcome) -> bool:
    """Whether the function has failed, and no slice was lost."""
    return outcome.first is not None and program_code(outcome.first) is ProgramCode.CODE_FAILED


class Seated:
    """A host: it stays while agents come and go, and takes part in one attempt after the other."""

    def __init__(self, who: Identity, plan: Plan, elastic: Elastic, store: Store) -> None:
        place = HostAssignment(
            slices=tuple(range(elastic.most)),
            most_attempts=plan.most_attempts,
            retries_left=plan.options.retries,
        )
        self._who = replace(who, elastic=replace(place, host=who.host), elastic_seat=who.host)
        self._plan = plan
        self._store = store
        self._is_taken_away = False

    def run(self) -> int:
        """Run agents until one ends by itself. One that was killed is replaced at once: it takes
        much longer to start a program, or a pod."""
        # The agent gets the signal: the head decides who is to blame.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        while os.WIFSIGNALED(status := self._run_agent()) and not self._is_taken_away:
            self._clear_up()
        self._clear_up()
        shutil.rmtree(self._who.scratch, ignore_errors=True)
        return ProgramCode.TAKEN_AWAY if self._is_taken_away else os.WEXITSTATUS(status)

    def _run_agent(self) -> int:
        """Return the wait status of an agent."""
        agents = Agents(self._plan, self._store)
        agents.fork([replace(self._who, start=random.choice(_STARTS))])
        while not (dead := list(agents.dead())):
            if agents.await_signal(1.0, signal.SIGTERM) == signal.SIGTERM:
                self._is_taken_away = True
                agents.tell_of_end()
            agents.end_stopped(self._who.unreachable_after_s)
        ((_, status),) = dead
        return status

    def _clear_up(self) -> None:
        processes.kill_descendants()
        # For an agent that was killed.
        Mountpoints(datasets.root(self._who, self._store)).release(self._plan.data)
