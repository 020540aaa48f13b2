"""Reading the output of one host from its two files, while it grows.

In: `log` and `log.idx` (see job.logformat). Out: `LogChunk`s in order. Called by the local backend.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kinetic.job.logformat import RECORD, STDOUT, LogChunk, decode_records

BATCH_BYTES = 4 << 20


class LogReader:
    """Follows the files of one host. A file that does not exist yet is empty."""

    def __init__(self, host: int, log: Path, index: Path) -> None:
        self._host = host
        self._paths = (log, index)
        self._log = self._index = -1
        self._log_at = 0
        self._index_at = 0
        self._damaged = False

    def start_at_tail(self, lines: int) -> None:
        """Skip all but the last `lines` lines that are there now."""
        if not self._open():
            return
        self._log_at = _tail_offset(self._log, lines)

    def read(self) -> Iterator[LogChunk]:
        """Yield what is new, at most about `BATCH_BYTES` of it; nothing when nothing is."""
        if not self._open() or self._index < 0:
            return
        data = os.pread(self._index, BATCH_BYTES // 256 * RECORD.size, self._index_at)
        records = [] if self._damaged else decode_records(data)
        self._damaged = self._damaged or len(records) < len(data) // RECORD.size
        read = 0
        for end, time_ns, stream in records:
            self._index_at += RECORD.size
            if end <= self._log_at:
                continue
            chunk = self._take(end - self._log_at)
            yield LogChunk(self._host, stream, time_ns, chunk)
            read += len(chunk)
            if read >= BATCH_BYTES:
                return

    def rest(self) -> Iterator[LogChunk]:
        """Yield bytes that no record points at: all that is left when the index is damaged or was cut short."""
        if not self._open():
            return
        while chunk := self._take(BATCH_BYTES):
            yield LogChunk(self._host, STDOUT, 0, chunk)

    def close(self) -> None:
        """Close the files."""
        for fd in (self._log, self._index):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._log = self._index = -1

    def _take(self, size: int) -> bytes:
        data = os.pread(self._log, size, self._log_at)
        self._log_at += len(data)
        return data

    def _open(self) -> bool:
        """Open what is there by now; return whether there is output."""
        if self._log < 0:
            self._log = _open_if_there(self._paths[0])
        if self._index < 0:
            self._index = _open_if_there(self._paths[1])
        return self._log >= 0


def _open_if_there(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _tail_offset(fd: int, lines: int) -> int:
    """Offset at which the last `lines` lines begin."""
    at = size = os.fstat(fd).st_size
    if lines <= 0:
        return size
    wanted = lines
    first = True
    while at > 0:
        step = min(1 << 16, at)
        at -= step
        data = os.pread(fd, step, at)
        if first and data.endswith(b"\n"):
            wanted += 1
        first = False
        found = data.count(b"\n")
        if found >= wanted:
            position = len(data)
            for _ in range(wanted):
                position = data.rfind(b"\n", 0, position)
            return at + position + 1
        wanted -= found
    return 0
