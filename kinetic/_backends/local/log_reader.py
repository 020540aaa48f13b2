"""Reading the output of one host from its two files, while it grows.

In: `log` and `log.idx` (see _core.log_format). Out: `LogChunk`s in order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kinetic._core.log_format import (
    FAILURE,
    RECORD,
    STDERR,
    STDOUT,
    LogChunk,
    Position,
    decode_records,
)

BATCH_BYTES = 4 << 20
BATCH_RECORDS = 1 << 14


class LogReader:
    """Follows the files of one host in one attempt. A file that does not exist yet is empty."""

    def __init__(
        self, host: int, log: Path, index: Path, *, attempt: int = 1, failures: bool = True
    ) -> None:
        self._host = host
        self._attempt = attempt
        self._failures = failures
        self.index = index
        self._paths = (log, index)
        self._log = self._index = -1
        self._log_at = 0
        self._index_at = 0
        self._damaged = False

    def start_at(self, offset: int) -> None:
        """Skip this many bytes."""
        self._log_at = offset
        if self._open() and self._index >= 0:
            self._index_at = _index_offset(self._index, offset)

    def here(self) -> LogChunk:
        """An empty chunk with the current position."""
        return self._chunk(STDOUT, 0, b"")

    def start_at_tail(self, lines: int) -> int:
        """Skip all but the last `lines` lines that exist; return how many those are."""
        if not self._open():
            return 0
        size = os.fstat(self._log).st_size if self._failures else self._end_of_output()
        self._log_at, found = _tail(self._log, lines, size)
        return found

    def _end_of_output(self) -> int:
        """Where the output ends, without the report of a failure after it."""
        end = os.fstat(self._log).st_size
        size = os.fstat(self._index).st_size if self._index >= 0 else 0
        for at in range(size // RECORD.size - 1, -1, -1):
            record = decode_records(os.pread(self._index, RECORD.size, at * RECORD.size))
            if not record or record[0][0] > end:
                return end
            if record[0][2] != FAILURE:
                return record[0][0]
        return 0 if size else end

    def read(self) -> Iterator[LogChunk]:
        """Yield new output, at most about `BATCH_BYTES`; nothing if there is none."""
        while records := self._records():
            chunks = self._batch(records)
            if (first := next(chunks, None)) is not None:
                yield first
                yield from chunks
                return

    def _batch(self, records: list[tuple[int, int, int]]) -> Iterator[LogChunk]:
        begin, last = self._log_at, self._end_of_batch(records)
        data = memoryview(os.pread(self._log, last - begin, begin))
        for end, time_ns, stream in records:
            if end > last:
                return
            self._index_at += RECORD.size
            if end > self._log_at:
                chunk = bytes(data[self._log_at - begin : end - begin])
                self._log_at = end
                if stream != FAILURE:
                    yield self._chunk(stream, time_ns, chunk)
                elif self._failures:
                    yield self._chunk(STDERR, time_ns, chunk)

    def _records(self) -> list[tuple[int, int, int]]:
        """Records that have not been read; those before the start (of a tail) are skipped."""
        if not self._open() or self._index < 0 or self._damaged:
            return []
        while not self._damaged:
            data = os.pread(self._index, BATCH_RECORDS * RECORD.size, self._index_at)
            records = decode_records(data)
            self._damaged = len(records) < len(data) // RECORD.size
            over = sum(
                1 for _ in itertools.takewhile(lambda record: record[0] <= self._log_at, records)
            )
            self._index_at += over * RECORD.size
            if over < len(records) or not records:
                return records[over:]
        return []

    def _end_of_batch(self, records: list[tuple[int, int, int]]) -> int:
        """Where this batch ends: at a record, and never past the bytes that exist."""
        most = self._log_at + BATCH_BYTES
        ends = [end for end, _, _ in records]
        return max((end for end in ends if self._log_at < end <= most), default=ends[0])

    def rest(self) -> Iterator[LogChunk]:
        """Yield bytes that no record points at: what is left if the index is damaged or was cut
        short."""
        if not self._open():
            return
        while chunk := self._take(BATCH_BYTES):
            yield self._chunk(STDOUT, 0, chunk)

    def close(self) -> None:
        """Close the files."""
        for fd in (self._log, self._index):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._log = self._index = -1

    def _chunk(self, stream: int, time_ns: int, data: bytes) -> LogChunk:
        return LogChunk(self._host, stream, time_ns, data, Position(self._attempt, self._log_at))

    def _take(self, size: int) -> bytes:
        data = os.pread(self._log, size, self._log_at)
        self._log_at += len(data)
        return data

    def _open(self) -> bool:
        """Open the files that exist by now; return whether there is output."""
        if self._log < 0:
            self._log = _open_if_there(self._paths[0])
        if self._index < 0:
            self._index = _open_if_there(self._paths[1])
        return self._log >= 0


def _open_if_there(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def _index_offset(fd: int, offset: int) -> int:
    """Where in the index the first record lies that ends after `offset` bytes of output; 0 if a
    record on the way is damaged."""
    low, high = 0, os.fstat(fd).st_size // RECORD.size
    while low < high:
        middle = (low + high) // 2
        found = decode_records(os.pread(fd, RECORD.size, middle * RECORD.size))
        if not found:
            return 0
        low, high = (low, middle) if found[0][0] > offset else (middle + 1, high)
    return low * RECORD.size


def _tail(fd: int, lines: int, size: int) -> tuple[int, int]:
    """The offset at which the last `lines` lines of the first `size` bytes begin, and how many
    those are."""
    at = size
    if lines <= 0 or size == 0:
        return size, 0
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
            return at + position + 1, lines
        wanted -= found
    return 0, lines - wanted + 1
