"""The leader of an elastic job: one attempt after the other, on the slices that are there.

In: a plan, a store, the agents of all hosts (`Hosts`). Out: events, the outcome of every
attempt but the last, and the last one's; lines in the leader's log that tell the story. What to do
is decided by `Elasticity`; this module does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kinetic._core.endpoint import Endpoint
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.elastic import (
    Decision,
    Elasticity,
    Failure,
    Form,
    GiveUp,
    Loss,
    Restart,
    SliceState,
    first_line,
    loss_of,
    may_follow_from_fault,
)
from kinetic._core.gang.machine import Gang
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.gang.patience import patience_with
from kinetic._core.options import Elastic
from kinetic._core.outcome import Outcome
from kinetic._core.plan import Plan
from kinetic._host import leader, questions
from kinetic._host.hosts import Hosts
from kinetic._host.leader import Attempt
from kinetic._host.story import Story, seats_of
from kinetic._rpc.lobby import Lobby
from kinetic._rpc.server import Coordinator
from kinetic._store.base import Store

LOOK_S = 0.1
"""How often the leader looks what there is to do when nothing wakes it."""
STOPPED_S = 3.0
"""How long the process that serves JAX's coordination may be stopped (SIGSTOP)."""
TO_JOIN_S = 10.0
"""How long hosts that are there may take to join when others have not come within
`start_timeout`."""
_SHORTEST_S = 0.001


class ElasticLeader:
    """Leads all attempts of a job.

    Promises:
        1. A slice with a dead host is ended as a whole, with all that its hosts have started.
        2. Agents of the other slices live on, and their workers where these can.
        3. SIGTERM cancels the job at any time, also between two attempts.
        4. When it returns, all agents have ended, or know that they should.
    """

    def __init__(
        self,
        plan: Plan,
        elastic: Elastic,
        store: Store,
        hosts: Hosts,
        *,
        attempt: int = 1,
        failures: tuple[Failure, ...] = (),
        retries: int = 0,
        is_cancelled: Callable[[], bool] | None = None,
        reads_questions: bool = False,
        heartbeat_timeout_s: float,
        has_records: Callable[[], bool],
        on_ready: Callable[[], None] = lambda: None,
        on_agents: Callable[[int], None] = lambda attempt: None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`attempt` is the first, and `failures` are those of the ones before, where this head
        replaces one that was lost; `retries` are left. `is_cancelled` says whether SIGTERM means
        that the job was cancelled; otherwise a cluster takes this head away. `on_agents` is called
        with the attempt when there are other agents, or another attempt."""
        self._plan = plan
        self._store = store
        self._hosts = hosts
        self._has_records = has_records
        self._on_ready = on_ready
        self._on_agents = on_agents
        self._make_room = make_room
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._each = plan.topology.hosts
        away_s = plan.limits.slice_away_s
        self._policy = Elasticity(elastic, away_s, attempt, failures, retries=retries)
        self._is_cancelled = is_cancelled
        self._reads_questions = reads_questions
        self._story = Story(store, plan.job_id, self._policy)
        self._dead: set[int] = set()
        """Seats whose agents have ended, and were not started again."""
        self._places: dict[int, HostAssignment] = {}
        self._told: set[int] = set()
        """Seats that know that nothing follows."""
        self._ran_s, self._ready_at = 0.0, 0.0
        self._joined: set[int] = set()
        self._removed = self._over = False
        self._gang = self._make_gang(are_there=not hosts.announces)
        self._wake = asyncio.Event()
        self._lobby = Lobby(self, announced=hosts.announces)

    def lead(self, endpoint: Endpoint, key: str = "") -> Attempt:
        """Serve until the job has ended; return its last attempt. `key` belongs to the endpoint's
        certificate."""
        asyncio.run(self._serve(endpoint, key))
        ended = self._ended
        self._write_end(ended)
        self._story.close()
        return ended

    async def _serve(self, endpoint: Endpoint, key: str) -> None:
        self._coordinator = coordinator = Coordinator(
            self._gang, endpoint, key=key, on_event=self._on_event, lobby=self._lobby
        )
        await coordinator.start()
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self._on_sigterm, signal.SIGCHLD: self._reap}
        for signum, handler in handlers.items():
            loop.add_signal_handler(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        self._reap()
        watching = [asyncio.create_task(self._watch_records())]
        if self._reads_questions:
            watching.append(asyncio.create_task(self._answer_questions()))
        try:
            self._ended = await self._lead_attempts()
        finally:
            for task in watching:
                task.cancel()
        self._over = True
        self._lobby.close()
        if self._ended.outcome.ok:
            self._told.update(self._seats_of(self._policy.slices))
        self._reap()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone(), leader.LEAVE_S)
        self._hosts.kill()
        await coordinator.stop()
        # A later SIGTERM must not kill this process before it has written the verdict.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    async def _all_gone(self) -> None:
        while not self._hosts.all_gone(self._told | self._dead):
            await self._pause()

    async def _lead_attempts(self) -> Attempt:
        await self._gather()
        self._story.write(self._make_formed_event())
        if self._hosts.announces:
            self._give_places(lost_at=0.0)
        while True:
            finished = asyncio.create_task(self._coordinator.wait_finished())
            while not finished.done():
                self._look()
                await self._pause(finished)
            self._places = {}
            self._lobby.give({})
            ended = Attempt(leader.judge_gang(self._gang), self._gang.unwanted, self._removed)
            loss, before = loss_of(ended.outcome, self._policy.slices), len(self._policy.slices)
            fault = self._hosts.world_fault(0.0)
            if fault and may_follow_from_fault(ended.outcome):
                self._break_down(fault)
            elif loss is not None:
                self._fail(loss)
            elif _has_left(ended.outcome):
                self._grow()
            elif self._policy.may_repeat(ended.outcome):
                self._repeat(ended.outcome)
            else:
                return ended
            decision = await self._next()
            if isinstance(decision, Form):
                seats = self._seats_of(decision.slices)
                kept = 0 if self._policy.begins_anew else self._lobby.count_kept(seats)
                self._story.tell_of_next(decision, before, kept, len(seats))
            self._story.flush()
            if isinstance(decision, Form):
                self._begin(ended)
            elif isinstance(decision, GiveUp):
                outcome = replace(ended.outcome, reason=decision.reason, given_up=decision.reason)
                return replace(ended, outcome=outcome)
            else:
                return replace(ended.mark_cancelled(), removed=self._removed)

    async def _gather(self) -> None:
        """Where hosts come one by one: wait until enough slices are there for the first attempt.
        If they are not in time, it is on all slices, and its gang says which hosts are missing."""
        if not self._hosts.announces:
            return
        limit_s = self._plan.limits.start_timeout_s
        until = time.monotonic() + max(limit_s - TO_JOIN_S, limit_s / 2)
        self._policy.gather(time.monotonic())
        while not self._gang.unwanted and time.monotonic() < until:
            if isinstance(decision := self._look(), Form):
                if len(decision.slices) < self._policy.rules.most:
                    self._gang = self._make_gang()
                    self._coordinator.serve_next(self._gang)
                return
            await self._pause()
        self._policy.take_all()

    async def _pause(self, finished: asyncio.Task[None] | None = None) -> None:
        """Until something has happened, or a moment has passed."""
        waking = asyncio.create_task(self._wake.wait())
        awaited = {waking} if finished is None else {waking, finished}
        await asyncio.wait(awaited, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()
        self._wake.clear()

    # -- between two attempts ----------------------------------------------------------------------

    async def _next(self) -> Decision | None:
        """Wait until it is decided how to go on; None when nobody wants to any more."""
        while not self._gang.unwanted:
            decision = self._look()
            if isinstance(decision, Form | GiveUp):
                return decision
            if self._may_write_story():
                self._story.flush()
            await self._pause()
        return None

    def _look(self) -> Decision | None:
        """See who is there, and do what is due."""
        policy = self._policy
        for which in policy.missing:
            if self._is_complete(which):
                if policy.stands(which) is SliceState.AWAY:
                    self._story.write(GangEvent(EventKind.SLICE_BACK, slices=(which,)))
                policy.note_ready(which)
        before = len(policy.failures)
        decision = policy.decide(time.monotonic())
        for failure in policy.failures[before:]:
            self._story.tell_of_failure(failure)
            self._end(failure.slices)
        if isinstance(decision, Restart):
            self._restart(decision.slices)
        if policy.could_grow:
            self._gang.make_room()
        if not policy.forming and (fault := self._hosts.world_fault(STOPPED_S)):
            self._coordinator.break_off(f"{fault}.")
        return decision

    def _is_complete(self, which: int) -> bool:
        seats = self._seats(which)
        is_over = self._policy.stays_away(which) or not self._dead.isdisjoint(seats)
        return self._lobby.is_complete(seats) and not is_over

    def _fail(self, loss: Loss) -> None:
        """Count the failure of an attempt, and end what is left of the slices it has lost."""
        lost = {*loss.slices, *(seat // self._each for seat in self._dead)}
        loss = replace(loss, slices=tuple(sorted(lost & {*self._policy.slices})))
        self._count_time()
        self._policy.note_failure(loss, time.monotonic())
        self._story.tell_of_failure(self._policy.failures[-1])
        self._end(loss.slices)
        if not self._gang.unwanted:
            self._story.tell_of_waiting()

    def _break_down(self, why: str) -> None:
        """A process of kinetic's own has failed, and the attempt with it."""
        self._count_time()
        slices = self._find_dead()
        self._policy.note_breakdown(slices, why, time.monotonic())
        self._story.tell_of_fault(self._policy.faults[-1])
        self._end(slices)

    def _repeat(self, outcome: Outcome) -> None:
        """The function has failed, and may try again."""
        self._count_time()
        slices = self._find_dead()
        self._policy.note_repeat(slices, time.monotonic())
        self._story.tell_of_repeat(first_line(outcome.reason))
        self._end(slices)

    def _find_dead(self) -> tuple[int, ...]:
        """Slices that took part, and of which hosts are dead."""
        dead = {seat // self._each for seat in self._dead}
        return tuple(sorted(dead & {*self._policy.slices}))

    def _grow(self) -> None:
        """The function has left at a step, because a slice is back."""
        self._count_time()
        self._story.tell_what_is_back()
        self._policy.note_departure(time.monotonic())

    def _count_time(self) -> None:
        self._ran_s += time.monotonic() - self._ready_at if self._ready_at else 0.0
        self._ready_at = 0.0

    def _end(self, slices: Iterable[int]) -> None:
        """End what is left of these slices; what their agents have said counts no more."""
        for which in slices:
            for seat, start in self._hosts.end(self._seats(which)).items():
                self._lobby.expect(seat, start)

    def _restart(self, slices: Iterable[int]) -> None:
        for which in slices:
            try:
                for seat, start in self._hosts.restart(self._seats(which)).items():
                    self._dead.discard(seat)
                    self._lobby.expect(seat, start)
            except OSError as error:
                self._miss(which, f"the hosts of slice {which} could not be started: {error}")
        self._on_agents(self._policy.attempt)
        self._wake.set()

    def _begin(self, ended: Attempt) -> None:
        """Begin the attempt that was decided on."""
        self._write_end(ended)
        leader.repeat(self._store, self._plan.job_id, ended.outcome, make_room=self._make_room)
        self._gang, self._story.attempt = self._make_gang(), self._policy.attempt
        self._joined = set()
        self._story.write(self._make_formed_event())
        self._coordinator.serve_next(self._gang)
        self._give_places(self._story.lost_at)
        self._on_agents(self._policy.attempt)

    def _give_places(self, lost_at: float) -> None:
        policy = self._policy
        place = HostAssignment(policy.attempt, 0, policy.slices, policy.most_attempts, lost_at)
        place = replace(place, begins_anew=policy.begins_anew, retries_left=policy.retries_left)
        seats = self._seats_of(policy.slices)
        place = replace(place, service=self._hosts.serve_world(len(seats)))
        self._places = {seat: replace(place, host=rank) for rank, seat in enumerate(seats)}
        self._lobby.give(self._places)

    def _make_gang(self, *, are_there: bool = True) -> Gang:
        """`are_there`: all hosts, which were forked or have waited for their places."""
        limit_s = self._plan.limits.timeout_s
        spec = leader.gang_spec(self._plan, self._policy.attempt, self._heartbeat_timeout_s)
        return Gang(
            replace(
                spec,
                hosts=len(self._policy.slices) * self._each,
                slices=self._policy.slices,
                report_s=patience_with(self._policy.rules.survivors).report_s,
                first_sign_s=leader.FIRST_SIGN_S if are_there else None,
                timeout_s=None if limit_s is None else max(limit_s - self._ran_s, _SHORTEST_S),
            ),
            time.monotonic(),
        )

    # -- what happens ------------------------------------------------------------------------------

    def _on_sigterm(self) -> None:
        if self._is_cancelled is None or self._is_cancelled():
            self._cancel()
            return
        # The head that replaces this one goes on; the hosts wait for it.
        self._story.close()
        os._exit(ProgramCode.TAKEN_AWAY)

    async def _answer_questions(self) -> None:
        await questions.answer(
            self._store, self._plan.job_id, self._coordinator, lambda: self._gang
        )

    def _cancel(self, reason: str = "The job was cancelled.") -> None:
        self._coordinator.cancel(reason)
        self._wake.set()

    async def _watch_records(self) -> None:
        """End the job when its records are removed."""
        while self._has_records():
            await asyncio.sleep(leader.look_every_s(self._store))
        self._removed = True
        self._cancel("The job's records were removed while it ran.")

    def _reap(self) -> None:
        for seat, why in self._hosts.dead():
            self._dead.add(seat)
            if not self._over:
                self._on_death(seat, why)
        self._wake.set()

    def _on_death(self, seat: int, why: str) -> None:
        which, slices = seat // self._each, self._policy.slices
        if self._policy.forming or which not in slices:
            self._lose(which, f"host {seat % self._each} of slice {which}: {why}")
        elif not self._gang.finished:
            rank = slices.index(which) * self._each + seat % self._each
            self._coordinator.mark_lost(rank, why)
        self._wake.set()

    # -- what happens in the lobby -----------------------------------------------------------------

    def on_enter(self, seat: int) -> None:
        """A host waits for its place."""
        if self._hosts.announces:
            self._dead.discard(seat)
        self._wake.set()

    def on_start(self, seat: int) -> None:
        """A host was started again: what was there before is dead, if nobody knew it yet."""
        if seat in self._dead:
            return
        place = self._places.get(seat)
        if place is not None and not self._gang.ready and place.host not in self._joined:
            self._lobby.give_again(seat, place)
        else:
            self._on_death(seat, "its agent ended, and was started again.")

    def on_leave(self, seat: int) -> None:
        """A host that waited is gone."""
        self._dead.add(seat)
        self._on_death(seat, "its connection broke while it waited for its place.")

    def on_told(self, seat: int) -> None:
        """A host knows that nothing follows."""
        self._told.add(seat)
        self._wake.set()

    def _lose(self, which: int, why: str) -> None:
        """A slice was lost that takes part in no attempt."""
        before = len(self._policy.failures)
        # Hosts that a cluster starts again may come and go while their slice is away.
        counts = not self._hosts.announces or self._policy.stands(which) is not SliceState.AWAY
        self._policy.lose_slice(which, why, time.monotonic(), counts=counts)
        for failure in self._policy.failures[before:]:
            self._story.tell_of_failure(failure)
        self._end([which])

    def _miss(self, which: int, why: str) -> None:
        """A slice could not be started again."""
        before = len(self._policy.faults)
        self._policy.note_failed_start(which, why, time.monotonic())
        for fault in self._policy.faults[before:]:
            self._story.tell_of_fault(fault)
        self._end([which])

    def _on_event(self, event: GangEvent) -> None:
        if event.kind is EventKind.STOP:
            # An agent that was stopped (SIGSTOP) must get it too.
            self._hosts.wake()
        self._story.write(event)
        if event.host is not None and self._hosts.announces and _is_gone(event):
            self._dead.add(self._seats_of(self._policy.slices)[event.host])
        if event.kind is EventKind.JOINED and event.host is not None:
            self._joined.add(event.host)
        if event.kind is EventKind.READY:
            self._ready_at = time.monotonic()
            self._story.tell_of_recovery()
            self._on_ready()

    # -- what is told ------------------------------------------------------------------------------

    def _make_formed_event(self) -> GangEvent:
        slices = self._policy.slices
        return GangEvent(EventKind.FORMED, hosts=self._seats_of(slices), slices=slices)

    def _write_end(self, ended: Attempt) -> None:
        reason, blamed = ended.outcome.reason, ended.outcome.blamed
        verdict = None if _has_left(ended.outcome) else ended.outcome.verdict
        self._story.write(GangEvent(EventKind.ENDED, detail=reason, hosts=blamed, verdict=verdict))

    def _may_write_story(self) -> bool:
        """Whether nobody else writes to the log of the last attempt's leader any more."""
        seat = self._seats(self._policy.slices[0])[0]
        is_there = seat not in self._dead and self._hosts.is_there(seat)
        return self._lobby.waits(seat) or not is_there

    def _seats(self, which: int) -> range:
        return range(which * self._each, (which + 1) * self._each)

    def _seats_of(self, slices: Sequence[int]) -> tuple[int, ...]:
        return seats_of(slices, self._each)


def _is_gone(event: GangEvent) -> bool:
    """Whether this tells of the end of an agent."""
    said = event.kind is EventKind.REPORT and event.exit in (Exit.AGENT_LOST, Exit.EVICTED)
    return said or event.kind is EventKind.LOST


def _has_left(outcome: Outcome) -> bool:
    """Whether the function has left on all hosts, to make room."""
    return all(report.exit is Exit.LEFT for report in outcome.reports)
