"""Sources and targets of transfers to and from a bucket.

In: bytes. Out: bytes; the progress of an upload.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Protocol


class Target(Protocol):
    """Where a download goes."""

    def write(self, part: bytes, /) -> int:
        """Append a part."""
        ...

    def restart(self) -> None:
        """Discard everything written so far."""
        ...


class Memory:
    """A `Target` in memory."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self.write = self._buffer.write
        self.content = self._buffer.getvalue

    def restart(self) -> None:
        """Discard everything written so far."""
        self._buffer.seek(0)
        self._buffer.truncate()


class ProgressStream:
    """A stream to upload, which reports each byte once."""

    def __init__(self, stream: IO[bytes], on_sent: Callable[[int], None]) -> None:
        self.stream = stream
        self._on_sent = on_sent
        self._reported_bytes = 0
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1, /) -> bytes:
        """Read; what is read again, for another try, is not reported again."""
        part = self.stream.read(size)
        if (at := self.stream.tell()) > self._reported_bytes:
            self._on_sent(at - self._reported_bytes)
            self._reported_bytes = at
        return part
