"""The agent's side of a preemption: a host of its gang is taken away, or the budget is used up.

A preemption begins with SIGTERM to this host or with a notice from the leader. The agent writes a
notice file for the function. The function's own files say whether it polls for preemptions, and
whether it has read this notice, which decides if its value counts.
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
    """The preemption of a gang, if one has begun; the first notice counts.

    Attributes:
        folder: the host's folder.
        is_known: the preemption has begun.
        is_ours: this host itself is taken away.
    """

    def __init__(self, identity: Identity, environ: Mapping[str, str]) -> None:
        self.folder = Path(identity.scratch) / f"host-{identity.index}"
        self._in_gang = identity.hosts > 1
        self._has_service = environ.get(_SERVICE.upper(), "0").lower() not in ("", "0", "false")
        self._until = 0.0
        self.is_known = self.is_ours = False

    def begin(self, grace_s: float, *, ours: bool = False) -> bool:
        """Begin the preemption, and give the function `grace_s` seconds; return False if it had
        begun before. `ours` says that this host itself is taken away."""
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
        """Return the state of the preemption, for the agent's machine."""
        if not self.is_known:
            return Eviction(is_ours=self.is_ours)
        return Eviction(
            is_known=True,
            is_ours=self.is_ours,
            function_polls=self.function_polls,
            saves_together=self.saves_together,
            left_s=self.left_s,
        )

    @property
    def left_s(self) -> float:
        """Seconds for which the function may run on."""
        return max(self._until - time.monotonic(), 0.0)

    @property
    def function_polls(self) -> bool:
        """True if the function polls for preemptions itself and must not be interrupted."""
        return self.is_known and (self.folder / POLLING).exists()

    @property
    def saves_together(self) -> bool:
        """True if the hosts save a checkpoint together. Then no host may end before all have saved,
        because the process of host 0 serves JAX's world."""
        return self.is_known and self._in_gang and (self._has_service or self.function_polls)

    def overriding_stop(self, stop: HostView | None) -> HostView | None:
        """Return the view that decides how the function's end is reported when the gang was
        stopped; None if the function's own end is reported. `stop` is the coordinator's view if it
        has stopped the host, else None."""
        if stop is not None and stop.stop_exit in (Exit.CANCELLED, Exit.OVER_BUDGET):
            return stop
        if self.is_ours:
            return TAKEN_AWAY
        return _SAVED if self._has_seen else stop

    @property
    def discards_end(self) -> bool:
        """True if the function's value must be discarded: it stopped early for the preemption, or
        this host is lost and the others have not finished."""
        return self._has_seen or (self.is_ours and self._in_gang)

    @property
    def _has_seen(self) -> bool:
        return (self.folder / NOTICED).exists()
