"""The file to which the function of this host appends its metrics, and the agent its own figures.

The file is in the store if that is a folder; otherwise the agent sends it to the store as it grows,
like output.
"""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path

from kinetic._core import layout
from kinetic._core.gang.messages import Heartbeat
from kinetic._core.metrics import MEMORY, NO_STEP, PROCESSORS, FigureCadence, Rows
from kinetic._host.identity import Identity
from kinetic._store.base import Store, folder_of
from kinetic._store.log_segments import SegmentWriter


class MetricFile:
    """The metrics of one host in one attempt.

    Attributes:
        path: path of the file.
    """

    def __init__(self, identity: Identity, store: Store) -> None:
        key = layout.HostKeys(identity.job_id, identity.attempt, identity.host).metrics
        root = folder_of(store)
        self.path = root / key if root else Path(identity.scratch) / f"metrics-{identity.index}"
        self._segments: SegmentWriter | None = None
        if root is None:
            self.path.unlink(missing_ok=True)  # Of an earlier attempt: it is in the store.
            self._segments = SegmentWriter(store, key, (self.path, self.path.with_suffix(".idx")))
            self._segments.start()
        self._sent_bytes = self._own_bytes = 0
        self._figures = FigureCadence(time.monotonic())
        self._epoch_s = time.time() - time.monotonic()  # Figures ignore later clock changes.
        self._last: tuple[float, float] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes that the function has logged so far."""
        return self._size() - self._own_bytes

    def note(self, beat: Heartbeat) -> None:
        """Append the host's figures from a heartbeat, if they are due, and send new rows."""
        now = time.monotonic()
        if beat.rss_bytes and self._figures.is_due(now):
            values = [array("d", [beat.rss_bytes])]
            if self._last is not None:
                used_s = max(beat.cpu_s - self._last[1], 0.0)
                values.append(array("d", [used_s / (now - self._last[0])]))
            names = (MEMORY, PROCESSORS)[: len(values)]
            self._last = now, beat.cpu_s
            times, steps = array("d", [self._epoch_s + now]), array("q", [NO_STEP])
            self._append(Rows(names, times, steps, values).encode())
        size = self._size()
        if self._segments is not None and size > self._sent_bytes:
            self._sent_bytes = size
            self._segments.wake()

    def deliver(self) -> None:
        """Send everything to the store, unless the file is in it."""
        if self._segments is not None:
            self._segments.flush()

    def close(self) -> None:
        """Send the rest."""
        if self._segments is not None:
            self._segments.close()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _append(self, line: bytes) -> None:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # The job was removed.
            return
        try:
            self._own_bytes += os.write(fd, line)
        except OSError:  # The disk is full.
            return
        finally:
            os.close(fd)
