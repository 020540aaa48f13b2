"""The history of a gang, folded from its events, for the command line and drawings. Pure.

In: `GangEvent`s, and the verdict if there is one. Out: a `GangPicture`: every attempt, and the
state of each of its hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit, HostState
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class HostPicture:
    """The state of one host.

    Attributes:
        state: the displayed state.
        exit: how the host ended; None if unknown.
        detail: text about the host's end, for users.
    """

    state: HostState = HostState.PENDING
    exit: Exit | None = None
    detail: str = ""


@dataclass(frozen=True)
class AttemptPicture:
    """One attempt. Times are seconds since the epoch; None if they are not reached yet.

    Attributes:
        number: number of the attempt, from 1.
        hosts: all hosts of the job, by index; see `members`.
        began_at: time of the attempt's first event.
        ready_at: when all hosts had joined.
        ended_at: when the attempt was judged.
        verdict: the verdict on the attempt.
        reason: one line for users; "" on success.
        blamed: the hosts that failed first.
        slices: slices that take part, in the order of their hosts; () unless the job is elastic.
        lost: slices that the job lost in this attempt, or before the next one; of a session, those
            that are not back yet.
        awaited: slices for which the next attempt waits.
        size: number of hosts that take part; 0 for all.
        difference: the first difference between the programs of the hosts; "" for none.
    """

    number: int
    hosts: tuple[HostPicture, ...]
    began_at: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    verdict: Verdict | None = None
    reason: str = ""
    blamed: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    size: int = 0
    difference: str = ""

    @property
    def members(self) -> tuple[HostPicture, ...]:
        """The hosts that take part."""
        return self.hosts[: self.size or None]

    @property
    def failed_first(self) -> tuple[int, ...]:
        """The hosts to blame, without hosts that only ended so that a slice can join."""
        reformed = [host for host, its in enumerate(self.hosts) if its.exit is Exit.REFORMED]
        return tuple(host for host in self.blamed if host not in reformed)

    def to_json(self) -> dict[str, Any]:
        """Return the attempt as a JSON object."""
        return {
            "attempt": self.number,
            "began_at": self.began_at,
            "started_at": self.ready_at,
            "ended_at": self.ended_at,
            "verdict": self.verdict,
            "reason": self.reason,
            "blamed": list(self.blamed),
            **({"difference": self.difference} if self.difference else {}),
            **({"slices": list(self.slices), "lost": list(self.lost)} if self.slices else {}),
            "hosts": [
                {"host": index, "state": host.state, "exit": host.exit, "detail": host.detail}
                for index, host in enumerate(self.members)
            ],
        }


@dataclass(frozen=True)
class GangPicture:
    """All attempts that have begun, oldest first; at least one."""

    attempts: tuple[AttemptPicture, ...]

    @property
    def current(self) -> AttemptPicture:
        """The last attempt."""
        return self.attempts[-1]

    @property
    def started_at(self) -> float | None:
        """Time at which the function first started; None if it has not."""
        return next((a.ready_at for a in self.attempts if a.ready_at is not None), None)

    def ran_s(self, now: float) -> float:
        """Return the seconds that the function ran in all attempts, without waits between them."""
        return sum(seconds for _, seconds in self._runs(now))

    def paid_s(self, slices: int, now: float) -> float:
        """Return the paid time of all attempts so far, in seconds of all slices: a second on half
        of the slices counts half. An attempt's time counts from when the function may start,
        because the events do not say when the machines started."""
        runs = self._runs(now)
        return sum(seconds * (len(run.slices) or slices) / slices for run, seconds in runs)

    def _runs(self, now: float) -> Iterator[tuple[AttemptPicture, float]]:
        ends = [*(attempt.began_at for attempt in self.attempts[1:]), now]
        for attempt, end in zip(self.attempts, ends, strict=True):
            if attempt.ready_at is not None:
                yield attempt, max((attempt.ended_at or end or now) - attempt.ready_at, 0.0)


def picture_of(
    events: Iterable[GangEvent], hosts: int, outcome: Outcome | None = None
) -> GangPicture:
    """Fold the events of a gang of `hosts` hosts. If there is an `outcome`, it overrides the events
    of the last attempt."""
    by_attempt: dict[int, list[GangEvent]] = {1: []}
    for event in events:
        by_attempt.setdefault(event.attempt, []).append(event)
        if event.kind is EventKind.RETRY:
            by_attempt.setdefault(event.attempt + 1, [])
    if outcome is not None:
        by_attempt.setdefault(outcome.attempt, [])
    attempts = [_fold_attempt(number, by_attempt[number], hosts) for number in sorted(by_attempt)]
    if outcome is not None:
        attempts[-1] = _apply_outcome(attempts[-1], outcome)
    return GangPicture(tuple(attempts))


def _fold_attempt(number: int, events: list[GangEvent], size: int) -> AttemptPicture:
    hosts = [HostPicture()] * size
    attempt = AttemptPicture(number, (), began_at=events[0].time if events else None)
    for event in events:
        if event.kind is EventKind.FORMED:
            attempt = replace(attempt, slices=event.slices, size=len(event.hosts))
        elif event.kind in (EventKind.SLICE_LOST, EventKind.AWAITED, EventKind.SLICE_BACK):
            attempt = _move_slices(attempt, event)
        elif event.kind is EventKind.PROGRAMS:
            attempt = replace(attempt, difference=event.detail)
        elif event.kind is EventKind.READY:
            attempt = replace(attempt, ready_at=event.time)
            _move(hosts, range(size), (HostState.PENDING, HostState.JOINED), HostState.RUNNING)
        elif event.kind is EventKind.STALLED:
            _move(hosts, event.hosts, (HostState.RUNNING,), HostState.STALLED)
        elif event.kind is EventKind.RESUMED:
            _move(hosts, range(size), (HostState.STALLED,), HostState.RUNNING)
        elif event.kind is EventKind.ENDED:
            attempt = replace(
                attempt,
                ended_at=event.time,
                verdict=event.verdict,
                reason=event.detail,
                blamed=event.hosts,
            )
        elif event.host is not None and 0 <= event.host < size:
            hosts[event.host] = _apply_event(hosts[event.host], event)
    return replace(attempt, hosts=tuple(hosts))


def _move_slices(attempt: AttemptPicture, event: GangEvent) -> AttemptPicture:
    concerned = set(event.slices)
    if event.kind is EventKind.SLICE_LOST:
        return replace(attempt, lost=tuple(sorted(concerned.union(attempt.lost))))
    if event.kind is EventKind.SLICE_BACK and not attempt.slices:  # Held by a session.
        return replace(attempt, lost=tuple(sorted(set(attempt.lost) - concerned)))
    awaited = set(attempt.awaited)
    awaited = awaited | concerned if event.kind is EventKind.AWAITED else awaited - concerned
    return replace(attempt, awaited=tuple(sorted(awaited)))


def _move(
    hosts: list[HostPicture], which: Iterable[int], of: tuple[HostState, ...], to: HostState
) -> None:
    for index in which:
        if 0 <= index < len(hosts) and hosts[index].state in of:
            hosts[index] = replace(hosts[index], state=to)


def _apply_event(host: HostPicture, event: GangEvent) -> HostPicture:
    if event.kind is EventKind.JOINED:
        return HostPicture(HostState.JOINED) if host.state is HostState.PENDING else host
    if event.kind not in (EventKind.REPORT, EventKind.LOST, EventKind.FAILURE):
        return host
    state = HostState.FAILED if event.exit is None else event.exit.kind.state
    if host.state is HostState.FAILED and state is not HostState.FAILED:
        return host
    return HostPicture(state, event.exit or host.exit, event.detail)


def _apply_outcome(attempt: AttemptPicture, outcome: Outcome) -> AttemptPicture:
    hosts = list(attempt.hosts)
    for report in outcome.reports:
        if 0 <= report.host < len(hosts):
            hosts[report.host] = HostPicture(report.exit.kind.state, report.exit, report.detail)
    started_at = min((r.started_at for r in outcome.reports if r.started_at), default=None)
    return replace(
        attempt,
        hosts=tuple(hosts),
        began_at=attempt.began_at or started_at,
        ready_at=attempt.ready_at or started_at,
        ended_at=outcome.ended_at or attempt.ended_at,
        verdict=outcome.verdict,
        reason=outcome.reason,
        blamed=outcome.blamed,
    )
