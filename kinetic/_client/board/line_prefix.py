"""Prefixes of log lines: the host and the time of each line. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from kinetic._core.log_format import LogChunk

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
        """Return the chunk as bytes to print, with its prefixes."""
        if not (self.hosts or self.times) or not chunk.data:
            return chunk.data
        time = f"{_iso(chunk.time_ns)} " if self.times else ""
        host = f"[host {chunk.host}] " if self.hosts else ""
        mark = (time + host).encode()
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


def _iso(time_ns: int) -> str:
    if not 0 < time_ns < 2**63:  # The time of the output was lost or damaged.
        return _NO_TIME
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest_ns // 1_000_000:03d}Z"


@lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
