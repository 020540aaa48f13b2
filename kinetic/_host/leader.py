"""The leader of a gang: serves it, writes its events and its outcome, decides on another attempt.

In: a plan, a store of any kind, the agents that this process has forked, an address of any
transport. Out: events and the outcome in the store. On one machine the supervisor leads; in a gang
of programs, host 0's program does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang, GangSpec
from kinetic._core.outcome import Outcome, Verdict, judge
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic._host.agent.identity import alone_s
from kinetic._host.agents import Agents, code_if_delivered, import_gang_modules
from kinetic._store import attempts, footprints, index
from kinetic._store.base import Store
from kinetic._store.event_log import EventLog
from kinetic.errors import StoreFull

if TYPE_CHECKING:
    import asyncio

    from kinetic._rpc.server import Coordinator

LEAVE_S = 3.0
"""How long agents may take to exit, once everything has been reported."""
PEERS_S = 0.3
"""How long other hosts may take to fail as one just did, so that all are named."""
FIRST_SIGN_S = 60.0
"""How long a host that is there may take to be heard from."""
ROLL_CALL_S = 10.0
"""How long hosts that are programs may take to ask for another attempt, once all have reported."""
LOOK_EVERY_S = 0.5
"""How often the leader checks that the job's records still exist."""
CANCELLED = "The job was cancelled before its next attempt. The last one:"
LOST = (Exit.AGENT_LOST, Exit.NEVER_JOINED)
LOOK_FAR_EVERY_S = 10.0
"""The same in a store where each check is a request."""


@dataclass(frozen=True)
class Attempt:
    """How one attempt ended.

    Attributes:
        outcome: its verdict.
        unwanted: the job was cancelled, perhaps too late to change the verdict.
        removed: the job's records were removed while it ran.
        all_go_on: every host that is a program has asked for another attempt.
    """

    outcome: Outcome
    unwanted: bool = False
    removed: bool = False
    all_go_on: bool = True

    @property
    def is_taken_away(self) -> bool:
        """Whether it ended because the cluster took a host away."""
        first = self.outcome.first
        return first is not None and first.exit is Exit.EVICTED

    def may_repeat(self, plan: Plan, store: Store) -> bool:
        """Whether another attempt might succeed, and is allowed."""
        first = self.outcome.first
        if self.removed or self.outcome.ok or first is None or not first.exit.kind.retryable:
            return False
        return attempts.may_follow(
            store,
            plan.job_id,
            self.outcome.attempt,
            plan.options.retries,
            taken_away=self.is_taken_away,
        )

    def mark_cancelled(self) -> Attempt:
        """The same attempt, of a job that was cancelled before the next one."""
        reason = f"{CANCELLED} {self.outcome.reason}"
        ended = replace(self.outcome, verdict=Verdict.CANCELLED, blamed=(), reason=reason)
        return replace(self, outcome=ended)


def judge_gang(gang: Gang) -> Outcome:
    """Return the verdict on an attempt whose gang has finished."""
    return judge(
        gang.spec.hosts,
        gang.reports,
        blamed=gang.first_failure,
        reason=gang.stop_reason,
        now=time.time(),
        attempt=gang.spec.attempt,
    )


class Leader:
    """Leads one attempt.

    Promises:
        1. SIGTERM cancels the gang while it is served; after that the signal stays pending. Where
           `is_cancelled` says that nobody asked for it, the agents are told that their host is
           taken away.
        2. A gang of one host that is over at once is never served: no event loop, no gRPC.
        3. When it returns, all agents of this process have ended.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        agents: Agents,
        *,
        attempt: int = 1,
        heartbeat_timeout_s: float = 10.0,
        has_records: Callable[[], bool],
        is_cancelled: Callable[[], bool] | None = None,
        reads_questions: bool = False,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._store = store
        self._agents = agents
        self._has_records = has_records
        self._is_cancelled = is_cancelled
        self._reads_questions = reads_questions
        self._on_ready = on_ready
        self._removed = self._looked_for_cancel = False
        self._events = EventLog(store, layout.events(plan.job_id))
        self._all_go_on = True
        self._others = frozenset(range(plan.hosts)) - set(agents.pids.values())
        spec = gang_spec(plan, attempt, heartbeat_timeout_s)
        # All agents are children of this process; one that is alone connects when it has prepared.
        if plan.hosts > 1 and not self._others:
            spec = replace(spec, first_sign_s=FIRST_SIGN_S)
        self._gang = Gang(spec, time.monotonic())

    def lead(self, endpoint: Endpoint, key: str = "") -> Attempt:
        """Serve the gang there until it has finished, and judge it. `key` belongs to the endpoint's
        certificate."""
        if self._plan.hosts > 1 or not self._ends_at_once():
            import_gang_modules()
            import asyncio

            asyncio.run(self._serve(endpoint, key))
        ended = self._judge_attempt()
        self._write(_end_event(ended.outcome))
        self._events.close()
        return ended

    def _judge_attempt(self) -> Attempt:
        return Attempt(judge_gang(self._gang), self._gang.unwanted, self._removed, self._all_go_on)

    def _ends_at_once(self) -> bool:
        """Whether a gang of one host ends before starting its coordinator is worthwhile."""
        limit_s = alone_s(self._plan.limits.timeout_s)
        if not self._agents.await_death(limit_s, unless=signal.SIGTERM):
            return False
        gang = self._gang
        for host, status in self._agents.dead():
            left = code_if_delivered(status) is not None
            report = self._agents.report_left_by(host, gang.spec.attempt) if left else None
            if report is None:
                gang.mark_lost(host, self._agents.cause_of_death(host, status), time.monotonic())
            else:
                gang.join(host, str(os.getpid()), "", time.monotonic())
                gang.report(report, time.monotonic())
        for event in gang.sweep(time.monotonic()):
            self._on_event(event)
        return gang.finished

    # -- while it is served ------------------------------------------------------------------------

    async def _serve(self, endpoint: Endpoint, key: str) -> None:
        import asyncio

        from kinetic._rpc.server import Coordinator

        def on_event(event: GangEvent) -> None:
            self._on_event(event)
            if event.kind is EventKind.FAILURE and event.exit is Exit.EVICTED:
                loop.call_soon(self._cancel_if_asked, coordinator)

        coordinator = Coordinator(self._gang, endpoint, key=key, on_event=on_event)
        loop, all_gone = asyncio.get_running_loop(), asyncio.Event()
        await coordinator.start()
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: lambda: self._on_sigterm(coordinator),
            signal.SIGCHLD: lambda: self._reap(coordinator, all_gone),
        }
        for signum, handler in handlers.items():
            loop.add_signal_handler(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        self._reap(coordinator, all_gone)
        watching = [asyncio.create_task(self._watch_records(coordinator))]
        if self._reads_questions:
            watching.append(asyncio.create_task(self._answer_questions(coordinator)))
        await coordinator.wait_finished()
        for task in watching:
            task.cancel()
        self._kill_silent()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(all_gone.wait(), LEAVE_S + self._gang.spec.grace_s)
        self._agents.signal(signal.SIGKILL)
        ended = self._judge_attempt()
        if ended.may_repeat(self._plan, self._store) and not ended.unwanted:
            reason = ended.outcome.reason
            reports = ended.outcome.reports
            lost = {r.host for r in reports if r.exit in LOST and r.host in self._others}
            lost |= {r.host for r in reports if r.exit is Exit.EVICTED}
            self._all_go_on = not lost and await coordinator.roll_call(
                self._others, reason, ROLL_CALL_S
            )
        await coordinator.stop()
        # A later SIGTERM must not kill this process before it has written the verdict.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _on_sigterm(self, coordinator: Coordinator) -> None:
        """Cancel the gang; or, where a cluster stops the pod of host 0 for another reason, let the
        agent say so: all pods are stopped when one is lost, and the gang finds out which."""
        if self._is_cancelled is None or self._is_cancelled():
            coordinator.cancel("The job was cancelled.")
        else:
            self._agents.tell_of_end()

    def _cancel_if_asked(self, coordinator: Coordinator) -> None:
        """The pods of a cancelled job are stopped in any order, after the request was recorded."""
        may_be, self._looked_for_cancel = not self._looked_for_cancel, True
        if may_be and self._is_cancelled is not None and self._is_cancelled():
            coordinator.cancel("The job was cancelled.")

    async def _watch_records(self, coordinator: Coordinator) -> None:
        """End the job when its records are removed: it could not be found, watched or cancelled
        any more."""
        import asyncio

        while self._has_records():
            await asyncio.sleep(self._look_every_s)
        self._removed = True
        coordinator.cancel("The job's records were removed while it ran.")

    async def _answer_questions(self, coordinator: Coordinator) -> None:
        from kinetic._host import questions

        await questions.answer(self._store, self._plan.job_id, coordinator, lambda: self._gang)

    @property
    def _look_every_s(self) -> float:
        return look_every_s(self._store)

    def _kill_silent(self) -> None:
        """Do not wait for agents that never joined or fell silent, nor, when the records were
        removed, for those that had not connected: the socket is gone with the records."""
        hosts = [r.host for r in self._gang.reports if r.exit in LOST or self._removed]
        self._agents.signal(signal.SIGKILL, hosts)

    def _reap(self, coordinator: Coordinator, all_gone: asyncio.Event) -> None:
        spec = self._gang.spec
        alone = spec.hosts == 1
        for host, status in self._agents.dead():
            left = code_if_delivered(status) is not None
            report = self._agents.report_left_by(host, spec.attempt) if alone and left else None
            if report is not None:
                coordinator.report(report)
            elif alone or not left:
                coordinator.mark_lost(host, self._agents.cause_of_death(host, status))
        if not self._agents.pids:
            all_gone.set()

    def _on_event(self, event: GangEvent) -> None:
        if event.kind is EventKind.STOP:
            # An agent that was stopped (SIGSTOP) must get it too.
            self._agents.signal(signal.SIGCONT)
        if event.kind is EventKind.READY:
            self._on_ready()
        self._write(event)

    def _write(self, event: GangEvent) -> None:
        self._events.write(line_of(self._gang.spec.attempt, event))


def look_every_s(store: Store) -> float:
    """Return how often to look at the job's records."""
    return LOOK_EVERY_S if store.as_folder() is not None else LOOK_FAR_EVERY_S


def write_event(store: Store, job_id: str, attempt: int, event: GangEvent) -> None:
    """Add to the job's events."""
    with contextlib.closing(EventLog(store, layout.events(job_id))) as events:
        events.write(line_of(attempt, event))


def write_verdict(store: Store, job_id: str, outcome: Outcome) -> None:
    """Add to the events of a job how an attempt has ended, for a leader that could not."""
    write_event(store, job_id, outcome.attempt, _end_event(outcome))


def _end_event(outcome: Outcome) -> GangEvent:
    reason, blamed, verdict = outcome.reason, outcome.blamed, outcome.verdict
    return GangEvent(EventKind.ENDED, detail=reason, hosts=blamed, verdict=verdict)


def line_of(attempt: int, event: GangEvent) -> str:
    """Return the line of an event that happens now."""
    return json.dumps(event._replace(time=time.time(), attempt=attempt).to_json()) + "\n"


def repeat(
    store: Store,
    job_id: str,
    outcome: Outcome,
    *,
    make_room: Callable[[], None] = lambda: None,
) -> None:
    """Write the outcome of an attempt that is repeated; from then on the job is in the next one.
    Another leader's outcome stands: this one may come back from a network partition."""
    retry = GangEvent(EventKind.RETRY, detail=outcome.reason)
    write_event(store, job_id, outcome.attempt, retry)
    key, data = layout.attempt_outcome(job_id, outcome.attempt), json.dumps(outcome.to_json())
    _with_room(lambda: store.put(key, data.encode(), if_absent=True), make_room)


def conclude(
    store: Store,
    job_id: str,
    attempt: Attempt,
    plan: Plan | None,
    *,
    make_room: Callable[[], None] = lambda: None,
) -> None:
    """Write the outcome, the last record of a job; clean up after a job whose records were removed.
    `make_room` frees the reserved disk space. Without a supervisor, a process that saw the job's
    end from outside may have judged it before: that verdict stands."""
    if attempt.removed and not store.has(layout.plan(job_id)):
        store.delete(layout.job(job_id))
        return
    if_absent = plan is not None and not plan.place.is_supervised
    _with_room(
        lambda: index.write_outcome(store, job_id, attempt.outcome, if_absent=if_absent), make_room
    )
    if plan is not None:
        footprints.remember(store, plan, attempt.outcome)


def _with_room(write: Callable[[], object], make_room: Callable[[], None]) -> None:
    try:
        write()
    except StoreFull:
        make_room()
        write()


def gang_spec(plan: Plan, attempt: int, heartbeat_timeout_s: float) -> GangSpec:
    """Return what the gang of this attempt is."""
    limits = plan.limits
    return GangSpec(
        hosts=plan.hosts,
        start_timeout_s=limits.start_timeout_s,
        timeout_s=limits.timeout_s,
        hang_timeout_s=limits.hang_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        grace_s=limits.grace_s,
        peers_window_s=PEERS_S,
        still_notice_s=limits.still_notice_s,
        attempt=attempt,
    )
