"""One host of a gang whose hosts are programs: its agent's parent; on host 0, the gang's leader.

In: an identity (`KINETIC_*` variables), the plan in a store of any kind. Out: a `ProgramCode`.
Host 0 leads: it serves the gang over TCP and writes the outcome. The others join it, and ask
afterwards whether there is another attempt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from kinetic._core import layout, record
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.elastic import first_line
from kinetic._core.outcome import HostReport, Outcome, Verdict, program_code
from kinetic._core.plan import Plan
from kinetic._host import leader, pod
from kinetic._host.agent import datasets, identity
from kinetic._host.agent.identity import Identity
from kinetic._host.agent.mountpoints import Mountpoints
from kinetic._host.agents import Agents, cause_of_death, code_if_delivered, import_gang_modules
from kinetic._host.leader import Attempt, Leader
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic._system import memory_folder, processes, streams
from kinetic.errors import KineticError

REPORT_S = 5.0
"""How long the host of a dead agent tries to report to the leader."""


def main() -> int:
    """Run this host until the job has ended."""
    streams.replace_closed()
    try:
        who = identity.from_environ()
        store = open_store(who.store_uri, existing=True)
        plan = Plan.from_json(record.parse(store.get(layout.plan(who.job_id))))
        if who.is_pod:  # A pod before it, killed on this machine, may have left something.
            shutil.rmtree(who.scratch, ignore_errors=True)
        _make_scratch(who)
    except (KineticError, OSError) as error:
        sys.stderr.write(f"kinetic.runner: {error}\n")
        return ProgramCode.UNUSABLE
    name = "head" if who.role == "head" else f"{who.role or 'host'} {who.host}"
    processes.set_title(f"kinetic-host {who.job_id} {name}")
    if who.is_pod:  # The first process of a pod does not get SIGTERM without a handler.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if plan.place.has_head and (elastic := plan.options.elastic):
        from kinetic._host.elastic_program import Head, Seated  # few jobs are elastic

        processes.raise_file_limit()
        if who.role == "head":
            return Head(who, plan, elastic, store).run()
        processes.adopt_orphans()
        return Seated(who, plan, elastic, store).run()
    processes.adopt_orphans()
    processes.raise_file_limit()
    host = _Leading(who, plan, store) if who.host == 0 else _Joining(who, plan, store)
    return host.run()


class _Host(ABC):
    """What all hosts do: fork an agent for each attempt, and clean up after it."""

    def __init__(self, who: Identity, plan: Plan, store: Store) -> None:
        self._who = who
        self._plan = plan
        self._store = store
        self._agents = Agents(plan, store)

    def run(self) -> int:
        """Take part in one attempt after the other; return when this host is not needed any
        more."""
        if self._plan.hosts > 1:
            import_gang_modules()  # Before the fork, so that agents share it.
        if self._plan.options.retries:
            self._agents.prepare([self._who])
        if self._who.is_pod:
            try:
                attempt = pod.attempt_of(self._who, self._plan, self._store)
            except KineticError as error:
                sys.stderr.write(f"kinetic.runner: {error}\n")
                return ProgramCode.UNUSABLE
            if attempt is None:
                ended = f"{self._who.job_id} has ended: nothing is run again."
                sys.stderr.write(f"kinetic.runner: {ended}\n")
                return ProgramCode.DELIVERED
            self._who = replace(self._who, attempt=attempt)
        # Its agent gets the signal, and the leader decides who is to blame. Host 0 takes it while
        # it serves the gang.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        while (code := self._take_part()) is None:
            pass
        return code

    @abstractmethod
    def _take_part(self) -> ProgramCode | None:
        """Take part in the current attempt; return what to exit with, None where another one
        follows."""

    def _fork_agent(self) -> None:
        if self._plan.options.retries:
            self._agents.fork_attempt(self._who.attempt, self._who.failed_before)
        else:
            self._agents.fork([self._who])

    def _clear_up(self) -> None:
        self._agents.clear_up()
        # For an agent that was killed.
        Mountpoints(datasets.root(self._who, self._store)).release(self._plan.data)
        shutil.rmtree(self._who.scratch, ignore_errors=True)

    def _go_on(self, reason: str) -> None:
        """Be the same host in the next attempt."""
        self._who = replace(
            self._who, attempt=self._who.attempt + 1, failed_before=first_line(reason)
        )
        _make_scratch(self._who)


class _Leading(_Host):
    """Host 0."""

    def _take_part(self) -> ProgramCode | None:
        ended = self._attempt()
        self._clear_up()
        if ended.may_repeat(self._plan, self._store) and not self._is_judged():
            stopped = signal.SIGTERM in signal.sigpending()
            if ended.unwanted or (stopped and self._is_cancelled()):
                ended = ended.mark_cancelled()
            elif ended.all_go_on and not stopped:
                leader.repeat(self._store, self._plan.job_id, ended.outcome)
                self._go_on(ended.outcome.reason)
                return None
            elif self._who.is_pod:
                leader.repeat(self._store, self._plan.job_id, ended.outcome)
                return ProgramCode.TAKEN_AWAY if ended.is_taken_away else ProgramCode.START_AGAIN
        memory_folder.remove_unused(self._plan.job_id)
        leader.conclude(self._store, self._plan.job_id, ended, self._plan)
        own = next((report for report in ended.outcome.reports if report.host == 0), None)
        return ProgramCode.DELIVERED if own is None else program_code(own)

    def _attempt(self) -> Attempt:
        try:
            return self._lead()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the job must get a verdict
            reason = f"Host 0 could not lead the gang: {type(error).__name__}: {error}"
            attempt, now = self._who.attempt, time.time()
            return Attempt(Outcome(Verdict.FAILED, (), reason, ended_at=now, attempt=attempt))

    def _is_cancelled(self) -> bool:
        return not self._who.is_pod or pod.is_cancelled(self._store, self._plan.job_id)

    def _is_judged(self) -> bool:
        """Whether another process has judged the job lost: its workload was removed."""
        return self._who.is_pod and self._store.has(layout.outcome(self._plan.job_id))

    def _lead(self) -> Attempt:
        who, plan = self._who, self._plan
        if who.is_pod and plan.hosts == 1:
            # A pod that replaces this one must know, however soon this one is killed.
            begun = GangEvent(EventKind.BEGUN, 0)
            leader.write_event(self._store, plan.job_id, who.attempt, begun)
        self._fork_agent()
        return Leader(
            plan,
            self._store,
            self._agents,
            attempt=who.attempt,
            heartbeat_timeout_s=10 * who.heartbeat_s,
            has_records=lambda: self._store.has(layout.plan(plan.job_id)),
            is_cancelled=self._is_cancelled if who.is_pod else None,
            reads_questions=who.is_pod,
        ).lead(who.endpoint, who.key)


class _Joining(_Host):
    """Any other host."""

    def _take_part(self) -> ProgramCode | None:
        self._fork_agent()
        code = self._await_agent()
        self._clear_up()
        repeats = self._plan.options.retries > 0
        # A cluster ends all hosts when one exits with a failure: the leader comes first.
        if code is ProgramCode.CODE_FAILED or (code is ProgramCode.DELIVERED and repeats):
            from kinetic._rpc.client import next_attempt

            following = next_attempt(self._who.endpoint, self._who.host)
            if following is not None:
                self._go_on(following)
                return None
        return code

    def _await_agent(self) -> ProgramCode:
        while not (dead := list(self._agents.dead())):
            if self._agents.await_signal(1.0, signal.SIGTERM) == signal.SIGTERM:
                self._agents.tell_of_end()
            self._agents.end_stopped(self._who.unreachable_after_s)
        ((_, status),) = dead
        if (code := code_if_delivered(status)) is not None:
            return code
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == ProgramCode.UNDELIVERED:
            return ProgramCode.UNDELIVERED
        return self._tell_of(cause_of_death(status))

    def _tell_of(self, death: str) -> ProgramCode:
        from kinetic._rpc.client import AgentClient

        who = self._who
        client = AgentClient(who.endpoint, who.host, unreachable_after_s=REPORT_S)
        lost = HostReport(who.host, Exit.AGENT_LOST, death)
        with contextlib.closing(client), contextlib.suppress(KineticError):
            client.report(lost)
            return ProgramCode.DELIVERED
        return ProgramCode.UNDELIVERED


def _make_scratch(who: Identity) -> None:
    Path(who.scratch).mkdir(parents=True, exist_ok=True, mode=0o700)


def leave(code: int) -> None:
    """End this process; gRPC's threads would delay it."""
    sys.stderr.flush()
    os._exit(code)
