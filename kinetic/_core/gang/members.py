"""The hosts of a gang: their joins, signs of life and ends. Pure.

In: single facts about hosts, the time. Out: lists of hosts that are silent, stalled, missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kinetic._core.exits import Exit
from kinetic._core.gang import blame
from kinetic._core.gang.messages import Activity, Heartbeat
from kinetic._core.outcome import HostReport
from kinetic.errors import UsageError

_MAX_WAITING = 8 * 1024
MISSING = "missing"
"""Displayed state of a host that has never given a sign of life."""


class Member:
    """The facts about one host.

    Attributes:
        heard_at: time of the last sign of life, by a clock that stops with the leader's process.
        connected: True if the host has a connection; only used before the host has joined.
    """

    __slots__ = (
        *("address", "announced", "beat", "connected", "incarnation", "report", "heard_at"),
        *("stacks", "stacks_request"),
    )

    def __init__(self) -> None:
        self.incarnation = ""
        self.address = ""
        self.heard_at = 0.0
        self.connected = False
        self.beat: Heartbeat | None = None
        self.report: HostReport | None = None
        self.announced: HostReport | None = None
        self.stacks = ""
        self.stacks_request = 0

    @property
    def joined(self) -> bool:
        """True if the host's agent has joined."""
        return bool(self.incarnation)

    @property
    def active(self) -> bool:
        """True if the host has joined, and has not reported its end."""
        return self.joined and self.report is None

    @property
    def busy(self) -> bool:
        """True if the host is active, and its function has not returned."""
        return self.active and not self.has_returned

    @property
    def has_returned(self) -> bool:
        """True if the last heartbeat says that the function has returned."""
        return self.beat is not None and self.beat.state is Activity.RETURNED

    def exit_if_lost(self, stop: Exit | None) -> Exit:
        """Return the exit of a host that is lost. After a stop, this is the exit of the stop: a
        cancelled job stays cancelled."""
        if self.announced is not None and stop is not Exit.CANCELLED:
            return self.announced.exit
        return Exit.AGENT_LOST if stop is None or (stop is Exit.STOPPED and self.joined) else stop

    @property
    def is_gathering(self) -> bool:
        """True if the worker starts, or waits in JAX for other hosts."""
        return self.beat is not None and self.beat.state in (Activity.STARTING, Activity.JOINING)

    @property
    def stood_s(self) -> float:
        """Seconds that the host has stood still, including while its worker starts or joins."""
        stands = self.beat is not None and (
            self.is_gathering or self.beat.state is Activity.RUNNING
        )
        return self.beat.stalled_s if self.beat is not None and stands else 0.0

    def last_heard(self, watched: float) -> str:
        """Return text on the host's last sign of life and its activity then. `watched` is the
        present time by the clock of `heard_at`."""
        return (
            "nothing was heard from it"
            if self.beat is None
            else f"it was {self.beat.state} {watched - self.heard_at:.0f} s ago"
        )

    def stacks_to_keep(self, how: Exit, *, hung: bool) -> str:
        """Return the stacks for the host's report: all threads if the host held a hung gang up,
        only the main thread if it waited for others, else ""."""
        if how is Exit.HANG:
            return self.stacks
        waited = hung and how is Exit.STOPPED
        return blame.main_thread(self.stacks)[:_MAX_WAITING] if waited else ""

    def describe(self, host: int, watched: float) -> dict[str, Any]:
        """Return the state of the host for display, as plain JSON."""
        beat = self.beat or Heartbeat(host)
        state = MISSING if not self.joined and self.beat is None else beat.state
        return {
            "host": host,
            "state": self.report.exit if self.report else state,
            "exit": self.report.exit if self.report else None,
            "rss_bytes": beat.rss_bytes,
            "cpu_s": beat.cpu_s,
            "log_bytes": beat.log_bytes,
            "last_line": beat.last_line,
            "saving_step": beat.saving_step,
            "stalled_s": beat.stalled_s,
            "silent_s": round(watched - self.heard_at, 3),
        }


class Roster:
    """All hosts of the gang, with running counts so that most calls cost O(1)."""

    def __init__(self, hosts: int) -> None:
        self._members = [Member() for _ in range(hosts)]
        self.joined = 0
        self.reported = 0
        self.returned = 0

    def __getitem__(self, host: int) -> Member:
        if not 0 <= host < len(self._members):
            raise UsageError(
                f"There is no host {host} in this job, which has hosts 0 to "
                f"{len(self._members) - 1}."
            )
        return self._members[host]

    def __len__(self) -> int:
        return len(self._members)

    def enroll(self, member: Member, incarnation: str, address: str) -> None:
        """Record the first join of a host."""
        member.incarnation, member.address = incarnation, address
        self.joined += 1

    def record(self, member: Member, report: HostReport) -> None:
        """Record the report of a host; a later report replaces an earlier one."""
        old, member.report = member.report, report
        self.reported += old is None
        self.returned += report.ok - (old is not None and old.ok)

    @property
    def has_reformed(self) -> bool:
        """True if the function ended on a host so that a slice can join."""
        return any(r.exit is Exit.REFORMED for r in self.reports)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses by host."""
        return tuple(m.address for m in self._members)

    @property
    def reports(self) -> tuple[HostReport, ...]:
        """The reports received so far, by host."""
        return tuple(m.report for m in self._members if m.report is not None)

    def find_standing(self, limit_s: float) -> tuple[int, ...]:
        """Return all busy hosts if each has stood still for `limit_s`, while starting or joining,
        too. Return () if any has moved, because the others may wait for it."""
        busy = self.find_busy()
        return busy if busy and all(self[i].stood_s >= limit_s for i in busy) else ()

    def find_silent(self, since: float) -> list[tuple[float, int]]:
        """Return (time, host) of hosts whose last sign of life is older than `since`."""
        return [each for each in self.find_in_touch() if each[0] < since]

    def find_in_touch(self) -> list[tuple[float, int]]:
        """Return (time, host) of all hosts that must give signs of life: those that have joined or
        connected. Hosts that have returned must do so until all have returned."""
        return [
            (m.heard_at, i)
            for i, m in enumerate(self._members)
            if (m.report is None or m.report.ok) and (m.joined or m.connected)
        ]

    def find_unheard(self) -> list[tuple[float, int]]:
        """Return (0.0, host) of hosts that have never connected, joined or ended."""
        return [
            (0.0, i)
            for i, m in enumerate(self._members)
            if m.report is None and not (m.joined or m.connected)
        ]

    def last_heard(self) -> list[tuple[float, int]]:
        """Return (time of the last sign of life, host) of all active hosts."""
        return [(m.heard_at, i) for i, m in enumerate(self._members) if m.active]

    def find_busy(self) -> tuple[int, ...]:
        """Return the hosts whose function may be running."""
        return self._find(lambda m: m.busy)

    def find_returned(self) -> tuple[int, ...]:
        """Return the hosts whose function has returned."""
        return self._find(lambda m: m.has_returned if m.report is None else m.report.ok)

    def find_stalled(self, limit_s: float) -> tuple[int, ...]:
        """Return the busy hosts stalled for this long, leaving out hosts that start or join."""
        return self._find(lambda m: m.busy and not m.is_gathering and m.stood_s >= limit_s)

    def in_state(self, *states: Activity) -> tuple[int, ...]:
        """Return the active hosts whose last heartbeat has one of these activities."""
        return self._find(lambda m: m.active and m.beat is not None and m.beat.state in states)

    def find_returned_alone(self) -> tuple[int, ...]:
        """Return the hosts whose function returned without ever joining JAX's world."""
        reports = (report for report in self.reports if report.ok and not report.joined_jax)
        return tuple(report.host for report in reports)

    def find_absent(self) -> tuple[int, ...]:
        """Return the hosts that have neither joined nor ended."""
        return self._find(lambda m: not m.joined and m.report is None)

    def answers(self, request: int) -> dict[int, str]:
        """Return the stacks of hosts that have answered this or a later request, by host."""
        return {i: m.stacks for i, m in enumerate(self._members) if m.stacks_request >= request > 0}

    def find_unanswered(self, request: int) -> tuple[int, ...]:
        """Return the busy hosts that have not answered this request."""
        return self._find(lambda m: m.busy and m.stacks_request < request)

    def _find(self, is_wanted: Callable[[Member], bool]) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self._members) if is_wanted(m))

    def describe(self, watched: float) -> dict[str, Any]:
        """Return the state of all hosts for display, as plain JSON."""
        return {
            "hosts": len(self),
            "joined": self.joined,
            "reported": self.reported,
            "returned": self.returned,
            "members": [m.describe(i, watched) for i, m in enumerate(self._members)],
        }
