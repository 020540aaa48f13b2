"""Tells the agent of this host that a checkpoint is being written, for those who watch the job.

In: a tier, steps. Out: a file in the host's folder, for as long as a save goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kinetic._core.preemption import SAVING, VARIABLE
from kinetic._in_job import slices

_POLL_S = 0.1
"""Agents look once a second."""


class SavingMark:
    """The mark of one tier, which saves one step after the other. Outside of a job it does nothing.

    Args:
        tier: "local" or "persistent".
    """

    def __init__(self, tier: str) -> None:
        folder = slices.read_variable(VARIABLE)
        self._path = Path(folder, SAVING[tier]) if folder else None
        self._step = -1
        self._lock = threading.Lock()

    def set(self, step: int) -> None:
        """A save of this step begins."""
        with self._lock:
            self._step = step
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.write_text(str(step))

    def clear(self) -> None:
        """It is over."""
        with self._lock:
            self._remove()

    def clear_after(self, is_saving: Callable[[], bool], limit_s: float) -> None:
        """Clear it in the background when the save is over, at the latest after this time."""
        if self._path is not None:
            args = self._step, is_saving, time.monotonic() + limit_s
            threading.Thread(
                target=self._await_end, args=args, name="kinetic-saving-mark", daemon=True
            ).start()

    def _await_end(self, step: int, is_saving: Callable[[], bool], until: float) -> None:
        while self._step == step and is_saving() and time.monotonic() < until:
            time.sleep(_POLL_S)
        with self._lock:
            if self._step == step:  # else the next save has begun
                self._remove()

    def _remove(self) -> None:
        self._step = -1
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
