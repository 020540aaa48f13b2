"""The events of a job: lines appended to one object.

In a folder, each line is appended to a file. Other stores cannot append, but a job has few events:
a thread rewrites the whole object with the new lines, so writers never wait for the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from kinetic._store import files
from kinetic._store.base import Store, folder_of
from kinetic.errors import KineticError, NotFound

GATHER_S = 0.05
"""Seconds to wait for more lines before a write: events come in groups."""
RETRY_PAUSE_S = 1.0
"""Seconds before a failed write is repeated."""
_FINAL_TRIES = 5


class EventLog:
    """The events of one job, for one writer at a time. A full disk or an unreachable store loses
    events but never ends a running job."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        folder = folder_of(store)
        self._path = None if folder is None else folder / key
        self._changed = threading.Condition()
        self._lines: bytes | None = None
        self._new = b""
        self._closing = False
        self._thread: threading.Thread | None = None

    def resume(self, lines: bytes) -> None:
        """Write after these lines, which somebody has just read from the store."""
        self._lines = lines

    def write(self, line: str) -> None:
        """Append a line, which ends with a newline."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                _append(self._path, line)
            return
        with self._changed:
            self._new += line.encode()
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kinetic-events", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Wait until all lines are in the store, or writing has failed too often."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._thread, self._closing = None, False

    def _run(self) -> None:
        tries = _FINAL_TRIES
        while tries:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closing)
                if not self._new:
                    return
                self._changed.wait_for(lambda: self._closing, GATHER_S)
                new, self._new = self._new, b""
            if not self._put(new):
                with self._changed:
                    self._new = new + self._new
                    tries -= self._closing
                    self._changed.wait_for(lambda: False, RETRY_PAUSE_S)

    def _put(self, new: bytes) -> bool:
        try:
            lines = self._read_earlier() if self._lines is None else self._lines
            self._store.put(self._key, lines + new)
        except KineticError:
            return False
        self._lines = lines + new
        return True

    def _read_earlier(self) -> bytes:
        """Return the events of earlier attempts, which another process may have written."""
        try:
            return self._store.get(self._key)
        except NotFound:
            return b""


def _append(path: Path, line: str) -> None:
    # O_NONBLOCK: if the path is a FIFO, opening it must not block the leader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        files.write_all(fd, line.encode())
    finally:
        os.close(fd)
