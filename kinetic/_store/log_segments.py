"""A host's output in the store: two files in a folder, or numbered objects.

An agent always writes files. If the store is not a folder, the files are on the host's disk, and a
thread sends new output to the store: at once after a quiet moment, otherwise about every second, or
as fast as the store answers if its calls are free. The newest segment is rewritten with more output
until it is large or old. So a job of several days makes thousands of objects instead of millions,
and a follower reads all new output in one poll. A killed agent loses the output that was not sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kinetic._core.log_format import RECORD, STDERR, Record, Segment, decode_records
from kinetic._store.base import Store, folder_of, is_unmetered, pause_of
from kinetic._store.many import get_many
from kinetic.errors import CorruptRecord, NotFound, StoreError

_log = logging.getLogger("kinetic.storage")

PAUSE_S = 0.5
"""The pause between the first `FEW` segments, in seconds."""
FEW = 40
"""Number of first segments, about a minute of output, never rewritten if calls cost money."""
LONGEST_PAUSE_S = 1.0
"""The pause between later segments. A bucket allows one write per second to the same object:
https://cloud.google.com/storage/quotas#objects"""
SEGMENT_BYTES = 4 << 20
GROWS_BYTES = 1 << 14
GROWS_S = 10.0
"""Size in bytes, and age in seconds, above which a segment is not rewritten with more output."""
REREAD_EVERY_S = 10.0
"""Seconds after which a reader reads the newest segment again, although it should not change any
more: a slow store may have written it late."""
RECORDS_AT_ONCE = SEGMENT_BYTES // 64
BACK_BYTES = 1 << 16
"""Size in bytes of a piece when a file is read from its end."""


def open_stored_log(store: Store, log_key: str) -> FileLog | ObjectLog:
    """Return the output of one host in one attempt, which may not exist yet.

    `log_key` is the log's key in a store that is a folder; in a bucket it is the prefix of the
    log's objects. The result's `read` returns some of the segments after an offset, in order, and
    none at the end. With `to_end`, for after the writer has ended, it also returns bytes that the
    index does not list.
    """
    if (folder := folder_of(store)) is None:
        return ObjectLog(store, log_key)
    return FileLog(folder / log_key, folder / f"{log_key}.idx")


class FileLog:
    """Output in a folder: one growing segment in two files. Bytes that have no record, because the
    index is damaged or truncated, are read only with `to_end`. A log that has no index, such as
    metrics, is read as it is."""

    def __init__(self, log: Path, index: Path) -> None:
        self._paths = (log, index)
        self._log = self._index = -1
        self._buffered: list[Record] = []
        self._offset = self._index_at = 0
        self._open()

    def read(self, offset: int, *, to_end: bool = False) -> Sequence[Segment]:
        """Return the next segment, of at least one chunk and at most about `SEGMENT_BYTES`."""
        if not self._open():
            return ()
        records, most = self._read_ahead(offset), offset + SEGMENT_BYTES
        covered = [record for record in records if record[0] <= most] or records[:1]
        end = covered[-1][0] if covered else most if to_end or self._index < 0 else offset
        data = os.pread(self._log, end - offset, offset)
        if not data:
            return ()
        del self._buffered[: len(covered)]
        self._offset = offset + len(data)
        return (Segment(offset, tuple(covered), data),)

    def _read_ahead(self, offset: int) -> list[Record]:
        """Return records of the index after this offset, up to the first damaged one."""
        if self._index < 0:
            return []
        if offset != self._offset:
            self._offset, self._buffered = offset, []
            self._index_at = self._find_record(offset)
        while len(self._buffered) < RECORDS_AT_ONCE:
            if self._buffered and self._buffered[-1][0] >= offset + SEGMENT_BYTES:
                break
            packed = os.pread(self._index, RECORDS_AT_ONCE * RECORD.size, self._index_at)
            if not (records := decode_records(packed)):
                break
            self._index_at += len(records) * RECORD.size
            self._buffered += [record for record in records if record[0] > offset]
        return self._buffered

    def read_back(self) -> Iterator[Segment]:
        """Yield pieces of `BACK_BYTES`, the last one first. They may begin within a line."""
        end = os.fstat(self._log).st_size if self._open() else 0
        while end > 0:
            begin = max(end - BACK_BYTES, 0)
            data = os.pread(self._log, end - begin, begin)
            yield Segment(begin, self._read_records(begin, end), data)
            end = begin

    def _read_records(self, begin: int, end: int) -> tuple[Record, ...]:
        if self._index < 0:
            return ()
        first = self._find_record(begin)
        size = self._find_record(end) + RECORD.size - first  # with the chunk that crosses `end`
        return tuple(decode_records(os.pread(self._index, max(size, 0), first)))

    def _find_record(self, offset: int) -> int:
        """Return the position in the index of the first record that ends after the offset; 0 if a
        record on the way is damaged."""
        low, high = 0, os.fstat(self._index).st_size // RECORD.size
        while low < high:
            middle = (low + high) // 2
            records = decode_records(os.pread(self._index, RECORD.size, middle * RECORD.size))
            if not records:
                return 0
            low, high = (low, middle) if records[0][0] > offset else (middle + 1, high)
        return low * RECORD.size

    def _open(self) -> bool:
        """Open the log and its index if they exist by now; return True if the log exists."""
        if self._log < 0:
            self._log = _open_existing(self._paths[0])
        if self._index < 0:
            self._index = _open_existing(self._paths[1])
        return self._log >= 0

    def close(self) -> None:
        """Close the files."""
        for fd in (self._log, self._index):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._log = self._index = -1


def _open_existing(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


class ObjectLog:
    """Output in a store that is no folder: one object per segment."""

    def __init__(
        self, store: Store, log_key: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._log_key = log_key
        self._clock = clock
        self._begins: list[int] | None = None
        self._newest: int | None = None
        self._grew_at, self._reread_at = clock(), 0.0
        self._damaged: set[int] = set()

    def read(self, offset: int, *, to_end: bool = False) -> Sequence[Segment]:
        """Read the next segments, as many as the store reads at once. After the last one, try to
        read a next segment, and the newest one again if it may have grown."""
        if self._begins is None:
            all_begins = list_begins(self._store, self._log_key)
            self._begins = all_begins[max(sum(begin <= offset for begin in all_begins) - 1, 0) :]
        begins = self._begins[: max(self._store.calls_at_once, 1)] or self._guess(offset, to_end)
        segments, damage = self._get(begins)
        if segments:
            self._begins = [begin for begin in self._begins if begin > segments[-1].begin]
            self._newest = segments[-1].begin if len(segments[-1].data) < GROWS_BYTES else None
        if damage is not None:
            all_begins = list_begins(self._store, self._log_key)
            self._begins = [begin for begin in all_begins if begin > damage]
        if new := [segment for segment in segments if segment.end > offset]:
            self._grew_at = self._clock()
        elif self._begins and (segments or damage is not None):
            return self.read(offset)
        return new

    def _guess(self, offset: int, to_end: bool) -> list[int]:
        now = self._clock()
        is_quiet = now - self._grew_at >= 2 * GROWS_S and not to_end
        if self._newest is None or (is_quiet and now - self._reread_at < REREAD_EVERY_S):
            return [offset]
        self._reread_at = now
        return [self._newest, offset]

    def _get(self, begins: Sequence[int]) -> tuple[list[Segment], int | None]:
        """Return the segments before the first one that is missing or damaged, and the offset of
        that one if it is damaged, else None."""
        keys = {begin: key_of(self._log_key, begin) for begin in begins}
        contents = get_many(self._store, list(keys.values()))
        segments: list[Segment] = []
        for begin, key in keys.items():
            if key not in contents:
                break
            try:
                segments.append(Segment.decode(begin, contents[key]))
            except CorruptRecord as damage:
                if begin not in self._damaged:
                    _log.warning("a part of the output in %s is skipped. %s", self._log_key, damage)
                self._damaged.add(begin)
                return segments, begin
        return segments, None

    def read_back(self) -> Iterator[Segment]:
        """Yield all segments, the last one first, without damaged ones."""
        for begin in reversed(list_begins(self._store, self._log_key)):
            with contextlib.suppress(NotFound, CorruptRecord):
                yield _get_segment(self._store, self._log_key, begin)

    def close(self) -> None:
        """Do nothing: no file is open."""


def list_begins(store: Store, log_key: str) -> list[int]:
    """Return the offsets of the existing segments, in order."""
    names = (key.rpartition("/")[2] for key in store.list(f"{log_key}.d"))
    return [int(name) for name in names if name.isdecimal()]


def key_of(log_key: str, begin: int) -> str:
    """Return the key of the segment that begins at this offset."""
    return f"{log_key}.d/{begin:016d}"


def _get_segment(store: Store, log_key: str, begin: int) -> Segment:
    return Segment.decode(begin, store.get(key_of(log_key, begin)))


def _last_segment(store: Store, log_key: str) -> Segment:
    begins = list_begins(store, log_key)
    return _get_segment(store, log_key, begins[-1]) if begins else Segment(0, (), b"")


def add_lines(store: Store, log_key: str, text: str, time_ns: int) -> None:
    """Add kinetic's own lines to the output of a host that has ended.

    Raises:
        StoreError: the lines cannot be written.
    """
    last = _last_segment(store, log_key)
    lead = "\n" if last.data and not last.data.endswith(b"\n") else ""
    data = f"{lead}{text}\n".encode(errors="backslashreplace")
    segment = Segment(last.end, ((last.end + len(data), time_ns, STDERR),), data)
    store.put(key_of(log_key, segment.begin), segment.encode())


class SegmentWriter:
    """A thread that sends the growing output files of one host to a store.

    Args:
        store: the destination.
        log_key: the key that the log would have in a folder.
        files: `log` and `log.idx`, opened for reading only.
        clock: returns seconds; replaced by tests.
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
        self._few = 0 if is_unmetered(store) else FEW
        self._log_key = log_key
        self._files = FileLog(*files)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_new = threading.Event()
        self._clock = clock
        self._pending: Segment | None = None
        self._newest: Segment | None = None
        self._newest_since = 0.0
        self._base = 0  # The offset in the stored output at which the files begin.
        self._read_to = self._sent = 0
        self._thread = threading.Thread(target=self._run, name="kinetic-segments", daemon=True)

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def flush(self, patience_s: float = 10.0, *, to_end: bool = False) -> bool:
        """Send everything appended so far; return False if the store did not accept it in time.

        `to_end` includes bytes without a record in the index: use it when the host has ended.
        """
        give_up_at = time.monotonic() + patience_s
        while not self._send(to_end=to_end):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(min(PAUSE_S, patience_s))
        return True

    def wake(self) -> None:
        """Wake the sending thread: output was appended."""
        self._is_new.set()

    def close(self, patience_s: float = 10.0) -> None:
        """Stop the thread and send the rest, for at most `patience_s` seconds."""
        self._closing.set()
        self._is_new.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush(patience_s, to_end=True)
        self._files.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._is_new.wait()
            self._is_new.clear()
            began_at = self._clock()
            if not self._send():
                self._is_new.set()
            usual_s = PAUSE_S if self._sent < FEW else LONGEST_PAUSE_S
            self._closing.wait(pause_of(self._store, self._clock() - began_at, usual_s))

    def _send(self, *, to_end: bool = False) -> bool:
        """Send the new output; return False if the store did not accept it, to be retried."""
        with self._lock:
            try:
                while (segment := self._pending or self._next(to_end)) is not None:
                    # A retry sends the same segment, because the store may have accepted it despite
                    # the error. The segment must not grow later either, because the first try may
                    # still be under way and overwrite it.
                    is_first_try, self._pending = self._pending is None, segment
                    self._put(segment, may_grow=is_first_try)
                    self._pending = None
            except (StoreError, NotFound) as error:
                _log.info("could not send output, which will be retried: %s", error)
                return False
            return True

    def _next(self, to_end: bool) -> Segment | None:
        """Return a segment with the new output: the newest one extended by it, if it may still
        grow, else a new one. None if there is no new output."""
        segments, newest = self._files.read(self._read_to, to_end=to_end), self._newest
        if not segments:
            return None
        new = segments[0].move(self._base)
        if newest is not None and self._clock() - self._newest_since < GROWS_S:
            return Segment(newest.begin, newest.records + new.records, newest.data + new.data)
        self._newest = None
        return new

    def _put(self, segment: Segment, *, may_grow: bool) -> None:
        key, content = key_of(self._log_key, segment.begin), segment.encode()
        if self._newest is not None:
            self._store.put(key, content)
        elif not self._store.put(key, content, if_absent=True) and self._store.get(key) != content:
            # A killed agent wrote this segment: continue after its output.
            self._base = _last_segment(self._store, self._log_key).end - self._read_to
            return  # _next returns the same output again, with the new base
        self._read_to = segment.end - self._base
        self._sent += 1
        if self._newest is None:
            self._newest_since = self._clock()
        grows = may_grow and self._sent >= self._few and len(segment.data) < GROWS_BYTES
        self._newest = segment if grows else None
