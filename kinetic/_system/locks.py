"""Locks of the kernel on files and folders. The kernel frees them however their holder ends.

This is the only module that calls `flock` and `lockf`. These two kinds of lock ignore each other.
All processes that have inherited the descriptor hold the lock of an *open file* or folder
(`flock`), until the last of them has closed it. One process holds a *record* lock (`lockf`): forks
do not hold it, an exec keeps it, and closing any descriptor of the file frees it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_FLOCK = "hhqqi4x"
"""`struct flock` of Linux: kind, origin, start, length, process."""


def hold(fd: int, *, shared: bool = False) -> None:
    """Lock an open file or folder, waiting until it is free.

    Raises:
        OSError: the file system has no such locks.
    """
    fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_hold(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder unless it is locked. Return True if this call locked it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


def hold_record(fd: int, *, start: int = 0, length: int = 0) -> None:
    """Take the record lock of some bytes of a file that is open for writing; wait until it is free.
    A length of 0 means all bytes from `start` on. The bytes need not exist."""
    fcntl.lockf(fd, fcntl.LOCK_EX, length, start)


def try_hold_record(fd: int, *, shared: bool = False) -> bool:
    """Lock a file unless another process has locked it. Return True if this call locked it."""
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.lockf(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


def is_record_held(path: Path) -> bool:
    """True if another process holds a file's record lock; False if the file does not exist.

    The call frees a record lock on this file that this process itself holds.
    """
    with _open_to_read(path) as fd:
        return fd is not None and not try_hold_record(fd, shared=True)


def record_holder(path: Path) -> int:
    """Return the id of the process that holds the exclusive record lock; 0 if it is free, or the
    process is unknown. On a shared disk the process may be another machine's."""
    holder = 0
    with _open_to_read(path) as fd:
        if fd is not None and sys.platform == "linux":
            # F_RDLCK ignores the shared lock that `is_record_held` holds for a moment.
            request = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, request))
            holder = 0 if kind == fcntl.F_UNLCK else int(pid)
    return holder


@contextlib.contextmanager
def _open_to_read(path: Path) -> Iterator[int | None]:
    """Yield a descriptor for reading; None if the file cannot be opened. Does not block, even for
    a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
