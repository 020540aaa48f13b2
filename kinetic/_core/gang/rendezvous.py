"""Waits after all hosts have joined the gang: for workers to start, for hosts to join one world of
JAX, for further failures. Pure.

In: the hosts' last heartbeats and failures, the time. Out: a `Delay` when hosts wait in vain or for
too long; whether more failures may follow.
"""

from __future__ import annotations

import math

from kinetic._core.exits import CONSEQUENCE_RANK, EVICTED_RANK
from kinetic._core.gang import blame
from kinetic._core.gang.members import Roster
from kinetic._core.gang.messages import Activity, GangSpec
from kinetic._core.outcome import HostReport, name_hosts
from kinetic._core.values import dataclass

_WINDOWS = 5
_TOGETHER_S = 0.5
"""An eviction this many seconds or more after the first one counts as its consequence."""


@dataclass(frozen=True)
class Delay:
    """A wait of hosts that takes too long.

    Attributes:
        waiting: the hosts that wait in JAX; empty while the function has not started.
        missing: the hosts for which they wait, if known.
        reason: the reason of the wait, for users.
        final: True if the wait cannot end by itself.
    """

    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    reason: str
    final: bool = False


class Rendezvous:
    """Watches hosts that start their workers and join JAX's world."""

    def __init__(self, spec: GangSpec, hosts: Roster, now: float) -> None:
        self._spec, self._hosts = spec, hosts
        self._submitted = now
        self._joining_since: float | None = None

    def delay(self, now: float) -> Delay | None:
        """Return the delay if hosts wait in vain or for too long, or None."""
        joining = self._hosts.in_state(Activity.JOINING)
        if not joining:
            self._joining_since = None
        elif self._joining_since is None:
            self._joining_since = now
        limit_s = self._spec.start_timeout_s
        starting = self._hosts.in_state(Activity.STARTING)
        if starting and now - self._submitted >= limit_s:
            return Delay((), starting, f"was not ready within {limit_s:g} s (start_timeout)")
        if self._joining_since is None:
            return None
        if returned := self._hosts.find_returned_alone():
            return Delay(joining, returned, self._in_vain(joining, returned), final=True)
        if now - self._joining_since >= limit_s:
            missing = tuple(host for host in self._hosts.find_busy() if host not in joining)
            return Delay(joining, missing, self._too_long(joining, missing))
        return None

    def _in_vain(self, joining: tuple[int, ...], returned: tuple[int, ...]) -> str:
        wait = "waits" if len(joining) == 1 else "wait"
        them = "it" if len(returned) == 1 else "them"
        return (
            f"{name_hosts(returned)} of {self._spec.hosts} returned without using JAX, and "
            f"{name_hosts(joining)} {wait} for {them} in JAX. Every host must use "
            "JAX, or none: call jax.devices() on all hosts first, or set joins_jax=False so that "
            "each host works on its own devices"
        )

    def _too_long(self, joining: tuple[int, ...], missing: tuple[int, ...]) -> str:
        whom = (
            f"{name_hosts(missing)}, which {'has' if len(missing) == 1 else 'have'} not joined"
            if missing
            else "each other"
        )
        return (
            f"{name_hosts(joining)} of {self._spec.hosts} {'has' if len(joining) == 1 else 'have'} "
            f"waited {self._spec.start_timeout_s:g} s in JAX for {whom} (start_timeout=). Let "
            "every host use JAX, or raise start_timeout"
        )


class FailureWindow:
    """Collects the failures of a gang before it is stopped, and decides how long to wait for more.

    Code that fails on one host often fails on all, so each such failure opens another window for
    the other hosts, up to `_WINDOWS` in all. The gang does not wait if the function will be called
    again, because the last attempt names all hosts. A consequence waits for its cause.

    Attributes:
        failures: (rank, host) in order of arrival.
        waits_since: (now, watched) at the first consequence that waits for its cause; None if none
            waits.
    """

    def __init__(self, peers_window_s: float, *, repeats: bool) -> None:
        self.failures: list[tuple[int, int]] = []
        self.waits_since: tuple[float, float] | None = None
        self._peers_window_s, self._repeats = peers_window_s, repeats
        self._peers_until: float | None = None
        self._peers_latest = 0.0
        self._evicted_at = math.inf

    def rank_of(self, report: HostReport, now: float) -> int:
        """Return the rank of a report. Evictions after the first are its consequences, because a
        Job that has lost a pod deletes the others."""
        rank = blame.rank_of(report)
        if rank == EVICTED_RANK and (rank, report.host) not in self.failures:
            self._evicted_at = min(self._evicted_at, now)
            rank = CONSEQUENCE_RANK if now > self._evicted_at + _TOGETHER_S else rank
        return rank

    @property
    def first(self) -> tuple[int, int]:
        """The rank and the host of the failure to blame."""
        return min(self.failures)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The hosts to blame, in order of arrival."""
        rank, _ = self.first
        return tuple(dict.fromkeys(host for r, host in self.failures if r == rank))

    @property
    def is_open(self) -> bool:
        """True if the gang waits for more failures."""
        return self.waits_for_peers or self.waits_since is not None

    @property
    def waits_for_peers(self) -> bool:
        """True if the gang waits for other hosts to fail in the same way."""
        return self._peers_until is not None

    def wait_for_peers(self, failed: HostReport, now: float) -> bool:
        """Open another window if other hosts may fail in the same way as this one; return True if
        so. Not for a host that died."""
        kind, window_s = failed.exit.kind, self._peers_window_s
        if not kind.code_failed or window_s <= 0 or (self._repeats and kind.retryable):
            return False
        if self._peers_until is None:
            self._peers_latest = now + _WINDOWS * window_s
        self._peers_until = min(now + window_s, self._peers_latest)
        return True

    def are_peers_late(self, now: float) -> bool:
        """True if the last window for other hosts is over."""
        return self._peers_until is not None and now >= self._peers_until
