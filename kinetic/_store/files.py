"""Opening what should be a regular file, in a folder in which anything may lie.

In: paths. Out: content; an error at once for a FIFO, a socket, a device or a folder, which could
keep a reader waiting forever.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)
"""What opening a socket, or a device that is not there, comes to."""


def opened(path: str | Path) -> FileIO:
    """Open a regular file for reading.

    Raises:
        IsADirectoryError: something else lies there.
    """
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _misplaced(path) from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise _misplaced(path)


def content(path: str | Path) -> bytes:
    """Return what is in a regular file.

    Raises:
        IsADirectoryError: something else lies there.
    """
    with opened(path) as file:
        return file.readall()


def _misplaced(path: str | Path) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, "It is not a regular file", str(path))
