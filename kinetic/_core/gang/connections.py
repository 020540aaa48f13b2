"""Hosts whose connection has broken, or that are silent, and how long they may be.

In: breaks, reconnections, passing time. Out: hosts that have not come back in time. Pure.
"""

from __future__ import annotations

from kinetic._core.gang.members import Roster

_MOST_STEP_S = 0.25
"""What one step of time counts at most: after a pause of this process, what hosts have sent must
be read before they are given up."""


class BrokenConnections:
    """A network that drops a connection is forgiven; a process that was killed does not come
    back."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._left_s: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._left_s)

    def note_break(self, host: int) -> None:
        """The connection of this host has ended, and the host did not say why."""
        self._left_s.setdefault(host, self._patience_s)

    def note_repair(self, host: int) -> None:
        """The host is heard from again."""
        self._left_s.pop(host, None)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        for host in self._left_s:
            self._left_s[host] -= min(seconds, _MOST_STEP_S)

    def take_overdue(self) -> tuple[int, ...]:
        """Return the hosts that have not come back in time, and forget them."""
        found = tuple(sorted(host for host, left_s in self._left_s.items() if left_s <= 0))
        for host in found:
            del self._left_s[host]
        return found


class Silence:
    """Hosts that have not been heard from for too long, in watched time."""

    def __init__(self, hosts: Roster, limit_s: float) -> None:
        self._hosts = hosts
        self._limit_s = self._due = limit_s

    def take_overdue(self, watched: float) -> list[tuple[float, int]]:
        """Return the hosts that are silent, and when each was last heard from."""
        if watched < self._due:
            return []
        heard = self._hosts.find_in_touch()
        # Next due when the host that was heard from longest ago could be too late.
        self._due = min((seen for seen, _ in heard), default=watched) + self._limit_s
        return [(seen, host) for seen, host in heard if watched - seen > self._limit_s]
