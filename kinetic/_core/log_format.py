"""How a host's output is stored: the bytes as printed, and an index of fixed-size records.

In: chunks of output with time and stream. Out: index records.

`log` holds the bytes of both streams in the order in which the agent read them, so that any tool
can read it. `log.idx` holds one 24-byte little-endian record per chunk: offset of the chunk's END
in `log` (u64), time in nanoseconds since the epoch (u64), stream (u32: 1 stdout, 2 stderr, 3 how
the host failed), and a check value (u32: CRC-32 of the rest of the record). A chunk ends at a line
end unless the line was left open for a while or is longer than the reader's buffer. Data is written
before its record, so a record never points past the end of `log`; bytes after the last good record
count as stdout.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import field
from typing import NamedTuple

from kinetic._core.values import dataclass

RECORD = struct.Struct("<QQII")
STDOUT = 1
STDERR = 2
FAILURE = 3
"""How the host failed: a traceback, or a line written by kinetic. Readers show it on stderr, or
skip it where the exception is raised anyway."""
_BODY = struct.Struct("<QQI")


class Position(NamedTuple):
    """A position in a host's output; later ones compare greater.

    Attributes:
        attempt: from 1.
        offset: in bytes, within the output of that attempt.
    """

    attempt: int = 1
    offset: int = 0


@dataclass(frozen=True)
class LogChunk:
    """Some output of one host: usually whole lines.

    Attributes:
        host: index in the gang.
        stream: STDOUT (1) or STDERR (2).
        time_ns: when the agent read it, nanoseconds since the epoch.
        data: the bytes as printed; b"" only reports the position.
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


def decode_records(data: bytes) -> list[tuple[int, int, int]]:
    """Unpack whole records up to the first that is damaged: (end offset, time_ns, stream)."""
    good: list[tuple[int, int, int]] = []
    whole = len(data) - len(data) % RECORD.size
    for end, time_ns, stream, check in RECORD.iter_unpack(data[:whole]):
        if check != zlib.crc32(_BODY.pack(end, time_ns, stream)):
            break
        good.append((end, time_ns, stream))
    return good
