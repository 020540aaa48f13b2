"""Files that tell the agent of this host which checkpoint is being written.

A file exists in the host's folder exactly while a save is in progress.
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
"""Seconds between two checks for the end of a save. The agent reads the mark once a second."""


class SavingMark:
    """Marks the step that one tier is saving; a no-op outside a job.

    Args:
        tier: "local" or "persistent".
    """

    def __init__(self, tier: str) -> None:
        folder = slices.read_variable(VARIABLE)
        self._path = Path(folder, SAVING[tier]) if folder else None
        self._step = -1
        self._lock = threading.Lock()

    def set(self, step: int) -> None:
        """Mark that a save of this step has begun."""
        with self._lock:
            self._step = step
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.write_text(str(step))

    def clear(self) -> None:
        """Mark that the save is over."""
        with self._lock:
            self._remove()

    def clear_after(self, is_saving: Callable[[], bool], limit_s: float) -> None:
        """Clear the mark in the background when `is_saving` returns False, or after the limit."""
        if self._path is not None:
            args = self._step, is_saving, time.monotonic() + limit_s
            threading.Thread(
                target=self._await_end, args=args, name="kinetic-saving-mark", daemon=True
            ).start()

    def _await_end(self, step: int, is_saving: Callable[[], bool], until: float) -> None:
        while self._step == step and is_saving() and time.monotonic() < until:
            time.sleep(_POLL_S)
        with self._lock:
            if self._step == step:  # Otherwise the next save has begun.
                self._remove()

    def _remove(self) -> None:
        self._step = -1
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
