"""A preemption as the agent of a host handles it: a host of its gang is taken away, or the budget
is used up.

SIGTERM of this host, or the leader, begins it. The function sees a file, and leaves files that say
whether it looks for preemptions itself and whether it has seen this one; its end counts
accordingly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from kinetic._core.agent import Eviction
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import HostView
from kinetic._core.preemption import NOTICE, NOTICED, POLLING
from kinetic._host.agent.exit_report import TAKEN_AWAY
from kinetic._host.identity import Identity

_SERVICE = "jax_enable_preemption_service"
_SAVED = HostView(
    stop=True,
    stop_exit=Exit.STOPPED,
    stop_reason="Its function ended because another host is taken away.",
)


class Preemption:
    """Whether a host of the gang is taken away; the first notice counts.

    Attributes:
        folder: of the host.
        is_known: a host of the gang is taken away.
        is_ours: it is this one.
    """

    def __init__(self, identity: Identity, environ: Mapping[str, str]) -> None:
        self.folder = Path(identity.scratch) / f"host-{identity.index}"
        self._in_gang = identity.hosts > 1
        self._has_service = environ.get(_SERVICE.upper(), "0").lower() not in ("", "0", "false")
        self._until = 0.0
        self.is_known = self.is_ours = False

    def begin(self, grace_s: float, *, ours: bool = False) -> bool:
        """Tell the function; return whether this is news."""
        self.is_ours |= ours
        if self.is_known:
            return False
        self.is_known, self._until = True, time.monotonic() + grace_s
        with contextlib.suppress(OSError):  # Without a folder there is no function yet.
            new = self.folder / f"{NOTICE}.new"
            new.write_text(str(self._until))
            new.replace(self.folder / NOTICE)
        return True

    def describe(self) -> Eviction:
        """Return what is known now."""
        if not self.is_known:
            return Eviction(is_ours=self.is_ours)
        return Eviction(
            is_known=True,
            is_ours=self.is_ours,
            function_polls=self.looks,
            saves_together=self.saves_together,
            left_s=self.left_s,
        )

    @property
    def left_s(self) -> float:
        """How long the function may run on."""
        return max(self._until - time.monotonic(), 0.0)

    @property
    def looks(self) -> bool:
        """Whether the function sees for itself that it is told, and is not to be interrupted."""
        return self.is_known and (self.folder / POLLING).exists()

    @property
    def saves_together(self) -> bool:
        """Whether the hosts save together, so that none may leave before all have: the process of
        host 0 serves JAX's world."""
        return self.is_known and self._in_gang and (self._has_service or self.looks)

    def overriding_stop(self, stop: HostView | None) -> HostView | None:
        """Return the reason that replaces the function's own end, after a stop of the gang; None
        if its own end stands."""
        if stop is not None and stop.stop_exit in (Exit.CANCELLED, Exit.OVER_BUDGET):
            return stop
        if self.is_ours:
            return TAKEN_AWAY
        return _SAVED if self._has_seen else stop

    @property
    def discards_end(self) -> bool:
        """True if a value must not count: the function stopped early for the preemption, or other
        hosts did not come so far."""
        return self._has_seen or (self.is_ours and self._in_gang)

    @property
    def _has_seen(self) -> bool:
        return (self.folder / NOTICED).exists()
