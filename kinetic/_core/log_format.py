"""The format of a host's stored output: segments of bytes as printed, with records about them.

The bytes are those of stdout and stderr, in the order in which the agent read them. One 24-byte
little-endian record describes each chunk: offset of the chunk's END in the output (u64), time in
nanoseconds since the epoch (u64), stream (u32: 1 stdout, 2 stderr, 3 the host's failure), and a
check value (u32: CRC-32 of the rest of the record). A chunk ends at a line end unless the line
stayed open for a while or is longer than the reader's buffer. Data is written before its record, so
a record never points past the end; bytes after the last good record count as stdout.

In a folder, all output is one segment, in two files that grow: `log` has the bytes, so that any
tool can read them, and `log.idx` the records. In a bucket, a segment is an object named by its
offset, so that a reader can compute the name of the next one:

    log.d/<offset, 16 digits>     "KLS1", length of the records (u32), the records, the bytes
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import field
from typing import NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

RECORD = struct.Struct("<QQII")
STDOUT = 1
STDERR = 2
FAILURE = 3
"""Stream of a host's failure: a traceback, or a line written by kinetic. Readers show it on stderr,
or skip it where the exception is raised anyway."""
_BODY = struct.Struct("<QQI")
_MAGIC = b"KLS1"
_HEAD = struct.Struct("<4sI")
Record = tuple[int, int, int]
"""End, time and stream of a chunk."""


class Position(NamedTuple):
    """A position in a host's output; later ones compare greater.

    Attributes:
        attempt: the attempt, from 1.
        offset: offset in bytes, within the output of that attempt.
    """

    attempt: int = 1
    offset: int = 0


@dataclass(frozen=True)
class LogChunk:
    """A piece of one host's output, usually whole lines.

    Attributes:
        host: index in the gang.
        stream: STDOUT (1) or STDERR (2).
        time_ns: when the agent read the bytes, in nanoseconds since the epoch.
        data: the bytes as printed; b"" for a chunk that only reports the position.
        end: the position after these bytes.
    """

    host: int
    stream: int
    time_ns: int
    data: bytes
    end: Position = field(default=Position(), compare=False)


def encode_record(end: int, time_ns: int, stream: int) -> bytes:
    """Pack one index record."""
    return RECORD.pack(end, time_ns, stream, zlib.crc32(_BODY.pack(end, time_ns, stream)))


def decode_records(data: bytes) -> list[Record]:
    """Unpack records (end offset, time_ns, stream) up to the first that is damaged or cut off."""
    good: list[Record] = []
    whole = len(data) - len(data) % RECORD.size
    for end, time_ns, stream, check in RECORD.iter_unpack(data[:whole]):
        if check != zlib.crc32(_BODY.pack(end, time_ns, stream)):
            break
        good.append((end, time_ns, stream))
    return good


@dataclass(frozen=True)
class Segment:
    """A part of a host's output.

    Attributes:
        begin: offset of the segment in the output.
        records: records of the chunks that end in the segment, or are cut at its end.
        data: the bytes as printed.
    """

    begin: int
    records: tuple[Record, ...]
    data: bytes

    @property
    def end(self) -> int:
        """The offset of the segment's end in the output."""
        return self.begin + len(self.data)

    def encode(self) -> bytes:
        """Return the content of the segment's object."""
        packed = b"".join(encode_record(*record) for record in self.records)
        return _HEAD.pack(_MAGIC, len(packed)) + packed + self.data

    @classmethod
    def decode(cls, begin: int, content: bytes) -> Segment:
        """Rebuild a segment from the content of its object.

        Raises:
            CorruptRecord: the content is not a segment.
        """
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            raise CorruptRecord(f"The stored output of a host is damaged from byte {begin} on.")
        size = _HEAD.size + _HEAD.unpack_from(content)[1]
        return cls(begin, tuple(decode_records(content[_HEAD.size : size])), content[size:])

    def move(self, by: int) -> Segment:
        """Return the segment shifted by this number of bytes."""
        moved = tuple((end + by, time_ns, stream) for end, time_ns, stream in self.records)
        return Segment(self.begin + by, moved, self.data)

    def chunks(self, after: int = 0) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield end, time, stream and bytes of each chunk after an offset; bytes without a record
        come last, as stdout."""
        begin, data, last = self.begin, self.data, self.end
        at = max(begin, after)
        for end, time_ns, stream in (*self.records, (last, 0, STDOUT)):
            if at < (until := min(end, last)):
                yield until, time_ns, stream, data[at - begin : until - begin]
                at = until
