"""Hosts that stand still, or wait for one another for too long: stacks first, then a decision.

In: heartbeats, answers to requests for stacks, the time. Out: a `HangStep`: events to record,
whether to ask for stacks, whether to stop the gang. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from kinetic._core.events import EventKind
from kinetic._core.gang import blame, stops
from kinetic._core.gang.members import Member, Roster
from kinetic._core.gang.messages import Activity, GangSpec
from kinetic._core.gang.rendezvous import Delay, Rendezvous
from kinetic._core.gang.stops import Stop


class HangEvent(NamedTuple):
    """An event to record, without its time."""

    kind: EventKind
    detail: str
    hosts: tuple[int, ...] = ()


class HangStep(NamedTuple):
    """What to do next, in this order."""

    found: HangEvent | None = None
    asks: bool = False
    """Ask all hosts for their stacks, and pass the number of the request to `note_request`."""
    stop: Stop | None = None


_NOTHING = HangStep()


class HangWatch:
    """Watches a gang that runs. Heartbeats raise suspicions; `step` follows them up."""

    def __init__(self, spec: GangSpec, hosts: Roster, now: float) -> None:
        self._spec, self._hosts = spec, hosts
        self._rendezvous = Rendezvous(spec, hosts, now)
        self._gathering = self._suspected = self._standing = False
        self._still = self._knows_still = self._asks_still = False
        self._delay: Delay | None = None
        self._request = 0
        self._due = 0.0
        self.notice = ""
        """Sent to all hosts, once: some have returned, and all others stand still; or one stands
        still, and all others wait for it."""

    @property
    def asking(self) -> bool:
        """Whether answers are outstanding."""
        return self._request > 0

    def note_beat(self, member: Member) -> None:
        """A host has sent a heartbeat."""
        beat, limit_s = member.beat, self._spec.hang_timeout_s
        if beat is not None and beat.state in (Activity.STARTING, Activity.JOINING):
            self._gathering = True
        if limit_s is not None and member.has_stood(limit_s):
            self._suspected = True
        stands = member.has_stood(self._spec.still_notice_s)
        self._still = self._still or (stands and not self._knows_still)
        self._knows_still &= stands
        if not self.notice and member.has_stalled(self._spec.notice_after_s):
            self._standing = True

    def note_request(self, request: int, now: float) -> None:
        """The hosts were asked for their stacks."""
        self._request, self._due = request, now + self._spec.stacks_window_s

    def forget(self) -> None:
        """The gang is stopped: answers are no longer expected."""
        self._request = 0

    def step(self, now: float) -> HangStep:
        """Follow up the most serious suspicion."""
        if self._request:
            return self._decide(now)
        if self._suspected:
            return self._suspect()
        if self._standing:
            return self._notice_waiting()
        if self._still and not self.notice:
            return self._look_at_still()
        return self._watch_gathering(now) if self._gathering else _NOTHING

    def _suspect(self) -> HangStep:
        self._suspected = False
        stalled = self._find_stalled()
        if not stalled:
            return _NOTHING
        still = stops.describe_standstill(self._hosts, stalled, self._spec)
        return HangStep(HangEvent(EventKind.STALLED, still, stalled), asks=True)

    def _notice_waiting(self) -> HangStep:
        self._standing, limit_s = False, self._spec.notice_after_s
        gone, busy = self._hosts.find_returned(), self._hosts.find_busy()
        if not gone or not busy or self._hosts.find_stalled(limit_s) != busy:
            return _NOTHING
        self.notice = blame.notice_of(gone, busy, limit_s)
        return HangStep(HangEvent(EventKind.WAITING, self.notice))

    def _look_at_still(self) -> HangStep:
        """Ask for stacks, once for each time that all hosts stand still."""
        self._still = False
        if self._hosts.find_returned() or len(self._hosts) == 1 or not self._find_standing():
            return _NOTHING
        self._knows_still = self._asks_still = True
        return HangStep(asks=True)

    def _notice_still(self, running: dict[int, str]) -> HangStep:
        stalled = self._find_standing()
        held_up = blame.holding_up(running) if stalled else ()
        if not held_up:
            return _NOTHING
        self.notice = stops.notice_of_still(held_up, running, self._spec)
        return HangStep(HangEvent(EventKind.WAITING, self.notice))

    def _find_standing(self) -> tuple[int, ...]:
        return self._hosts.find_standing(self._spec.still_notice_s)

    def _watch_gathering(self, now: float) -> HangStep:
        self._delay = delay = self._rendezvous.delay(now)
        if delay is not None:
            hosts = delay.waiting or delay.missing
            return HangStep(HangEvent(EventKind.STALLED, delay.reason, hosts), asks=True)
        self._gathering = bool(self._hosts.in_state(Activity.STARTING, Activity.JOINING))
        return _NOTHING

    def _decide(self, now: float) -> HangStep:
        if self._hosts.find_unanswered(self._request) and now < self._due:
            return _NOTHING
        answers = self._hosts.answers(self._request)
        running = {host: answers.get(host, "") for host in self._hosts.find_busy()}
        self._request = 0
        if self._asks_still:
            self._asks_still = False
            return self._notice_still(running)
        if self._delay is not None:
            self._delay = None
            return self._decide_delay(self._rendezvous.delay(now), running)
        stalled = self._find_stalled()
        if not stalled:
            return HangStep(HangEvent(EventKind.RESUMED, "no host stands still any more"))
        still = stops.describe_standstill(self._hosts, stalled, self._spec)
        stop, stacks = stops.of_hang(running, self._hosts.find_returned(), stalled, still)
        return HangStep(HangEvent(EventKind.STACKS, stacks), stop=stop)

    def _decide_delay(self, delay: Delay | None, running: dict[int, str]) -> HangStep:
        if delay is None:
            return HangStep(HangEvent(EventKind.RESUMED, "no host waits any more"))
        stacks = HangEvent(EventKind.STACKS, blame.format_groups(running))
        return HangStep(stacks, stop=stops.of_delay(delay, running, self._spec))

    def _find_stalled(self) -> tuple[int, ...]:
        limit_s = self._spec.hang_timeout_s
        if limit_s is None:
            return ()
        return self._hosts.find_stalled(limit_s) or self._hosts.find_standing(limit_s)
