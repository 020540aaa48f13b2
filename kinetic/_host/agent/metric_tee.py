"""What a host logs on its way into the store: what the function sends through a pipe, and the
host's own figures.

In: frames (see `_core.metric_format`), heartbeats. Out: a log like that of the output, which begins
with the first frame: a job that logs nothing has none.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from pathlib import Path

from kinetic._core import layout
from kinetic._core.gang.messages import Heartbeat
from kinetic._core.log_format import STDOUT
from kinetic._core.metric_format import NO_STEP, Frame, find_end
from kinetic._core.metric_series import MEMORY, PROCESSORS, FigureCadence
from kinetic._host.agent.log_writer import DRAIN_BYTES, READ_BYTES, HostLog, open_log
from kinetic._host.identity import Identity
from kinetic._store import files
from kinetic._store.base import Store
from kinetic._system import pipes


def pipe_of(who: Identity) -> Path:
    """Return the pipe that a host's function logs into."""
    return Path(who.scratch) / f"metrics-pipe-{who.index}"


class MetricTee:
    """The pipe, read like one of the worker's streams.

    Attributes:
        fd: to read from.
        has_open_line: False: nobody waits for the rest of a frame.
        row_bytes: what the function has logged so far.
        trouble: why nothing can be logged, "" if it can: the host's folder takes no named pipes.
            The function runs all the same, and the host's own figures are kept.
    """

    has_open_line = False

    def __init__(self, who: Identity, store: Store, beside: Path) -> None:
        """`beside`: the file of the host's output, next to which its own are made."""
        self._pipe = pipe_of(who)
        self.trouble, self._writer = "", -1
        try:
            self.fd = pipes.listen(self._pipe)
        except OSError as error:
            self.trouble = f"{self._pipe}: {error.strerror}"
            self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._store = store
        self._key = layout.HostKeys(who.job_id, who.attempt, who.host).metrics
        path = beside.with_name(beside.name.replace("log", "metrics"))
        self._files = path, path.with_name(f"{path.name}.idx")
        if store.as_folder() is None:
            for left in self._files:  # By an attempt before: it is in the store.
                left.unlink(missing_ok=True)
        self._log: HostLog | None = None
        self._unopened_bytes = 0
        self._lock = threading.Lock()
        self._rest, self.row_bytes = b"", 0
        self._figures = FigureCadence(time.monotonic())
        self._epoch_s = time.time() - time.monotonic()  # A clock that is set must not move them.
        self._last: tuple[float, float] | None = None
        self._is_closed = False

    @property
    def lost_bytes(self) -> int:
        """What could not be kept, because the disk is full."""
        return self._unopened_bytes + (0 if self._log is None else self._log.lost_bytes)

    def pump(self) -> bool:
        """Read once; the pipe never ends."""
        self._read()
        return True

    def drain(self) -> None:
        """Read everything without waiting; what a child of the function goes on writing cannot make
        it endless."""
        left = DRAIN_BYTES
        while left > 0 and (size := self._read()):
            left -= size

    def flush(self) -> None:
        """Nothing: what is not whole is of no use."""

    def deliver(self) -> None:
        """Send everything to the store, unless the files lie in it."""
        if self._log is not None:
            self._log.deliver()

    def note(self, beat: Heartbeat) -> Heartbeat:
        """Keep the host's figures, if it is time; called by another thread."""
        now = time.monotonic()
        if beat.rss_bytes and self._figures.is_due(now):
            values = [array("d", [beat.rss_bytes])]
            if self._last is not None:
                used_s = max(beat.cpu_s - self._last[1], 0.0)
                values.append(array("d", [used_s / (now - self._last[0])]))
            names = (MEMORY, PROCESSORS)[: len(values)]
            times, steps = array("d", [self._epoch_s + now]), array("q", [NO_STEP])
            self._write(Frame(names, times, steps, values).encode())
            self._last = now, beat.cpu_s
        return beat

    def close(self) -> None:
        """Send the rest, and remove the pipe."""
        os.close(self.fd)
        if self.trouble:
            os.close(self._writer)
        self._pipe.unlink(missing_ok=True)
        with self._lock:
            self._is_closed = True
            if self._log is not None:
                self._log.close(holds_text=False)  # It has frames.

    def _read(self) -> int:
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        whole = self._rest + data
        end = find_end(whole)
        self._rest = whole[end:]
        self.row_bytes += end
        self._write(whole[:end])
        return len(data)

    def _write(self, data: bytes) -> None:
        with self._lock:
            if not data or self._is_closed:
                return
            try:
                if self._log is None:
                    self._log = open_log(self._store, self._key, self._files)
                self._log.write(STDOUT, data)
            except OSError as error:  # or the job was removed
                self._unopened_bytes += len(data) if error.errno in files.FULL else 0
