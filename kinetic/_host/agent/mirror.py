"""A host's output repeated on the standard streams of its own process, for `kubectl logs` and other
readers of container output.

In: chunks of output. Out: the same bytes on two descriptors, on a best-effort basis; the log in the
store is complete.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from kinetic._core.log_format import STDERR, STDOUT

KEEP_BYTES = 1 << 20
"""Output kept for a slow reader; more than that is dropped."""
CLOSE_S = 5.0
"""How long the last output may wait for its reader."""


class Mirror:
    """Writes in its own thread. Create it after the last fork.

    Promises:
        1. `write` never waits, whatever reads the streams.
        2. What a slow reader misses is counted, and reported when there is room again.
        3. A closed or full stream loses its bytes, without other effects.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._out = out
        self._err = err
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._missed_bytes = 0
        self._writes = False
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kinetic-mirror", daemon=True).start()

    def write(self, stream: int, data: bytes) -> None:
        """Add a chunk."""
        with self._changed:
            if self._waiting_bytes + len(data) > KEEP_BYTES:
                self._missed_bytes += len(data)
                return
            if self._missed_bytes:
                self._add(STDERR, _notice_of_missed(self._missed_bytes))
                self._missed_bytes = 0
            self._add(stream, data)
            self._changed.notify_all()

    def _add(self, stream: int, data: bytes) -> None:
        self._waiting.append((self._out if stream == STDOUT else self._err, data))
        self._waiting_bytes += len(data)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until everything is written, but no longer than this."""
        due = time.monotonic() + limit_s
        with self._changed:
            if self._missed_bytes:
                self._add(STDERR, _notice_of_missed(self._missed_bytes))
            self._closed = True
            self._changed.notify_all()
            while (self._waiting or self._writes) and (left := due - time.monotonic()) > 0:
                self._changed.wait(left)

    def _run(self) -> None:
        while chunk := self._next():
            _write(*chunk)

    def _next(self) -> tuple[int, bytes] | None:
        with self._changed:
            self._writes = False
            self._changed.notify_all()
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            fd, data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._writes = True
            return fd, data


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:  # The reader is gone, or the disk is full.
        return


def _notice_of_missed(size_bytes: int) -> bytes:
    return (
        f"kinetic: {size_bytes} bytes of output are missing here, because nobody read them in "
        "time; `kinetic jobs logs` has them.\n"
    ).encode()
