"""The worker's standard streams, which the function may close, replace or break.

In: descriptors 0 to 2. Out: text streams over them; what waits in buffers, written; words of ours in the host's log. Called by
the worker. Nothing here trusts what `sys.stdout` has become.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys


def renew() -> None:
    """Open streams over the descriptors of this process; those that came with the fork belong to its parent."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(fd, mode + "b", closefd=False)
        errors = "backslashreplace" if fd else "replace"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def flush() -> None:
    """Write what waits in buffers: of the function's streams, of those that it replaced, and of the C library."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):  # The function's own stream may raise anything.
            stream.flush()  # type: ignore[union-attr]
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def say(text: str) -> None:
    """Put a line into the host's log, whatever `sys.stderr` is now."""
    flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
