"""A host's output in a store without a folder: numbered segments, each written once.

In: the growing files of one host (see `_core.log_format`). Out: segments; from these, `LogChunk`s.

The agent writes the files to its own disk, as always, and a thread sends what was appended: at once
after a quiet moment, otherwise about every second. To keep a job of days at thousands of objects
instead of millions, the newest segment is rewritten with more output until it is large or old.
A killed agent loses at most the output since it last sent. A segment is named by its offset, so a
reader knows the name of the next one:

    <log>.d/<offset, 16 digits>     "KLS1", length of the records, the records, the output
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kinetic._core.log_format import (
    FAILURE,
    RECORD,
    STDERR,
    STDOUT,
    LogChunk,
    Position,
    decode_records,
    encode_record,
)
from kinetic._core.values import dataclass
from kinetic._store.base import Store
from kinetic._store.many import get_many
from kinetic.errors import CorruptRecord, NotFound, StoreError

_log = logging.getLogger("kinetic.storage")

PAUSE_S = 0.5
"""The pause between two segments, while there are few."""
FEW = 40
"""This many segments are written only once: the output of the first minute."""
LONGEST_PAUSE_S = 1.0
"""The pause after that. A bucket allows one write per second to the same object:
https://cloud.google.com/storage/quotas#objects"""
SEGMENT_BYTES = 4 << 20
GROWS_BYTES = 1 << 14
GROWS_S = 10.0
"""A segment that is larger or older than this is not rewritten any more."""
LOOK_EVERY_S = 0.5
"""How often an up-to-date reader looks for more."""
LOOK_SOON_S = 0.2
"""How often it looks while there is output: a line waits for the writer's pause and for this."""
FLOWS_S = 3.0
"""After this time without any, there is none."""
LOOK_BACK_EVERY_S = 10.0
"""How often it looks again at a segment that should be final: a slow store may have taken long to
write it."""
_MAGIC = b"KLS1"
_HEAD = struct.Struct("<4sI")
_Record = tuple[int, int, int]


def prefix(log_key: str) -> str:
    """Prefix of the segments of the log with this key."""
    return f"{log_key}.d"


def _key(log_key: str, offset: int) -> str:
    return f"{prefix(log_key)}/{offset:016d}"


@dataclass(frozen=True)
class Segment:
    """A part of a host's output.

    Attributes:
        begin: its offset in the output.
        records: end, time and stream of its chunks, as in the index.
        data: the output.
    """

    begin: int
    records: tuple[_Record, ...]
    data: bytes

    @property
    def end(self) -> int:
        """The offset of its end."""
        return self.begin + len(self.data)

    def encode(self) -> bytes:
        """Return the content of its object."""
        packed = b"".join(encode_record(*record) for record in self.records)
        return _HEAD.pack(_MAGIC, len(packed)) + packed + self.data

    @classmethod
    def decode(cls, begin: int, content: bytes) -> Segment:
        """Rebuild from the content of its object.

        Raises:
            CorruptRecord: it is not a segment.
        """
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            raise CorruptRecord(f"The segment of output at {begin} is damaged.")
        size = _HEAD.size + _HEAD.unpack_from(content)[1]
        return cls(begin, tuple(decode_records(content[_HEAD.size : size])), content[size:])

    def chunks(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield end, time, stream and output of each chunk; output without a record comes last, as
        stdout."""
        at = self.begin
        for end, time_ns, stream in self.records:
            if at < end <= self.end:
                yield end, time_ns, stream, self.data[at - self.begin : end - self.begin]
                at = end
        if at < self.end:
            yield self.end, 0, STDOUT, self.data[at - self.begin :]


def add_lines(store: Store, log_key: str, text: str, time_ns: int) -> None:
    """Add kinetic's own lines to the output of a host that writes no more.

    Raises:
        StoreError: the store does not accept them.
    """
    end, lead = 0, ""
    if keys := list(store.list(prefix(log_key))):
        end = int(keys[-1].rpartition("/")[2])
        last = Segment.decode(end, store.get(keys[-1]))
        end, lead = last.end, "" if last.data.endswith(b"\n") else "\n"
    data = f"{lead}{text}\n".encode(errors="backslashreplace")
    segment = Segment(end, ((end + len(data), time_ns, STDERR),), data)
    store.put(_key(log_key, end), segment.encode())


class SegmentWriter:
    """Sends what is appended to the files of one host.

    Args:
        store: the destination.
        log_key: the key that the log would have in a folder.
        files: `log` and `log.idx`, which it only reads.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        store: Store,
        log_key: str,
        files: tuple[Path, Path],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._log_key = log_key
        self._fds = tuple(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in files)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_new = threading.Event()
        self._clock = clock
        self._pending: Segment | None = None
        self._newest: Segment | None = None
        self._newest_since = 0.0
        self._base = 0
        self._log_at = self._index_at = self._sent = 0
        self._thread = threading.Thread(target=self._run, name="kinetic-segments", daemon=True)

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def flush(self, patience_s: float = 10.0, *, all_bytes: bool = False) -> bool:
        """Send everything appended so far; return False if the store did not accept it in time.

        `all_bytes` includes bytes without a record: use it when nothing more will be appended.
        """
        give_up_at = time.monotonic() + patience_s
        while not self._send(all_bytes=all_bytes):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(min(PAUSE_S, patience_s))
        return True

    def wake(self) -> None:
        """Something was appended."""
        self._is_new.set()

    def close(self, patience_s: float = 10.0) -> None:
        """Send the rest, and stop."""
        self._closing.set()
        self._is_new.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush(patience_s, all_bytes=True)
        for fd in self._fds:
            os.close(fd)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._is_new.wait()
            self._is_new.clear()
            if not self._send():
                self._is_new.set()
            self._closing.wait(PAUSE_S if self._sent < FEW else LONGEST_PAUSE_S)

    def _send(self, *, all_bytes: bool = False) -> bool:
        """Send what was appended; return whether the store accepted it. The rest is retried."""
        with self._lock:
            try:
                while (segment := self._pending or self._next(all_bytes)) is not None:
                    # Retried unchanged: the store may have accepted it despite the error. For the
                    # same reason it must not grow: the first try may still be under way.
                    is_first_try, self._pending = self._pending is None, segment
                    self._put(segment, may_grow=is_first_try)
                    self._pending = None
            except (StoreError, NotFound) as error:
                _log.info("output could not be sent, and will be sent later: %s", error)
                return False
            return True

    def _next(self, all_bytes: bool) -> Segment | None:
        """The next segment, or the newest one, grown: whole chunks only, unless `all_bytes`."""
        packed = os.pread(self._fds[1], (SEGMENT_BYTES // 64) * RECORD.size, self._index_at)
        records = decode_records(packed)
        most = self._log_at + SEGMENT_BYTES
        taken = [record for n, record in enumerate(records) if n == 0 or record[0] <= most]
        end = taken[-1][0] if taken else self._log_at
        if not taken and all_bytes:
            end = min(os.fstat(self._fds[0]).st_size, most)
        if end <= self._log_at:
            self._index_at += len(taken) * RECORD.size
            return None
        data = os.pread(self._fds[0], end - self._log_at, self._log_at)
        moved = tuple((at + self._base, time_ns, stream) for at, time_ns, stream in taken)
        newest = self._newest
        if newest is not None and self._clock() - self._newest_since < GROWS_S:
            return Segment(newest.begin, newest.records + moved, newest.data + data)
        self._newest = None
        return Segment(self._log_at + self._base, moved, data)

    def _put(self, segment: Segment, *, may_grow: bool) -> None:
        content = segment.encode()
        key = _key(self._log_key, segment.begin)
        newest = self._newest
        if newest is not None:
            self._store.put(key, content)
        elif not self._store.put(key, content, if_absent=True) and self._store.get(key) != content:
            # Written by an earlier agent that was killed: continue after its output.
            last = [*self._store.list(prefix(self._log_key))][-1]
            begin = int(last.rpartition("/")[2])
            self._base = Segment.decode(begin, self._store.get(last)).end - self._log_at
            return  # _next makes it again with the new base
        self._log_at = segment.end - self._base
        known = 0 if newest is None else len(newest.records)
        self._index_at += (len(segment.records) - known) * RECORD.size
        self._sent += 1
        if newest is None:
            self._newest_since = self._clock()
        grows = may_grow and self._sent >= FEW and len(segment.data) < GROWS_BYTES
        self._newest = segment if grows else None


class SegmentReader:
    """Follows the segments of one host; a log that does not exist yet is empty.

    Same interface as `LogReader`, which reads the files of a folder.
    """

    def __init__(
        self,
        store: Store,
        log_key: str,
        host: int,
        *,
        attempt: int = 1,
        failures: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._log_key = log_key
        self._host = host
        self._attempt = attempt
        self._failures = failures
        self._clock = clock
        self._at = 0
        self._begins: list[int] | None = None
        self._newest: int | None = None
        self._grew_at, self._looked_back_at = clock(), 0.0
        self._damaged: set[int] = set()

    def start_at(self, offset: int) -> None:
        """Skip this many bytes."""
        self._at = offset

    def start_at_tail(self, lines: int) -> int:
        """Skip all but the last `lines` existing lines; return how many those are."""
        tail, wanted, is_end = b"", lines + 1, not self._failures
        end = 0
        for segment in self._read_backwards():
            for at, _, stream, data in reversed([*segment.chunks()]):
                is_end = is_end and stream == FAILURE
                if is_end:
                    continue
                end = end or at
                tail = data + tail
                if tail.count(b"\n") >= wanted:
                    break
            if tail.count(b"\n") >= wanted:
                break
        shown = _last_lines(tail, lines)
        self._at = end - len(shown)
        return shown.count(b"\n") + (not shown.endswith(b"\n") and bool(shown))

    def _read_backwards(self) -> Iterator[Segment]:
        for begin in reversed(self._list()):
            with contextlib.suppress(NotFound, CorruptRecord):
                content = self._store.get(_key(self._log_key, begin))
                yield Segment.decode(begin, content)

    def here(self) -> LogChunk:
        """An empty chunk with the current position."""
        return self._chunk(STDOUT, 0, b"")

    def read(self) -> Iterator[LogChunk]:
        """Yield new output: one look at the store."""
        before = self._at
        for segment in self._new():
            self._newest = segment.begin if len(segment.data) < GROWS_BYTES else None
            for end, time_ns, stream, data in segment.chunks():
                if end <= self._at:
                    continue
                new = data[max(self._at - (end - len(data)), 0) :]
                self._at = end
                if stream != FAILURE:
                    yield self._chunk(stream, time_ns, new)
                elif self._failures:
                    yield self._chunk(STDERR, time_ns, new)
        if self._at != before:
            self._grew_at = self._clock()

    def rest(self) -> Iterator[LogChunk]:
        """Yield the rest, once nothing more is written."""
        self._looked_back_at = -LOOK_BACK_EVERY_S
        while chunks := list(self.read()):
            yield from chunks

    def close(self) -> None:
        """Nothing to close."""

    def _chunk(self, stream: int, time_ns: int, data: bytes) -> LogChunk:
        return LogChunk(self._host, stream, time_ns, data, Position(self._attempt, self._at))

    def _new(self) -> list[Segment]:
        """The next segments: if the reader is up to date the next one, and the one before if it may
        have grown; else as many as the store reads at once."""
        if self._begins is None:
            self._begins = _drop_before(self._list(), self._at)
        begins = self._begins[: max(self._store.calls_at_once, 1)] or self._newest_and_next()
        found = get_many(self._store, [_key(self._log_key, begin) for begin in begins])
        segments = []
        for begin in begins:
            content = found.get(_key(self._log_key, begin))
            if content is None:
                break
            try:
                segments.append(Segment.decode(begin, content))
            except CorruptRecord as damage:
                self._begins = [each for each in self._list() if each > begin]
                if begin not in self._damaged:
                    _log.warning("%s: %s It is skipped.", self._log_key, damage)
                self._damaged.add(begin)
                return segments or (self._new() if self._begins else [])
        self._begins = self._begins[len(segments) :]
        return segments

    def _newest_and_next(self) -> list[int]:
        now = self._clock()
        pause_s = 0.0 if now - self._grew_at < 2 * GROWS_S else LOOK_BACK_EVERY_S
        if self._newest is None or now - self._looked_back_at < pause_s:
            return [self._at]
        self._looked_back_at = now
        return [self._newest, self._at]

    def _list(self) -> list[int]:
        names = (key.rpartition("/")[2] for key in self._store.list(prefix(self._log_key)))
        return [int(name) for name in names if name.isdecimal()]


def _drop_before(begins: Sequence[int], offset: int) -> list[int]:
    """Drop all before the last that begins at or before the offset."""
    before = [begin for begin in begins if begin <= offset]
    return [*before[-1:], *(begin for begin in begins if begin > offset)]


def _last_lines(data: bytes, lines: int) -> bytes:
    """The last lines of the data; the last one may have no end."""
    if lines <= 0:
        return b""
    at = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        at = data.rfind(b"\n", 0, max(at, 0))
        if at < 0:
            return data
    return data[at + 1 :]
