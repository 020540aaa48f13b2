"""A host's output repeated on the standard streams of its own process, for `kubectl logs` and other
readers of container output.

In: chunks of output. Out: the same bytes on two descriptors, on a best-effort basis; the log in the
store is complete.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

from kinetic._core.log_format import STDERR, STDOUT

KEEP_BYTES = 1 << 20
"""Output kept for a slow reader; more than that is dropped."""
CLOSE_S = 5.0
"""How long the last output may wait for its reader."""


class Mirror:
    """Writes in its own thread. Create it after the last fork; one thread uses it.

    Promises:
        1. `write` never waits, whatever reads the streams.
        2. What a slow reader misses is counted, and reported when there is room again.
        3. A closed or full stream loses its bytes, without other effects.
    """

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._out = out
        self._err = err
        self._waiting: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._added_bytes = self._taken_bytes = self._missed_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kinetic-mirror", daemon=True)
        self._thread.start()

    def write(self, stream: int, data: bytes) -> None:
        """Add a chunk."""
        if self._added_bytes - self._taken_bytes + len(data) > KEEP_BYTES:
            self._missed_bytes += len(data)
            return
        self._report_missed()
        self._add(stream, data)

    def _report_missed(self) -> None:
        if self._missed_bytes:
            self._add(STDERR, _notice_of_missed(self._missed_bytes))
            self._missed_bytes = 0

    def _add(self, stream: int, data: bytes) -> None:
        self._added_bytes += len(data)
        self._waiting.put((self._out if stream == STDOUT else self._err, data))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Wait until everything is written, but no longer than this."""
        self._report_missed()
        self._waiting.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            self._taken_bytes += len(chunk[1])
            _write(*chunk)


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
