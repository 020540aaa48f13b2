"""The leader of a job: it runs one attempt after the other, until one is the last.

`AttemptPolicy` decides what to do; this module does it, on any kind of hosts, store and transport.
On one machine the supervisor leads; in a gang of programs, the program of host 0; in an elastic
job on a cluster, a head.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core.endpoint import Endpoint
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.formation import first_assignment, make_gang_spec
from kinetic._core.gang.machine import Gang
from kinetic._core.gang.policy import (
    AttemptPolicy,
    Decision,
    Form,
    GiveUp,
    Loss,
    Restart,
    SliceState,
    first_line,
    loss_of,
    slices_to_end,
)
from kinetic._core.outcome import HostReport, Outcome, Verdict, name_hosts
from kinetic._core.plan import Plan
from kinetic._core.session import CANCELLED_WAITING, keeps_processes
from kinetic._host import verdicts
from kinetic._host.agents import import_gang_modules
from kinetic._host.calls import Call, CallQueue
from kinetic._host.hosts import Hosts, NeedsNewPrograms
from kinetic._host.identity import alone_s
from kinetic._host.story import Story, indices_of
from kinetic._host.verdicts import Attempt
from kinetic._store.base import Store
from kinetic.errors import KineticError, StoreError

if TYPE_CHECKING:
    from kinetic._host.leader_runtime import LeaderRuntime
    from kinetic._rpc.server import Coordinator

LEAVE_S = 3.0
"""Time that agents have to exit once everything has been reported."""
FIRST_SIGN_S = 60.0
"""Time that a started host has until its first request."""
TO_JOIN_S = 10.0
"""Time that started hosts have to join, even if the limit passes while other hosts are missing."""
_SILENT = (Exit.AGENT_LOST, Exit.NEVER_JOINED)
_ASKS_S = 1.0
"""Time that agents have to ask for the next call after a failed one."""
_MOST_BEGINNINGS = 3
"""A call whose host dies before all hosts are ready begins again, up to this many attempts."""


class Leader:
    """Leads all attempts of a job.

    Promises:
        1. A slice with a dead host is ended as a whole, with everything that its hosts started.
        2. Agents of the other slices live on.
        3. SIGTERM cancels the job at any time, even between two attempts; once the job has ended,
           SIGTERM stays pending. If `is_cancelled` returns False, the job goes on: the agents learn
           that their host is taken away, and a head exits so that another one can replace it.
        4. A gang of one host that ends at once is never served: no event loop, no gRPC.
        5. When `lead` returns, all agents have ended or been dismissed.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        hosts: Hosts,
        policy: AttemptPolicy,
        *,
        heartbeat_timeout_s: float = 10.0,
        has_records: Callable[[], bool],
        is_cancelled: Callable[[], bool] | None = None,
        is_judged: Callable[[], bool] = lambda: False,
        reads_questions: bool = False,
        on_ready: Callable[[], None] = lambda: None,
        on_agents: Callable[[int], None] = lambda attempt: None,
        free_space: Callable[[], None] = lambda: None,
        bell: Path | None = None,
    ) -> None:
        """Make a leader.

        Args:
            plan, store, hosts, policy: of the job.
            heartbeat_timeout_s: silence after which a host counts as lost.
            has_records: True while the job's records exist.
            is_cancelled: True if SIGTERM means that the job was cancelled; None if it always does.
            is_judged: True if another process has ended the job.
            reads_questions: answer requests that callers put into the store.
            on_ready: called when all hosts are ready.
            on_agents: called with the attempt's number after agents or the attempt have changed.
            free_space: called when the store is full, before one more try.
            bell: pipe by which callers on this machine wake the leader of a session.
        """
        self._plan = plan
        self._store = store
        self._hosts = hosts
        self._policy = policy
        self._beat_s = heartbeat_timeout_s
        self._has_records = has_records
        self._is_cancelled = is_cancelled
        self._is_judged = is_judged
        self._reads_questions = reads_questions
        self._on_ready = on_ready
        self._on_agents = on_agents
        self._free_space = free_space
        self._bell = bell
        self._call: Call | None = None
        self._is_call_cancelled = False
        self._session_end: Outcome | None = None
        """Outcome of the session once it must end."""
        self._held_since = self._idle_since = 0.0
        self._worlds = 0
        """Number of the worlds that calls have kept."""
        self._hosts_per_slice = plan.hosts // policy.rules.most
        self._story = Story(store, plan.job_id, policy, self._hosts_per_slice)
        self._ready_at = 0.0
        self._removed = self._over = self._needs_programs = self._has_asked = False
        self._gang = self._make_gang(are_there=not hosts.come_later)
        self._sweep: Callable[[], None] = self._sweep_alone
        self._serve_next: Callable[[Gang], None] = lambda gang: None
        self._wake: Callable[[], None] = lambda: None
        self._ask: Callable[[Callable[[], bool], Callable[[bool], None]], None]
        self._ask = lambda question, then: None
        hosts.listen(self)

    def lead(self, endpoint: Endpoint, key: str = "") -> Attempt:
        """Lead the job until it has ended; return its last attempt. `key` is the private key of the
        endpoint's certificate."""
        ended = self._lead_alone() if self._hosts.alone else None
        if ended is None:
            import_gang_modules()
            import asyncio

            ended = asyncio.run(self._serve(endpoint, key))
        self._story.write(verdicts.end_event(ended.outcome))
        self._story.close()
        return ended

    # -- a gang of one host that ends at once ------------------------------------------------------

    def _lead_alone(self) -> Attempt | None:
        """Return the job's last attempt, or None if its host still runs and must be served."""
        while self._hosts.await_death(alone_s(self._gang.spec.shortest_s)):
            self._hosts.reap()
            if not self._gang.finished:
                break
            ended = self._end_attempt()
            if not self._goes_on(ended.outcome):
                return ended
            if ended.unwanted or signal.SIGTERM in signal.sigpending():
                return ended.mark_cancelled()
            while not isinstance(decision := self._decide(), Form | GiveUp):
                if self._needs_programs:
                    return replace(ended, needs_programs=True)
            if isinstance(decision, GiveUp):
                return ended.mark_given_up(decision.reason)
            self._end_story(ended.outcome)
            if not self._record(ended.outcome):
                return ended
            self._begin(first_line(ended.outcome.reason))
        self._hosts.connect()
        return None

    def _sweep_alone(self) -> None:
        for event in self._gang.sweep(time.monotonic()):
            self._on_event(event)

    # -- any other gang ----------------------------------------------------------------------------

    async def _serve(self, endpoint: Endpoint, key: str) -> Attempt:
        import asyncio

        from kinetic._host.leader_runtime import LeaderRuntime
        from kinetic._rpc.server import Coordinator

        coordinator = Coordinator(
            self._gang, endpoint, key=key, on_event=self._on_event, room=self._hosts.waiting_room
        )
        runtime = LeaderRuntime(self._store, self._plan.job_id, coordinator)
        self._sweep, self._serve_next = coordinator.sweep, coordinator.serve_next
        self._wake, self._ask = runtime.wake, runtime.ask_for
        await runtime.open({signal.SIGTERM: self._on_sigterm, signal.SIGCHLD: self._hosts.reap})
        self._hosts.reap()
        runtime.watch_records(self._has_records, on_removal=self._on_removal)
        if self._reads_questions:
            runtime.answer_questions(self._hosts, lambda: self._gang)
        try:
            lead = self._lead_attempts if self._plan.holds is None else self._lead_calls
            ended = await lead(coordinator, runtime)
        finally:
            runtime.stop_watching()
        self._over = True
        self._dismiss(ended)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone(runtime), LEAVE_S + self._gang.spec.grace_s)
        self._hosts.kill()
        await runtime.close()
        return ended

    def _dismiss(self, ended: Attempt) -> None:
        """Dismiss all hosts; after a success they know already. Kill agents that never joined or
        fell silent instead of waiting for them. If the job's records were removed, kill all agents:
        the socket was removed with the records, so nothing can reach them."""
        with contextlib.suppress(KineticError, OSError):  # On an error they count as existing.
            self._removed |= self._hosts.stay and not self._has_records()
        indices, reports = self._indices_of(self._policy.slices), self._gang.reports
        silent = [indices[r.host] for r in reports if r.exit in _SILENT or self._removed]
        self._hosts.close(indices if ended.outcome.ok else silent)
        self._hosts.kill(silent)
        self._hosts.reap()

    async def _all_gone(self, runtime: LeaderRuntime) -> None:
        while not self._hosts.all_gone():
            await runtime.pause()

    async def _lead_attempts(self, coordinator: Coordinator, runtime: LeaderRuntime) -> Attempt:
        import asyncio

        await self._gather(runtime)
        self._story.tell_of_form()
        if self._hosts.announced:
            self._give_places()
        while True:
            finished = asyncio.create_task(coordinator.wait_finished())
            finished.add_done_callback(lambda _: runtime.wake())
            while not finished.done():
                self._decide()
                await (runtime.pause() if self._hosts.stay else runtime.pause(None))
            before, ended = len(self._policy.slices), self._end_attempt()
            if not self._goes_on(ended.outcome):
                return ended
            decision = await self._await_decision(runtime)
            if isinstance(decision, Form):
                self._story.tell_of_next(decision, before)
            self._story.flush()
            if isinstance(decision, Form):
                self._end_story(ended.outcome)
                if not await runtime.ask(partial(self._record, ended.outcome)):
                    return ended
                self._begin(first_line(ended.outcome.reason))
                self._hosts.connect()
            elif isinstance(decision, GiveUp):
                return ended.mark_given_up(decision.reason)
            elif self._needs_programs and not self._gang.unwanted:
                return replace(ended, needs_programs=True)
            else:
                return replace(ended.mark_cancelled(), removed=self._removed)

    async def _gather(self, runtime: LeaderRuntime) -> None:
        """Wait until enough slices are ready for the first attempt, if hosts come one by one. After
        the limit, begin on all slices, so that the gang reports which hosts are missing."""
        if not self._hosts.announced:
            return
        limit_s = self._plan.limits.start_timeout_s
        until = time.monotonic() + max(limit_s - TO_JOIN_S, limit_s / 2)
        self._policy.gather(time.monotonic())
        while not (self._gang.unwanted or self._gang.finished) and time.monotonic() < until:
            if isinstance(decision := self._decide(), Form):
                if len(decision.slices) < self._policy.rules.most:
                    self._gang = self._make_gang()
                    self._serve_next(self._gang)
                return
            await runtime.pause()
        self._policy.take_all()

    # -- the calls of a session --------------------------------------------------------------------

    async def _lead_calls(self, coordinator: Coordinator, runtime: LeaderRuntime) -> Attempt:
        """Hold the slices of a session, and run calls on them, until the session ends."""
        queue = CallQueue(self._store, self._plan.job_id)
        if self._bell is not None:
            runtime.listen(self._bell)
        elif self._reads_questions:
            await runtime.listen_on_port(self._plan.job_id)
        self._policy.gather(time.monotonic())
        self._policy.hold()
        ended = await self._await_hosts(runtime)
        self._idle_since = time.monotonic()
        while ended is None:
            call = None
            with contextlib.suppress(StoreError):  # The next round reads the queue again.
                call = await runtime.ask(partial(queue.take, self._hosts_per_slice))
            if call is not None:
                ended = await self._run_call(call, queue, coordinator, runtime)
                self._idle_since = time.monotonic()
                continue
            self._decide_for_session()
            if (ended := self._judge_session()) is None:
                await runtime.pause_between_reads()
        with contextlib.suppress(StoreError):  # Readers see that the session has ended.
            await runtime.ask(partial(queue.close, ended.reason))
        return Attempt(replace(ended, ended_at=time.time()), removed=self._removed)

    async def _await_hosts(self, runtime: LeaderRuntime) -> Outcome | None:
        """Wait until all hosts of the session are ready, and return None. If the session ends
        before, return its outcome."""
        limit_s = self._plan.limits.start_timeout_s
        until = time.monotonic() + limit_s
        while self._policy.missing:
            self._decide_for_session()
            if (ended := self._judge_session()) is not None:
                return ended
            if time.monotonic() >= until:
                missing = name_hosts(self._indices_of(self._policy.missing))
                return self._end_session(
                    Verdict.FAILED,
                    f"{missing} of {self._plan.hosts} did not join within {limit_s:g} s "
                    "(start_timeout).",
                )
            await runtime.pause()
        self._story.write(GangEvent(EventKind.READY))
        self._held_since = time.monotonic()
        self._on_ready()
        return None

    def _decide_for_session(self) -> Decision | None:
        """Decide as for any job. If the policy gives up, have the session end."""
        decision = self._decide()
        if isinstance(decision, GiveUp):
            self._end_session(Verdict.FAILED, decision.reason)
        return decision

    def _end_session(self, verdict: Verdict, reason: str) -> Outcome:
        """Set the outcome of the session, unless it is set already; return it."""
        self._session_end = self._session_end or Outcome(verdict, reason=reason)
        return self._session_end

    def _judge_session(self) -> Outcome | None:
        """Return the outcome of the session if it must end now, else None."""
        holds, budget_s = self._plan.holds, self._plan.limits.budget_s
        if self._session_end is not None or holds is None or not self._held_since:
            return self._session_end
        now = time.monotonic()
        held_s, idle_s = now - self._held_since, now - self._idle_since
        end = ""
        if held_s >= holds.max_lifetime_s:
            end = f"its max_lifetime of {holds.max_lifetime_s:g} s is over"
        elif budget_s is not None and held_s >= budget_s:
            end = f"its {self._plan.limits.budget} is used up"
        elif self._call is None and idle_s >= holds.idle_timeout_s:
            end = f"no call came for {holds.idle_timeout_s:g} s (idle_timeout)"
        reason = f"The session {holds.name} has ended: {end}."
        return self._end_session(Verdict.SUCCEEDED, reason) if end else None

    async def _run_call(
        self, call: Call, queue: CallQueue, coordinator: Coordinator, runtime: LeaderRuntime
    ) -> Outcome | None:
        """Run all attempts of a call, and store its verdict. Return the session's outcome if the
        session must end, else None."""
        self._call, self._is_call_cancelled = call, False
        watch = runtime.watch(partial(queue.is_cancelled, call.job_id), self._cancel_call)
        failed_before, ended = "", None
        try:
            while True:
                self._policy.release(time.monotonic())
                if (outcome := await self._form_for_call(call, runtime)) is None:
                    outcome = await self._serve_call(call, failed_before, coordinator, runtime)
                ended = self._judge_session()
                if ended is not None or not self._repeats(call, outcome):
                    break
                await runtime.ask_until_done(partial(self._record_attempt, call, outcome))
                failed_before = first_line(outcome.reason)
        finally:
            watch.cancel()
            self._policy.hold()
            self._call = None
        call.story.write(verdicts.end_event(outcome))
        if not self._removed:  # Otherwise nobody could read the verdict.
            await runtime.ask_until_done(partial(queue.conclude, call, outcome))
        runtime.tell_callers(call.job_id)
        if not self._removed:
            await runtime.ask_until_done(partial(queue.remove, call))
        return ended

    async def _form_for_call(self, call: Call, runtime: LeaderRuntime) -> Outcome | None:
        """Wait until all slices are ready; return None, or the outcome if the call cannot begin."""
        while True:
            ended = self._judge_session()
            if ended is not None or self._is_call_cancelled:
                failed = ended is not None and ended.verdict is Verdict.FAILED
                return Outcome(
                    Verdict.FAILED if failed else Verdict.CANCELLED,
                    reason=CANCELLED_WAITING if ended is None else ended.reason,
                    ended_at=time.time(),
                    attempt=call.policy.attempt,
                )
            decision = self._decide_for_session()
            if isinstance(decision, Form):
                return None
            if not isinstance(decision, GiveUp):
                await runtime.pause()

    async def _serve_call(
        self, call: Call, failed_before: str, coordinator: Coordinator, runtime: LeaderRuntime
    ) -> Outcome:
        """Run one attempt of a call on the slices; return its outcome."""
        import asyncio

        policy, indices = self._policy, self._indices_of(self._policy.slices)
        spec = make_gang_spec(call.plan, call.policy, self._beat_s)
        spec = replace(
            spec,
            turn=policy.attempt,
            first_sign_s=self._beat_s,  # All hosts wait for an assignment.
            sees_deaths=self._hosts.sees_deaths,
        )
        self._gang, self._has_asked = Gang(spec, time.monotonic()), False
        self._serve_next(self._gang)
        place = replace(
            first_assignment(call.plan, call.policy),
            hosts=len(indices),
            job_id=call.job_id,
            turn=policy.attempt,
            failed_before=failed_before,
            **self._choose_world(call, indices),
        )
        self._hosts.give({index: replace(place, host=rank) for rank, index in enumerate(indices)})
        finished = asyncio.create_task(coordinator.wait_finished())
        finished.add_done_callback(lambda _: runtime.wake())
        while not finished.done():
            self._decide()
            if (ended := self._judge_session()) is not None:
                self._gang.cancel(ended.reason, time.monotonic())
                self._sweep()
            await runtime.pause()
        self._hosts.end_attempt()
        outcome = verdicts.judge_gang(self._gang)
        silent = {indices[r.host] for r in outcome.reports if r.exit in _SILENT}
        if dead := self._find_dead(silent):
            self._policy.note_failure(Loss(dead, first_line(outcome.reason)), time.monotonic())
            self._end(dead)
        else:
            self._policy.note_departure(time.monotonic())
        self._policy.hold()
        if place.world and not outcome.ok and not await self._keeps(place.world, indices, runtime):
            return replace(outcome, ends_world=True)
        return outcome

    async def _keeps(self, world: int, indices: Sequence[int], runtime: LeaderRuntime) -> bool:
        """True if, after a failed call, all hosts still keep this world. Their agents say so when
        they ask for the next call, a moment later."""
        room, until = self._hosts.waiting_room, time.monotonic() + _ASKS_S
        while not (room.is_complete(indices) or self._hosts.dead) and time.monotonic() < until:
            await runtime.pause()
        return not self._hosts.dead and room.find_common_world(indices) == world

    def _choose_world(self, call: Call, indices: Sequence[int]) -> dict[str, Any]:
        """Return the world in which a call runs, as fields of the assignments: the kept world of an
        earlier call if all hosts still have it, else a new one; 0 if this call keeps nothing."""
        if not keeps_processes(call.plan.options, self._plan.options):
            return {"world": 0}
        if world := self._hosts.waiting_room.find_common_world(indices):
            return {"world": world}
        self._worlds += 1
        loss = "what the session kept is gone: this call begins in new processes."
        return {"world": self._worlds, "notice": loss if self._worlds > 1 else ""}

    def _repeats(self, call: Call, outcome: Outcome) -> bool:
        """True if another attempt of the call follows; its policy is then at that attempt."""
        if self._gang.unwanted:
            return False
        first = outcome.first
        was_lost = first is not None and first.exit in (Exit.AGENT_LOST, Exit.SIGNAL)
        # A lost agent cannot say whether its function had begun.
        has_begun = self._gang.ready and any(
            report.started_at or report.exit is Exit.AGENT_LOST for report in outcome.reports
        )
        if was_lost and not has_begun and call.policy.attempt < _MOST_BEGINNINGS:
            call.policy.retries_left += 1  # An agent or a worker had died before the call.
        elif not call.policy.may_repeat(outcome):
            return False
        now = time.monotonic()
        call.policy.note_repeat(outcome, (), now)
        for which in call.policy.missing:
            call.policy.note_ready(which)
        call.policy.decide(now)
        return True

    def _record_attempt(self, call: Call, outcome: Outcome) -> None:
        for event in (verdicts.end_event(outcome), verdicts.retry_event(outcome)):
            call.story.write(event)
        verdicts.write_outcome(self._store, call.job_id, outcome, free_space=self._free_space)
        call.story.attempt = call.policy.attempt

    def _cancel_call(self) -> None:
        """Cancel the call that runs, not the session."""
        self._is_call_cancelled = True
        self._gang.cancel("The job was cancelled.", time.monotonic())
        self._sweep()
        self._wake()

    # -- between two attempts ----------------------------------------------------------------------

    def _end_attempt(self) -> Attempt:
        self._hosts.end_attempt()
        return Attempt(verdicts.judge_gang(self._gang), self._gang.unwanted, self._removed)

    def _goes_on(self, outcome: Outcome) -> bool:
        """Tell the policy and the story how an attempt has ended; return True if another may
        follow."""
        loss = None if self._policy.is_fixed else loss_of(outcome, self._policy.slices)
        self._policy.count_time(time.monotonic() - self._ready_at if self._ready_at else 0.0)
        self._ready_at = 0.0
        if loss is not None:
            self._fail(loss)
        elif verdicts.has_left(outcome):
            self._story.tell_what_is_back()
            self._policy.note_departure(time.monotonic())
        elif self._policy.may_repeat(outcome):
            self._repeat(outcome)
        else:
            return False
        return True

    async def _await_decision(self, runtime: LeaderRuntime) -> Decision | None:
        """Wait until the policy has decided how the job goes on. Return None if the job was
        cancelled, or if the backend must start the programs again."""
        while not self._gang.unwanted:
            decision = self._decide()
            if self._needs_programs or isinstance(decision, Form | GiveUp):
                return None if self._needs_programs else decision
            if not self._hosts.may_write(self._indices(self._policy.slices[0])[0]):
                self._story.flush()
            await runtime.pause()
        return None

    def _decide(self) -> Decision | None:
        """Note which slices are ready or late, ask the policy for a decision, and do what must be
        done at once."""
        policy, now = self._policy, time.monotonic()
        for which in policy.missing:
            if not policy.stays_away(which) and self._hosts.are_ready(self._indices(which)):
                self._story.tell_of_return(which)
                policy.note_ready(which)
        self._hosts.note_late(self._indices_of(policy.find_late(now)))
        decision = policy.decide(now)
        for failure in self._story.tell_news():
            self._end(failure.slices)
        if isinstance(decision, Restart):
            self._restart(decision.slices)
        if policy.could_grow:
            self._gang.request_reform()
        return decision

    def _fail(self, loss: Loss) -> None:
        """Count the failure of an attempt, and end the remaining hosts of its lost slices."""
        slices = tuple(sorted({*loss.slices, *self._find_dead()}))
        self._policy.note_failure(replace(loss, slices=slices), time.monotonic())
        self._story.tell_news()
        self._end(slices)
        if not self._gang.unwanted:
            self._story.tell_of_waiting()

    def _repeat(self, outcome: Outcome) -> None:
        """Count a failure of the function that is retried, and end slices with dead hosts."""
        slices = self._find_dead()
        if self._policy.is_fixed:
            slices = tuple(sorted({*slices, *slices_to_end(outcome, self._hosts_per_slice)}))
            for report in outcome.reports:
                if report.exit in (*_SILENT, Exit.EVICTED):
                    taken_away = report.exit is Exit.EVICTED
                    self._hosts.note_gone(report.host, is_taken_away=taken_away)
        self._policy.note_repeat(outcome, slices, time.monotonic())
        self._story.tell_of_repeat(first_line(outcome.reason))
        self._end(slices)

    def _find_dead(self, silent: Collection[int] = ()) -> tuple[int, ...]:
        """Return the attempt's slices that have dead or silent hosts."""
        dead = {index // self._hosts_per_slice for index in (*self._hosts.dead, *silent)}
        return tuple(sorted(dead & {*self._policy.slices}))

    def _end(self, slices: Iterable[int]) -> None:
        for which in slices:
            self._hosts.end(self._indices(which))

    def _restart(self, slices: Iterable[int]) -> None:
        for which in slices:
            try:
                self._hosts.restart(self._indices(which))
            except NeedsNewPrograms:
                self._needs_programs = True
                return
            except OSError as error:
                self._policy.note_failed_start(which, str(error), time.monotonic())
                self._story.tell_news()
                self._end([which])
        self._on_agents(self._policy.attempt)
        self._wake()

    def _end_story(self, outcome: Outcome) -> None:
        """Write the events that end an attempt, and make the gang of the next one."""
        for event in (verdicts.end_event(outcome), verdicts.retry_event(outcome)):
            self._story.write(event)
        self._gang, self._has_asked = self._make_gang(), False
        self._story.attempt = self._policy.attempt

    def _record(self, outcome: Outcome) -> bool:
        """Write the outcome of an attempt; return False if another process has ended the job."""
        if self._is_judged():
            return False
        verdicts.write_outcome(self._store, self._plan.job_id, outcome, free_space=self._free_space)
        return True

    def _begin(self, failed_before: str) -> None:
        """Begin the attempt on which the policy has decided."""
        self._story.tell_of_form()
        if self._hosts.alone and self._hosts.come_later:  # The program wrote the first attempt's.
            self._story.write(GangEvent(EventKind.BEGUN, 0))
        self._serve_next(self._gang)
        self._give_places(failed_before)
        self._on_agents(self._policy.attempt)

    def _give_places(self, failed_before: str = "") -> None:
        policy, indices = self._policy, self._indices_of(self._policy.slices)
        place = replace(
            first_assignment(self._plan, policy),
            hosts=len(indices),
            lost_s=time.monotonic() - self._story.lost_at if self._story.lost_at else 0.0,
            failed_before=failed_before if policy.is_fixed else "",
        )
        self._hosts.give({index: replace(place, host=rank) for rank, index in enumerate(indices)})

    def _make_gang(self, *, are_there: bool = True) -> Gang:
        """Make the gang of the policy's attempt. `are_there`: all hosts have been started, so the
        gang soon expects a sign of life from each."""
        spec = make_gang_spec(self._plan, self._policy, self._beat_s)
        spec = replace(
            spec,
            first_sign_s=FIRST_SIGN_S if are_there else None,
            joins_late=self._hosts.alone,
            sees_deaths=self._hosts.sees_deaths,
        )
        if self._plan.holds is not None:  # No host joins this gang: each call has one of its own.
            spec = replace(spec, first_sign_s=None, start_timeout_s=math.inf)
        return Gang(spec, time.monotonic())

    # -- signals, hosts and the gang ---------------------------------------------------------------

    def _on_sigterm(self) -> None:
        """Cancel the job, or note that the cluster stops this pod for another reason."""
        if self._is_cancelled is None:
            self._cancel()
        else:
            self._ask(self._is_cancelled, self._stop)

    def _stop(self, is_cancelled: bool) -> None:
        if is_cancelled:
            self._cancel()
        elif self._hosts.announced:
            self._story.close()
            os._exit(ProgramCode.TAKEN_AWAY)  # The hosts wait for the head that replaces this one.
        else:  # This host's agent reports it, and the gang decides which pod was lost first.
            self._needs_programs |= self._policy.forming
            self._hosts.take_away()
            self._wake()

    def _cancel(self, reason: str = "The job was cancelled.") -> None:
        if self._plan.holds is not None:
            stopped = f"The session {self._plan.holds.name} was stopped."
            reason = self._end_session(Verdict.CANCELLED, stopped).reason
        self._gang.cancel(reason, time.monotonic())
        self._sweep()
        self._wake()

    def _on_removal(self) -> None:
        self._removed = True
        self._cancel("The job's records were removed while it ran.")

    def on_change(self) -> None:
        """Decide again: a host has begun to wait, or was dismissed."""
        self._wake()

    def on_report(self, report: HostReport) -> None:
        """Pass a host's report to the gang, which the host may not have joined."""
        self._gang.report(report, time.monotonic())
        self._sweep()

    def on_death(self, index: int, why: str) -> None:
        """Count a host as lost, in the running attempt or while the next one is formed."""
        which, slices = index // self._hosts_per_slice, self._policy.slices
        if self._over:
            return
        if self._policy.forming or which not in slices:
            self._lose(which, f"host {index % self._hosts_per_slice} of slice {which}: {why}")
        elif not self._gang.finished:
            rank = slices.index(which) * self._hosts_per_slice + index % self._hosts_per_slice
            self._gang.mark_lost(rank, why, time.monotonic())
            self._sweep()
        self._wake()

    def _lose(self, which: int, why: str) -> None:
        """Count a slice that takes part in no attempt as lost."""
        # A cluster may start and lose hosts while their slice is away: that is no new loss.
        counts = not self._hosts.announced or self._policy.state_of(which) is not SliceState.AWAY
        self._policy.lose_slice(which, why, time.monotonic(), counts=counts)
        self._story.tell_news()
        self._end([which])

    def _on_event(self, event: GangEvent) -> None:
        (self._story if self._call is None else self._call.story).write(event)
        if event.host is not None:
            self._hosts.note_event(event, self._indices_of(self._policy.slices)[event.host])
        if event.kind is EventKind.FAILURE and event.exit is Exit.EVICTED:
            # A cluster stops the pods of a cancelled job in any order, after the request is stored.
            is_first, self._has_asked = not self._has_asked, True
            if is_first and self._is_cancelled is not None:
                self._ask(self._is_cancelled, lambda is_so: self._cancel() if is_so else None)
        if event.kind is EventKind.READY:
            self._ready_at = time.monotonic() - event.ago_s
            self._story.tell_of_recovery()
            if self._call is None:
                self._on_ready()

    def _indices(self, which: int) -> range:
        return range(which * self._hosts_per_slice, (which + 1) * self._hosts_per_slice)

    def _indices_of(self, slices: Sequence[int]) -> tuple[int, ...]:
        return indices_of(slices, self._hosts_per_slice)
