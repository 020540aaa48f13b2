"""What hosts do together after they have joined the gang: start their workers, join one world of
JAX, fail in the same way.

In: the hosts' last heartbeats, how they failed, the time. Out: a `Delay` when some wait in vain or
for too long; whether more failures may follow. Pure.
"""

from __future__ import annotations

from kinetic._core.gang.members import Roster
from kinetic._core.gang.messages import Activity, GangSpec
from kinetic._core.outcome import HostReport, name_hosts
from kinetic._core.values import dataclass

_WINDOWS = 5


@dataclass(frozen=True)
class Delay:
    """Why hosts wait.

    Attributes:
        waiting: the hosts that wait in JAX; empty while the function has not started.
        missing: the hosts they wait for, if known.
        reason: for users.
        final: whether it cannot end by itself.
    """

    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    reason: str
    final: bool = False


class Rendezvous:
    """Watches hosts start and join JAX's world."""

    def __init__(self, spec: GangSpec, hosts: Roster, now: float) -> None:
        self._spec, self._hosts = spec, hosts
        self._submitted = now
        self._joining_since: float | None = None

    def delay(self, now: float) -> Delay | None:
        """Return why hosts wait for too long, or None."""
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
        if gone := self._hosts.find_returned_alone():
            return Delay(joining, gone, self._in_vain(joining, gone), final=True)
        if now - self._joining_since >= limit_s:
            missing = tuple(host for host in self._hosts.find_busy() if host not in joining)
            return Delay(joining, missing, self._too_long(joining, missing))
        return None

    def _in_vain(self, joining: tuple[int, ...], gone: tuple[int, ...]) -> str:
        wait = "waits" if len(joining) == 1 else "wait"
        return (
            f"{name_hosts(gone)} of {self._spec.hosts} returned without using JAX, and "
            f"{name_hosts(joining)} {wait} for {_pronoun_of(gone)} in JAX. Every host must use "
            "JAX, or none: call jax.devices() on all of them first, or set joins_jax=False so that "
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


class PeersWindow:
    """How long the gang waits for other hosts to fail as one just did: code that fails on one host
    often fails on all.

    Each failure opens another window for the rest, up to `_WINDOWS` in all. Nobody waits where the
    function is called again: the last attempt names them all.
    """

    def __init__(self, window_s: float, *, repeats: bool) -> None:
        self._window_s, self._repeats = window_s, repeats
        self._until: float | None = None
        self._latest = 0.0

    def may_follow(self, failed: HostReport, now: float) -> bool:
        """Return whether other hosts may fail as this one did. False if it died."""
        kind = failed.exit.kind
        is_last = not (self._repeats and kind.retryable)
        if not kind.code_failed or self._window_s <= 0 or not is_last:
            return False
        self._latest = now + _WINDOWS * self._window_s if self._until is None else self._latest
        self._until = min(now + self._window_s, self._latest)
        return True

    @property
    def waited_for(self) -> bool:
        """Whether the gang waits for others to fail as well."""
        return self._until is not None

    def are_late(self, now: float) -> bool:
        """Whether the last window is over."""
        return self._until is not None and now >= self._until


def _pronoun_of(hosts: tuple[int, ...]) -> str:
    return "it" if len(hosts) == 1 else "them"
