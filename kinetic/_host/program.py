"""The program of a host, started by a backend: parent of the host's agent, and leader on host 0.

It reads its identity from `KINETIC_*` variables and the plan from the store; it exits with a
`ProgramCode`. Host 0, or the head of an elastic job, serves the gang over TCP and writes the
outcome. The agents of the other hosts join it, and wait for the next attempt if there may be one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.formation import first_assignment, make_policy
from kinetic._core.gang.policy import AttemptPolicy
from kinetic._core.outcome import HostReport, Outcome, Verdict, program_code
from kinetic._core.plan import Plan
from kinetic._host import pod, verdicts
from kinetic._host.agents import Agents, cause_of_death, import_gang_modules, read_delivered_code
from kinetic._host.hosts import Hosts, JoinedHosts, RemoteHosts
from kinetic._host.identity import Identity, from_environ
from kinetic._host.leader import Leader
from kinetic._host.verdicts import Attempt
from kinetic._store import attempts, cancellation
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic._system import memory_folder, processes, streams
from kinetic.errors import KineticError

REPORT_S = 5.0
"""Time for which a program tries to report the death of its agent to the leader."""
LONG_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 0.5, 30.0
_STARTS = range(2, 1 << 31)
"""Numbers for starts, drawn at random so that a head recognizes a new start. 1 is for hosts whose
leader counts the starts."""


MakeHosts = Callable[[Plan, Store], Hosts]


def main(
    environ: Mapping[str, str] | None = None,
    make_hosts: MakeHosts = lambda plan, _: RemoteHosts(plan.hosts),
) -> int:
    """Run this host until the job has ended; return a `ProgramCode`. `environ` replaces the
    environment; `make_hosts` makes the hosts that a head leads."""
    streams.replace_closed()
    try:
        identity = from_environ(environ)
        if identity.parent:
            processes.die_with_parent(identity.parent)
        store = open_store(identity.store_uri, existing=True)
        plan = Plan.read(store.get(layout.JobKeys(identity.job_id).plan))
        if identity.is_pod:  # A pod that was killed on this machine may have left its folder.
            shutil.rmtree(identity.scratch, ignore_errors=True)
        if identity.role != "head":  # A head runs no agent; if killed, it would leave the folder.
            Path(identity.scratch).mkdir(parents=True, exist_ok=True, mode=0o700)
    except (KineticError, OSError) as error:
        sys.stderr.write(f"kinetic.runner: {error}\n")
        return ProgramCode.UNUSABLE
    name = "head" if identity.role == "head" else f"host {identity.host}"
    processes.set_title(f"kinetic-host {identity.job_id} {name}")
    if identity.is_pod:  # The kernel drops SIGTERM to the first process of a pod without a handler.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    processes.raise_file_limit()
    processes.take_precedence()
    if identity.role != "head":
        processes.adopt_orphans()
    if identity.leads:
        return _Leading(identity, plan, store, make_hosts).run()
    return (_Joined if identity.is_led_from_afar else _Joining)(identity, plan, store).run()


class _HostProgram(ABC):
    """The common part of all programs: take part in a job that has not ended."""

    def __init__(self, identity: Identity, plan: Plan, store: Store) -> None:
        self._identity = identity
        self._plan = plan
        self._store = store

    def run(self) -> int:
        """Take part in the job; return the exit code once this program is no longer needed."""
        # SIGTERM stays blocked until `await_signal` or the leader's event loop takes it: agents
        # must learn of it, and the leader decides which host is to blame.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            if self._is_judged():
                text = f"{self._plan.job_id} has already ended: nothing is run."
                sys.stderr.write(f"kinetic.runner: {text}\n")
                return ProgramCode.DELIVERED
            self._identity = replace(self._identity, attempt=self._first_attempt())
        except KineticError as error:
            sys.stderr.write(f"kinetic.runner: {error}\n")
            return ProgramCode.UNUSABLE
        return self._take_part()

    def _first_attempt(self) -> int:
        """Return the attempt that this program joins first.

        Raises:
            KineticError: the attempt cannot be determined.
        """
        return self._identity.attempt

    @abstractmethod
    def _take_part(self) -> int:
        """Take part in the job; return the exit code."""

    def _is_judged(self) -> bool:
        """True if the job has an outcome: it ended before this pod began, or its workload was
        removed."""
        return self._identity.is_pod and self._store.has(layout.JobKeys(self._plan.job_id).outcome)

    def _assign(self, policy: AttemptPolicy) -> Identity:
        """Return this host's identity in the first attempt of a policy."""
        place = replace(first_assignment(self._plan, policy), host=self._identity.host)
        return replace(self._identity, assignment=place, assigned_index=self._identity.host)

    def _fork_agent(self, policy: AttemptPolicy) -> Agents:
        """Fork the agent of this host for the first attempt of a policy."""
        plan, may_repeat = self._plan, self._plan.options.retries > 0
        if plan.hosts > 1:
            import_gang_modules()  # Before the fork, so that agents share it.
        identity = self._assign(policy) if may_repeat else self._identity
        agents = Agents(plan, self._store)
        identity = replace(identity, attempt=policy.attempt, stays=may_repeat and plan.hosts > 1)
        agents.fork([identity], may_repeat=may_repeat)
        return agents

    def _await_agent(self, agents: Agents) -> tuple[bool, int]:
        """Wait for the agent's end, and pass SIGTERM on to it. Return True if SIGTERM came (the
        host is taken away), and the agent's wait status."""
        is_taken_away = False
        while not (dead := list(agents.dead())):
            if agents.await_signal(1.0) == signal.SIGTERM:
                is_taken_away = True
                agents.signal(signal.SIGTERM)
        ((_, status),) = dead
        return is_taken_away, status


class _Leading(_HostProgram):
    """Host 0 of a gang, or the head of an elastic job, which runs no function and so survives the
    loss of any slice."""

    def __init__(self, identity: Identity, plan: Plan, store: Store, make_hosts: MakeHosts) -> None:
        super().__init__(identity, plan, store)
        self._make_led = make_hosts

    def _take_part(self) -> int:
        ended = self._lead_to_end()
        if self._identity.role != "head":
            processes.kill_descendants()
        shutil.rmtree(self._identity.scratch, ignore_errors=True)
        if ended.needs_programs and self._identity.is_pod and not self._is_judged():
            verdicts.repeat(self._store, self._plan.job_id, ended.outcome)
            return ProgramCode.TAKEN_AWAY if ended.is_taken_away else ProgramCode.START_AGAIN
        memory_folder.remove_unused(self._plan.job_id)
        verdicts.conclude(self._store, self._plan.job_id, ended, self._plan)
        own = next((report for report in ended.outcome.reports if report.host == 0), None)
        report = ended.outcome.first if self._identity.role == "head" else own
        exits = {report.exit for report in ended.outcome.reports}
        if self._identity.role != "head" and exits & {Exit.NEVER_JOINED, Exit.AGENT_LOST}:
            return ProgramCode.CODE_FAILED  # Missing hosts cannot end their pods themselves.
        return ProgramCode.DELIVERED if report is None else program_code(report)

    def _lead_to_end(self) -> Attempt:
        identity, plan, store = self._identity, self._plan, self._store
        try:
            policy = pod.take_up(plan, store) if identity.is_pod else make_policy(plan)
            return policy if isinstance(policy, Attempt) else self._lead(policy)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the job must get a verdict
            name = "The head" if identity.role == "head" else "Host 0"
            reason = f"{name} could not lead the job: {type(error).__name__}: {error}"
            attempt, now = attempts.find_newest(store, plan.job_id), time.time()
            return Attempt(Outcome(Verdict.FAILED, (), reason, ended_at=now, attempt=attempt))

    def _lead(self, policy: AttemptPolicy) -> Attempt:
        identity, plan = self._identity, self._plan
        is_cancelled = partial(cancellation.is_agreed, self._store, plan.job_id)
        return Leader(
            plan,
            self._store,
            self._make_hosts(policy),
            policy,
            heartbeat_timeout_s=10 * identity.heartbeat_s,
            has_records=lambda: self._store.has(layout.JobKeys(plan.job_id).plan),
            is_cancelled=is_cancelled if identity.is_pod else None,
            is_judged=self._is_judged,
            reads_questions=identity.is_pod,
        ).lead(identity.endpoint, identity.key)

    def _make_hosts(self, policy: AttemptPolicy) -> Hosts:
        """Return the hosts to lead; fork the agent of this host unless it is a head."""
        plan, attempt = self._plan, policy.attempt
        if self._identity.role == "head":
            return self._make_led(plan, self._store)
        is_alone = plan.hosts == 1
        # A pod that replaces this one must see that this attempt has begun.
        if is_alone and self._identity.is_pod:
            begun = GangEvent(EventKind.BEGUN, 0)
            verdicts.write_event(self._store, plan.job_id, attempt, begun)
        agents, stay = self._fork_agent(policy), plan.options.retries > 0 and not is_alone
        return JoinedHosts(agents, plan.hosts, stay=stay, alone=is_alone, attempt=attempt)


class _Joining(_HostProgram):
    """A host of a gang that host 0 leads."""

    def _first_attempt(self) -> int:
        identity, plan = self._identity, self._plan
        return pod.attempt_of(identity, plan, self._store) if identity.is_pod else identity.attempt

    def _take_part(self) -> int:
        plan, attempt = self._plan, self._identity.attempt
        policy = make_policy(plan, attempt=attempt)
        if self._identity.is_pod:  # Earlier attempts, in other pods, have used up retries.
            policy = pod.read_policy(plan, self._store, attempt)
        _, status = self._await_agent(self._fork_agent(policy))
        code = self._read_code(status)
        processes.kill_descendants()
        shutil.rmtree(self._identity.scratch, ignore_errors=True)
        if code is ProgramCode.CODE_FAILED:
            # A cluster ends all hosts when one exits with a failure: wait for the leader to end.
            from kinetic._rpc import client, codec

            endpoint = replace(self._identity.endpoint, attempt=0)
            request = codec.PlaceRequest(self._identity.host, start=1)
            with contextlib.suppress(KineticError):  # The leader has ended.
                client.request_assignment(endpoint, request, unreachable_after_s=0.0)
        return code

    def _read_code(self, status: int) -> ProgramCode:
        if (code := read_delivered_code(status)) is not None:
            return code
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == ProgramCode.UNDELIVERED:
            return ProgramCode.UNDELIVERED
        return self._report_death(cause_of_death(status))

    def _report_death(self, death: str) -> ProgramCode:
        from kinetic._rpc.client import AgentClient

        identity = replace(self._identity, attempt=0)  # The agent may have been in a later attempt.
        client = AgentClient(identity.endpoint, identity.host, unreachable_after_s=REPORT_S)
        lost = HostReport(identity.host, Exit.AGENT_LOST, death)
        with contextlib.closing(client), contextlib.suppress(KineticError):
            client.report(lost)
            return ProgramCode.DELIVERED
        return ProgramCode.UNDELIVERED


class _Joined(_HostProgram):
    """A host that a head leads: its program outlives its agents."""

    def _take_part(self) -> int:
        """Run agents until one ends by itself. Replace a killed agent here, because starting
        another program or pod takes much longer."""
        identity = replace(self._assign(make_policy(self._plan)), stays=True)
        pause_s = 0.0
        while True:
            agents, began = Agents(self._plan, self._store), time.monotonic()
            agents.fork([replace(identity, start=random.choice(_STARTS))])
            is_taken_away, status = self._await_agent(agents)
            agents.close()
            processes.kill_descendants()
            if is_taken_away or not os.WIFSIGNALED(status):
                break
            pause_s = pause_before_next(time.monotonic() - began, pause_s)
            if signal.sigtimedwait([signal.SIGTERM], pause_s) is not None:
                is_taken_away = True
                break
        shutil.rmtree(identity.scratch, ignore_errors=True)
        return ProgramCode.TAKEN_AWAY if is_taken_away else os.WEXITSTATUS(status)


def pause_before_next(ran_s: float, last_s: float) -> float:
    """Return the pause in seconds before a killed agent is replaced: 0 after a long run, else twice
    the last pause, within bounds."""
    return 0.0 if ran_s >= LONG_S else min(max(2 * last_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)


def leave(code: int) -> None:
    """End this process without waiting for gRPC's threads."""
    sys.stderr.flush()
    os._exit(code)
