"""Marks each line of a log with its host and time.

In: `LogChunk`s of one or several hosts, as they come. Out: bytes to print. Pure; called by the commands that show logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from kinetic.job.logformat import LogChunk

_NO_TIME = "????-??-??T??:??:??.???Z"


@dataclass
class Prefixer:
    """Turns chunks into bytes: unmodified when there is nothing to mark.

    A chunk may end inside a line. The rest of that line follows without a mark; when another host speaks first, the open line
    is ended, so that two hosts never share a line.

    Attributes:
        hosts: mark lines with "[host 3] ".
        times: mark lines with the time at which they were read, UTC.
    """

    hosts: bool = False
    times: bool = False
    _open_host: int | None = field(default=None, init=False)

    def add(self, chunk: LogChunk) -> bytes:
        """Return what to print for the chunk."""
        if not (self.hosts or self.times) or not chunk.data:
            return chunk.data
        mark = self._mark(chunk)
        head = b"" if self._open_host == chunk.host else mark if self._open_host is None else b"\n" + mark
        self._open_host = None if chunk.data.endswith(b"\n") else chunk.host
        # One pass in C over the whole chunk; the line end that closes it must not start a new mark.
        return head + chunk.data[:-1].replace(b"\n", b"\n" + mark) + chunk.data[-1:]

    def end(self) -> bytes:
        """Return what ends the output: a line end when a marked line is still open."""
        return b"" if self._open_host is None else b"\n"

    def _mark(self, chunk: LogChunk) -> bytes:
        time = f"{_iso(chunk.time_ns)} " if self.times else ""
        host = f"[host {chunk.host}] " if self.hosts else ""
        return (time + host).encode()


def _iso(time_ns: int) -> str:
    if not 0 < time_ns < 2**63:  # output whose time was lost or damaged
        return _NO_TIME
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1_000_000:03d}Z"
