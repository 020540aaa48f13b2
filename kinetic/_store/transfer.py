"""What content is read from on its way to a bucket, and written to on its way from it.

In: bytes. Out: bytes; how far a transfer is.
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
        """Forget all that was written."""
        ...


class Memory:
    """A `Target` in memory."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self.write = self._buffer.write
        self.content = self._buffer.getvalue

    def restart(self) -> None:
        """Forget all that was written."""
        self._buffer.seek(0)
        self._buffer.truncate()


class Told:
    """A stream to send, which tells once of each byte that is read to be sent."""

    def __init__(self, stream: IO[bytes], on_sent: Callable[[int], None]) -> None:
        self.stream = stream
        self._on_sent = on_sent
        self._told_bytes = 0
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1, /) -> bytes:
        """Read; what is read again, after something broke, is not told again."""
        part = self.stream.read(size)
        if (at := self.stream.tell()) > self._told_bytes:
            self._on_sent(at - self._told_bytes)
            self._told_bytes = at
        return part
