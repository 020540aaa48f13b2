"""Named pipes, through which any process of this user can send text to a process that listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def listen(path: Path) -> int:
    """Create a pipe and return a descriptor for reading, which does not block. The descriptor is
    also open for writing, because a reader would otherwise see the end of the pipe whenever the
    last writer closes it."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def connect(path: Path) -> int | None:
    """Return a descriptor for writing, which does not block; None if there is no such pipe, or no
    process reads from it."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def tell(path: Path, text: str) -> bool:
    """Write a short text to a pipe, and return True if a process listens."""
    if (fd := connect(path)) is None:
        return False
    try:
        return os.write(fd, text.encode()) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def is_same(fd: int, inode: int) -> bool:
    """True if a descriptor still refers to this inode. A program may have closed and reused it."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False
