"""Sources and targets of transfers to and from a store that is not a folder."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kinetic._store import files
from kinetic.errors import StoreError, StoreFull

IN_MEMORY_BYTES = 16 << 20
"""Size in bytes up to which content in parts is held in memory; larger content goes to disk."""


class Memory(io.BytesIO):
    """A target in memory for a download, with the interface of `files.Sink`."""

    def restart(self) -> None:
        """Discard everything written so far."""
        self.seek(0)
        self.truncate()


class ProgressStream:
    """A stream to upload, which reports each byte once even if it is read again for a retry."""

    def __init__(self, stream: IO[bytes], on_sent: Callable[[int], None]) -> None:
        self.stream = stream
        self._on_sent = on_sent
        self._reported_bytes = 0
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1, /) -> bytes:
        """Read from the stream, and report bytes that are read for the first time."""
        part = self.stream.read(size)
        if (at := self.stream.tell()) > self._reported_bytes:
            self._on_sent(at - self._reported_bytes)
            self._reported_bytes = at
        return part


@contextmanager
def open_stream(data: bytes | Path | Iterator[bytes]) -> Iterator[IO[bytes]]:
    """Open the data of a `put` as a seekable stream; large content in parts goes to disk."""
    if isinstance(data, Path):
        try:
            file = files.open_regular(data)
        except OSError as error:
            raise StoreError(f"Could not read {data} to store it: {error.strerror}.") from error
        with io.BufferedReader(file, 1 << 20) as stream:
            yield stream
    elif isinstance(data, Iterator):
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as spool:
            for part in data:
                _write(spool, part)
            yield spool
    else:
        yield io.BytesIO(data)


def _write(spool: IO[bytes], part: bytes) -> None:
    try:
        spool.write(part)
    except OSError as error:
        if error.errno in files.FULL:
            raise StoreFull(
                f"No space is left in {tempfile.gettempdir()}, where large content is written "
                "before it is sent. Free some space."
            ) from error
        raise StoreError(f"Could not write in {tempfile.gettempdir()}: {error}.") from error
