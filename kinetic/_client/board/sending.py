"""Progress on a terminal while much is sent.

In: a store, the most that may be sent. Out: the same store, and one line on stderr that is redrawn.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kinetic._client.board import console
from kinetic._store.base import Store, Watchable

WORTH_BYTES = 20_000_000
"""Less is sent before anyone would wait."""
_MB = 1_000_000
_WIDTH = 24

if TYPE_CHECKING:
    _Data = bytes | Path | Iterator[bytes]


@contextmanager
def show_progress(store: Store, most_bytes: int, stream: TextIO | None = None) -> Iterator[Store]:
    """Show progress while the `with` block runs, if much may be sent to a store that is not a
    folder.

    Args:
        store: where it goes.
        most_bytes: how much is sent if the store has nothing of it.
        stream: a terminal; stderr by default.
    """
    stream = sys.stderr if stream is None else stream
    if most_bytes < WORTH_BYTES or store.as_folder() is not None or not console.can_redraw(stream):
        yield store
        return
    watched = _CountedStore(store, most_bytes, stream)
    try:
        yield watched
    finally:
        watched.end()


def line(sent_bytes: int, most_bytes: int) -> str:
    """Return the line: a bar and two numbers. The store may have some of it already."""
    part = min(1.0, sent_bytes / most_bytes)
    bar = ("#" * round(part * _WIDTH)).ljust(_WIDTH, ".")
    return f"kinetic: sending [{bar}] {sent_bytes // _MB} of at most {most_bytes // _MB} MB"


class _CountedStore:
    """A `Store` that counts what is put into it: as it is sent, or else once it is there."""

    def __init__(self, store: Store, most_bytes: int, stream: TextIO) -> None:
        self._tells = isinstance(store, Watchable)
        self._store = (
            store.with_progress(self._count_sent) if isinstance(store, Watchable) else store
        )
        self._most_bytes = most_bytes
        self._stream = stream
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._width = 0
        self.uri = store.uri
        self.calls_at_once = store.calls_at_once
        self.as_folder = store.as_folder
        self.get = store.get
        self.fetch = store.fetch
        self.has = store.has
        self.list = store.list
        self.delete = store.delete
        self.renew = store.renew
        self.parts = store.parts
        self.entries = store.entries
        self.drop = store.drop

    def put(self, key: str, data: _Data, *, if_absent: bool = False) -> bool:
        """Put, and show the progress."""
        if self._tells:
            return self._store.put(key, data, if_absent=if_absent)
        if isinstance(data, Iterator):
            return self._store.put(key, self._count_parts(data), if_absent=if_absent)
        size_bytes = _size(data)
        wrote = self._store.put(key, data, if_absent=if_absent)
        self._count_sent(size_bytes)
        return wrote

    def _count_parts(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            yield part
            self._count_sent(len(part))

    def _count_sent(self, size_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += size_bytes
            self._write(line(self._sent_bytes, self._most_bytes))

    def end(self) -> None:
        """Clear the line."""
        with self._lock:
            if self._width:
                self._write(" " * self._width)
                self._write("")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(f"\r{text}")
            self._stream.flush()
        self._width = max(self._width, len(text))


def _size(data: bytes | Path) -> int:
    if isinstance(data, bytes):
        return len(data)
    with suppress(OSError):
        return data.stat().st_size
    return 0
