"""Notifications of changed files, where the system has them: inotify, on Linux.

In: paths of files and folders. Out: a descriptor that becomes readable once one of them was written
to.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x2, 0x80, 0x100, 0x200
_WRITES = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_READ_BYTES = 1 << 16


class Changes:
    """Notifies of writes by processes of this machine. Without inotify, or with too many watches
    already, `watch` returns False."""

    def __init__(self) -> None:
        self.fd = -1

    def watch(self, path: Path) -> bool:
        """Return whether every write to this file, or to what is in this folder (not in folders
        there), notifies from now on; False if it does not exist. Idempotent."""
        with contextlib.suppress(ImportError, OSError, AttributeError):
            from kinetic._system.libc import LIBC  # most processes follow nothing

            if self.fd < 0:
                self.fd = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            return self.fd >= 0 and LIBC.inotify_add_watch(self.fd, bytes(path), _WRITES) >= 0
        return False

    def take(self) -> None:
        """Read all notifications: the descriptor is readable again after the next write."""
        if self.fd >= 0:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.fd, _READ_BYTES):
                    pass

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
