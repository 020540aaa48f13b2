"""How metrics are stored: frames, one after the other, in a log like that of a host's output.

In: rows of numbers with step and time. Out: bytes, and the same rows.

A frame has rows that name the same metrics; little-endian, by columns:

    "KMF1", length of what follows the check value (u32), its complement (u32), CRC-32 of that (u32)
    number of rows (u32), number of names (u32), length of the names (u32)
    the names, UTF-8, with a line end between them
    times in seconds since the epoch (f64), steps (i64), then the values (f64) of each name

Columns are read at once, so a million rows take a fraction of a second. Where bytes are missing or
damaged, reading goes on with the next frame. A row that belongs to no step has `NO_STEP`. Whatever
has the name of the pipe can write to it: a frame with what `kinetic.log` refuses is damaged.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

VARIABLE = "KINETIC_METRICS_PIPE"
"""The named pipe that takes frames, in the environment of a function: of at most `PIPE_BUF` bytes
each, which the kernel never mixes, so that programs that the function starts can log as well."""
MAGIC = b"KMF1"
NO_STEP = -1
LONGEST_NAME_BYTES = 200
LONGEST_BYTES = 1 << 20
"""Of what follows the check value: no frame claims more."""
_LATEST_S = 1e12
_HEAD = struct.Struct("<4sIII")
_COUNTS = struct.Struct("<III")
_CELL = 8
_FIXED = _HEAD.size + _COUNTS.size
_COMPLEMENT = 0xFFFFFFFF


Column: TypeAlias = "array[Any]"


class Frame(NamedTuple):
    """Rows with the same names.

    Attributes:
        names: of the metrics.
        times: of the rows, in seconds since the epoch.
        steps: of the rows, or `NO_STEP`.
        values: a column for each name.
    """

    names: tuple[str, ...]
    times: Column
    steps: Column
    values: Sequence[Column]

    def encode(self) -> bytes:
        """Return its bytes."""
        names = "\n".join(self.names).encode()
        columns: list[Column] = [self.times, self.steps, *self.values]
        counts = _COUNTS.pack(len(self.times), len(self.names), len(names))
        body = b"".join([counts, names, *(_swap(column).tobytes() for column in columns)])
        return _HEAD.pack(MAGIC, len(body), len(body) ^ _COMPLEMENT, zlib.crc32(body)) + body


class FrameDecoder:
    """Takes the bytes of a log in pieces, and returns the rows that are whole.

    Attributes:
        damaged: how often bytes had to be skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._names: dict[bytes, tuple[str, ...]] = {}
        self.damaged = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Return what is whole by now; rows that follow each other and name the same are in one
        frame."""
        data = self._rest + data if self._rest else data
        found, at = list[Frame](), 0
        while True:
            begin = data.find(MAGIC, at)
            self.damaged += begin > at
            if begin < 0 or len(data) - begin < _HEAD.size:
                break
            at = begin
            end, check = _read_head(data, begin)
            if end > len(data):
                break
            if self._decode(data[begin + _HEAD.size : end], check, found):
                at = end
            else:
                self.damaged += 1
                at = begin + len(MAGIC)
        self._rest = data[_first_possible(data, at) :]
        return found

    def _decode(self, body: bytes, check: int, found: list[Frame]) -> bool:
        """Add the rows of a frame, if it is whole."""
        if len(body) < _COUNTS.size or zlib.crc32(body) != check:
            return False
        rows, count, names_bytes = _COUNTS.unpack_from(body)
        begin, size = _COUNTS.size + names_bytes, rows * _CELL
        if len(body) != begin + (2 + count) * size:
            return False
        packed = body[_COUNTS.size : begin]
        if (names := self._names.get(packed)) is None:
            names = tuple(map(_to_name, packed.split(b"\n"))) if count else ()
            if len(names) != count or not all(names):
                return False
            self._names[packed] = names
        if not _are_moments(body[begin : begin + size], body[begin + size : begin + 2 * size]):
            return False
        if not found or found[-1].names is not names:
            columns = [array("d") for _ in names]
            found.append(Frame(names, array("d"), array("q"), columns))
        frame = found[-1]
        for column in (frame.times, frame.steps, *frame.values):
            _extend_column(column, body[begin : begin + size])
            begin += size
        return True


def _to_name(data: bytes) -> str:
    """The name of a metric, which steers no terminal; "" if this is none. What can be printed is
    another question in each Python, and costs no frame."""
    name = data.decode(errors="replace") if len(data) <= LONGEST_NAME_BYTES else ""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def _are_moments(times: bytes, steps: bytes) -> bool:
    """Whether rows have times and steps as they can be."""
    first, second = array("d"), array("q")
    _extend_column(first, times)
    _extend_column(second, steps)
    if not first:
        return True
    is_sane = min(first) >= 0 and max(first) < _LATEST_S and not math.isnan(sum(first))
    return is_sane and min(second) >= NO_STEP


def split_rows(frame: Frame, most_bytes: int) -> Iterator[Frame]:
    """Yield the same rows in frames of at most so many bytes, which have room for one name at
    least."""
    names, first, size = frame.names, 0, 0
    for index, name in enumerate(names):
        more = len(name.encode()) + 1
        if index > first and size + more + (3 + index - first) * _CELL > most_bytes - _FIXED:
            yield from _split_columns(frame, slice(first, index), most_bytes - size)
            first, size = index, 0
        size += more
    yield from _split_columns(frame, slice(first, len(names)), most_bytes - size)


def _split_columns(frame: Frame, names: slice, most_bytes: int) -> Iterator[Frame]:
    values = frame.values[names]
    rows = max((most_bytes - _FIXED) // ((2 + len(values)) * _CELL), 1)
    for begin in range(0, len(frame.times), rows):
        part = slice(begin, begin + rows)
        columns = [column[part] for column in values]
        yield Frame(frame.names[names], frame.times[part], frame.steps[part], columns)


def find_end(data: bytes) -> int:
    """Return where the last whole frame ends; what is no frame is not held back."""
    at = 0
    while True:
        begin = data.find(MAGIC, at)
        if begin < 0:
            return _first_possible(data, at)
        if len(data) - begin < _HEAD.size:
            return begin
        end, _ = _read_head(data, begin)
        if end > len(data):
            return begin
        at = end


def _read_head(data: bytes, begin: int) -> tuple[int, int]:
    """Where the frame ends that begins there, and what its check value is; one whose head is
    damaged ends after its first bytes."""
    _, size, complement, check = _HEAD.unpack_from(data, begin)
    if size ^ complement != _COMPLEMENT or size > LONGEST_BYTES:
        return begin + len(MAGIC), 0
    return begin + _HEAD.size + size, check


def _first_possible(data: bytes, at: int) -> int:
    """Where after this place a frame begins, or may once more bytes have come."""
    begin = data.find(MAGIC, at)
    if begin >= 0:
        return begin
    ends = (n for n in range(len(MAGIC) - 1, 0, -1) if data.endswith(MAGIC[:n]))
    return max(len(data) - next(ends, 0), at)


def _extend_column(column: Column, data: bytes) -> None:
    if sys.byteorder == "little":
        column.frombytes(data)
        return
    more = array(column.typecode)
    more.frombytes(data)
    column.extend(_swap(more))


def _swap(column: Column) -> Column:
    """Little-endian where this machine is not, and back."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column
