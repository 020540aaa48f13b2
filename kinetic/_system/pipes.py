"""Named pipes: how any process of this user tells something to one that listens.

In: paths. Out: a descriptor to read from; whether somebody listens.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def listen(path: Path) -> int:
    """Make a pipe and return its end to read from, which does not block. It never ends: a reader
    would see the end whenever a writer leaves, if it were not a writer itself."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def connect(path: Path) -> int | None:
    """Return an end to write to, which does not block; None if there is no such pipe (yet), or
    nobody listens (any more)."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def tell(path: Path, text: str) -> bool:
    """Write a short text to a pipe; return whether somebody listens."""
    if (fd := connect(path)) is None:
        return False
    try:
        return os.write(fd, text.encode()) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def is_same(fd: int, inode: int) -> bool:
    """Whether a descriptor still leads to this inode: a program may have closed it."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
