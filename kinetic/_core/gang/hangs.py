"""Detection of hosts that stand still, or wait for one another for too long. Pure.

In: heartbeats, answers to requests for stacks, the time. Out: a `HangStep`: an event to record,
whether to ask for stacks, whether to stop the gang. A gang is never stopped before its hosts were
asked for their stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kinetic._core.events import EventKind
from kinetic._core.gang import blame, stops
from kinetic._core.gang.members import Member, Roster
from kinetic._core.gang.messages import GangSpec
from kinetic._core.gang.programs import Difference, ProgramWatch
from kinetic._core.gang.rendezvous import Rendezvous
from kinetic._core.gang.stops import Stop


class HangEvent(NamedTuple):
    """An event to record, without its time."""

    kind: EventKind
    detail: str
    hosts: tuple[int, ...] = ()


class HangStep(NamedTuple):
    """The next actions, in this order: record `event`; if `asks`, ask all hosts for their stacks,
    and pass the number of the request to `note_request`; stop the gang."""

    event: HangEvent | None = None
    asks: bool = False
    stop: Stop | None = None


_NOTHING = HangStep()


class HangWatch:
    """Watches a running gang for hosts that stand still, with three thresholds.

    After `notice_after_s`, a notice says that all running hosts may wait for hosts that have
    returned. After `still_notice_s`, hosts that all stand still are asked for their stacks, and a
    notice names the hosts that hold the others up. After `hang_timeout_s`, the gang is stopped, and
    stacks decide which hosts are to blame.
    """

    def __init__(self, spec: GangSpec, hosts: Roster, programs: ProgramWatch, now: float) -> None:
        self._spec, self._hosts, self._programs = spec, hosts, programs
        self._rendezvous = Rendezvous(spec, hosts, now)
        self._gathering = False
        self._longest_s = 0.0
        """Longest time that a host has stood still, according to heartbeats since the last step."""
        self._has_asked = False
        """True if hosts were asked for stacks because all stand still, and none has moved since."""
        self._request = 0
        self._due = 0.0
        self._follow_up: Callable[[dict[int, str], float], HangStep] = self._decide_hang
        """The function that handles the answers to the request."""
        self.notice = ""
        """The notice to all hosts, at most one per attempt: some hosts have returned and all others
        stand still, or one stands still and all others wait for it. "" if none was sent."""

    @property
    def present_notice(self) -> str:
        """The notice if all running hosts still stand still, else ""."""
        return self.notice if self._hosts.find_standing(self._spec.notice_after_s) else ""

    @property
    def awaits_stacks(self) -> bool:
        """True if hosts were asked for their stacks and some have not answered."""
        return self._request > 0

    def note_beat(self, member: Member) -> None:
        """Note a host's heartbeat."""
        self._gathering |= member.is_gathering
        self._longest_s = max(self._longest_s, member.stood_s)
        self._has_asked &= member.stood_s >= self._spec.still_notice_s

    def note_request(self, request: int, now: float) -> None:
        """Note that the hosts were asked for their stacks."""
        self._request, self._due = request, now + self._spec.stacks_window_s

    def forget(self) -> None:
        """Expect no more answers, because the gang is stopped."""
        self._request = 0

    def step(self, now: float) -> HangStep:
        """Return the next actions: handle answers, or follow up the most serious suspicion."""
        spec, hosts = self._spec, self._hosts
        if self._request:
            if hosts.find_unanswered(self._request) and now < self._due:
                return _NOTHING
            answers = hosts.answers(self._request)
            self._request = 0
            return self._follow_up({host: answers.get(host, "") for host in hosts.find_busy()}, now)
        longest_s, self._longest_s = self._longest_s, 0.0
        limit_s = spec.hang_timeout_s
        if limit_s is not None and longest_s >= limit_s and (stalled := self._find_stalled()):
            still = stops.describe_standstill(hosts, stalled, spec)
            return self._ask(self._decide_hang, HangEvent(EventKind.STALLED, still, stalled))
        if not self.notice and longest_s >= spec.notice_after_s:
            returned, busy = hosts.find_returned(), hosts.find_busy()
            if returned and busy and hosts.find_stalled(spec.notice_after_s) == busy:
                cause = self._programs.find_difference(now, stands=True, returned=returned)
                seconds = spec.notice_after_s
                self.notice = blame.notice_of(returned, busy, seconds, cause and cause.sentence)
                return HangStep(HangEvent(EventKind.WAITING, self.notice))
        if not (self.notice or self._has_asked) and longest_s >= spec.still_notice_s:
            stands = len(hosts) > 1 and hosts.find_standing(spec.still_notice_s)
            if stands and not hosts.find_returned():
                self._has_asked = True
                return self._ask(self._notice_still)
        if not self._gathering:
            return _NOTHING
        if (delay := self._rendezvous.delay(now)) is not None:
            late = HangEvent(EventKind.STALLED, delay.reason, delay.waiting or delay.missing)
            return self._ask(self._decide_delay, late)
        self._gathering = any(hosts[i].is_gathering for i in hosts.find_busy())
        return _NOTHING

    def _ask(
        self,
        follow_up: Callable[[dict[int, str], float], HangStep],
        event: HangEvent | None = None,
    ) -> HangStep:
        self._follow_up = follow_up
        return HangStep(event, asks=True)

    def _decide_hang(self, running: dict[int, str], now: float) -> HangStep:
        stalled = self._find_stalled()
        if not stalled:
            return HangStep(HangEvent(EventKind.RESUMED, "no host stands still any more"))
        still = stops.describe_standstill(self._hosts, stalled, self._spec)
        cause = self._find_difference(running, now)
        stop, stacks = stops.of_hang(running, self._hosts.find_returned(), stalled, still, cause)
        return HangStep(HangEvent(EventKind.STACKS, stacks), stop=stop)

    def _decide_delay(self, running: dict[int, str], now: float) -> HangStep:
        delay = self._rendezvous.delay(now)
        if delay is None:
            return HangStep(HangEvent(EventKind.RESUMED, "no host waits any more"))
        stacks = HangEvent(EventKind.STACKS, blame.format_groups(running))
        return HangStep(stacks, stop=stops.of_delay(delay, running, self._spec))

    def _find_difference(self, running: dict[int, str], now: float) -> Difference | None:
        """Return the difference between the programs of the hosts. A program that only some hosts
        have called counts as a difference if all running hosts wait in JAX."""
        stands, returned = blame.all_wait(running), self._hosts.find_returned()
        return self._programs.find_difference(now, stands=stands, returned=returned)

    def _notice_still(self, running: dict[int, str], now: float) -> HangStep:
        stands = self._hosts.find_standing(self._spec.still_notice_s)
        difference = self._find_difference(running, now) if stands else None
        cause = blame.describe_waits(running) if difference is None else difference.sentence
        if stands and cause:
            self.notice = stops.notice_of_still(stands, running, self._spec, cause)
            return HangStep(HangEvent(EventKind.WAITING, self.notice))
        held_up = blame.holding_up(running) if stands else ()
        if not held_up:
            return _NOTHING
        self.notice = stops.notice_of_still(held_up, running, self._spec)
        return HangStep(HangEvent(EventKind.WAITING, self.notice))

    def _find_stalled(self) -> tuple[int, ...]:
        limit_s = self._spec.hang_timeout_s
        if limit_s is None:
            return ()
        return self._hosts.find_stalled(limit_s) or self._hosts.find_standing(limit_s)
