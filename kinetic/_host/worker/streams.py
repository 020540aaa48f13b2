"""The worker's standard streams, which the function may close, replace or break. No function of
this module relies on `sys.stdout`."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time
from typing import TextIO

from kinetic._system.libc import LIBC

READER_S = 0.2
"""Longest wait for the reader when a writer changes streams; usually it takes 50 microseconds."""
LONGEST_PAUSE_S = 0.002


def renew() -> None:
    """Open new text streams over descriptors 0 to 2; the inherited streams belong to the parent."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(fd, mode + "b", closefd=False)
        errors = "backslashreplace" if fd else "replace"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    keep_order(sys.stdout, sys.stderr)


def keep_order(out: TextIO, err: TextIO) -> None:
    """Keep the order of writes that alternate between two streams, each with its own pipe.

    One reader reads both pipes. A write to one stream first waits until the other stream's pipe is
    empty, if the previous write went there; a second write to the same stream does not wait. A
    wait takes at most `READER_S`, and if nobody reads, only the first write waits. A descriptor
    that is no longer the pipe is ignored.
    """
    pipes = {id(stream): _Pipe(stream.fileno()) for stream in (out, err)}

    def prepare(stream: TextIO, other: TextIO) -> None:
        def turn(text: str) -> int:
            if vars(stream).get("write") is turn:
                vars(stream).pop("write", None)  # Another thread may have removed it.
                pipes[id(other)].await_reader()
                prepare(other, stream)
            return type(stream).write(stream, text)

        if "write" not in vars(stream):  # Otherwise the function has replaced it.
            stream.write = turn  # type: ignore[method-assign]

    prepare(out, err)
    prepare(err, out)


class _Pipe:
    """The write end of a pipe, identified by the file that its descriptor had at the start."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = _file_of(fd)
        self._left_unread = 0

    def await_reader(self) -> None:
        """Wait until the pipe is empty, at most `READER_S` seconds; after that, do not wait until
        the reader has read more."""
        unread = self._unread()
        if unread == 0 or unread >= self._left_unread > 0:
            self._left_unread = unread
            return
        begun, pause_s, waited_s = time.monotonic(), 0.0, 0.0
        while unread and waited_s < READER_S:
            time.sleep(pause_s)
            waited_s = time.monotonic() - begun
            pause_s = min(waited_s / 4, LONGEST_PAUSE_S)
            unread = self._unread()
        self._left_unread = unread

    def _unread(self) -> int:
        try:
            if _file_of(self._fd) != self._file:
                return 0
            return int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4), sys.byteorder)
        except OSError:
            return 0


def _file_of(fd: int) -> tuple[int, int] | None:
    try:
        info = os.fstat(fd)
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if stat.S_ISFIFO(info.st_mode) else None


def flush() -> None:
    """Flush `sys.stdout` and `sys.stderr`, also replaced ones, and the C library's streams."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):  # The function's own stream may raise anything.
            stream.flush()  # type: ignore[union-attr]
    with contextlib.suppress(Exception):
        LIBC.fflush(None)


def say(text: str) -> None:
    """Write a line to the host's log, even if the function has replaced `sys.stderr`."""
    flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
