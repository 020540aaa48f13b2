"""What happened to a job: lines at the end of one object.

In: a store, lines. Out: the object, with all lines so far.

In a folder a line is appended. Elsewhere nothing can be, and a job has few events: a thread writes
the whole object anew, together with all lines that came while it wrote, so that whoever has
something to tell never waits for the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from kinetic._store.base import Store
from kinetic.errors import KineticError, NotFound

AGAIN_S = 1.0
"""After so long what the store did not take is tried again."""
_TRIES_AT_THE_END = 5


class EventLog:
    """The events of one job. Has one writer at a time. A full disk or a store out of reach loses
    events, but never ends a job that runs."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        folder = store.as_folder()
        self._path = None if folder is None else folder / key
        self._changed = threading.Condition()
        self._lines: bytes | None = None
        self._new = b""
        self._closing = False
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Add a line, which ends with a line end."""
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
        """Return when all lines are in the store, or the store has refused them often enough."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._thread, self._closing = None, False

    def _run(self) -> None:
        tries = _TRIES_AT_THE_END
        while tries:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._closing)
                if not self._new:
                    return
                new, self._new = self._new, b""
            if not self._put(new):
                with self._changed:
                    self._new = new + self._new
                    tries -= self._closing
                    self._changed.wait_for(lambda: False, AGAIN_S)

    def _put(self, new: bytes) -> bool:
        try:
            lines = self._before() if self._lines is None else self._lines
            self._store.put(self._key, lines + new)
        except KineticError:
            return False
        self._lines = lines + new
        return True

    def _before(self) -> bytes:
        """The events of earlier attempts, which another process may have written."""
        try:
            return self._store.get(self._key)
        except NotFound:
            return b""


def _append(path: Path, line: str) -> None:
    # One that is no regular file must not keep the leader waiting.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "a") as events:
        events.write(line)
