"""Prefixes of log lines: the host and the time of each line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache

from kinetic._core.log_format import LogChunk

_JOINED = 1000
_JOINED_BYTES = 1 << 20
_NO_TIME = "????-??-??T??:??:??.???Z"


@dataclass
class Prefixer:
    """Adds prefixes to the lines of chunks. Without `hosts` and `times`, chunks are not changed.

    A chunk may end inside a line. The rest of that line gets no second prefix. If another host
    prints before the rest arrives, a line end is inserted: two hosts never share a line.

    Attributes:
        hosts: prefix lines with "[host 3] ".
        times: prefix lines with the time, in UTC, at which the host's agent read them.
    """

    hosts: bool = False
    times: bool = False
    _open_host: int | None = field(default=None, init=False)

    def add(self, chunk: LogChunk) -> bytes:
        """Return the bytes to print for a chunk."""
        if not (self.hosts or self.times) or not chunk.data:
            return chunk.data
        mark = self._mark(chunk)
        head = (
            b""
            if self._open_host == chunk.host
            else mark
            if self._open_host is None
            else b"\n" + mark
        )
        self._open_host = None if chunk.data.endswith(b"\n") else chunk.host
        # `replace` is one fast pass over the chunk. A line end at its very end gets no prefix.
        return head + chunk.data[:-1].replace(b"\n", b"\n" + mark) + chunk.data[-1:]

    def end(self) -> bytes:
        """Return the bytes that end the output: a line end if a prefixed line is open."""
        return b"" if self._open_host is None else b"\n"

    def join_chunks(self, chunks: Iterable[LogChunk | None]) -> Iterator[LogChunk | None]:
        """Join successive chunks that get the same prefix, so that a log of many short lines takes
        few steps. No output is delayed: a None, which means that no output is ready, or a large
        size yields the joined chunk."""
        if self.times:
            yield from chunks
            return
        parts: list[LogChunk] = []
        size = 0
        for chunk in chunks:
            if parts and (
                chunk is None
                or len(parts) == _JOINED
                or size >= _JOINED_BYTES
                or not _is_same_source(parts[0], chunk)
            ):
                yield _join(parts)
                parts, size = [], 0
            if chunk is None:
                yield None
            else:
                parts.append(chunk)
                size += len(chunk.data)
        if parts:
            yield _join(parts)

    def _mark(self, chunk: LogChunk) -> bytes:
        time = f"{_iso(chunk.time_ns)} " if self.times else ""
        host = f"[host {chunk.host}] " if self.hosts else ""
        return (time + host).encode()


def _is_same_source(one: LogChunk, other: LogChunk) -> bool:
    return one.host == other.host and one.stream == other.stream


def _join(parts: list[LogChunk]) -> LogChunk:
    return (
        parts[0]
        if len(parts) == 1
        else replace(parts[0], data=b"".join([part.data for part in parts]))
    )


def _iso(time_ns: int) -> str:
    if not 0 < time_ns < 2**63:  # The time of the output was lost or damaged.
        return _NO_TIME
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest_ns // 1_000_000:03d}Z"


@lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
