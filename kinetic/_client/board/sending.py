"""Progress on a terminal while much is sent.

In: a store that counts what it sends. Out: one line on stderr that is redrawn.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from kinetic._client.board import console
from kinetic._store.base import Store, Watchable

WORTH_BYTES = 20_000_000
"""Less is sent before anyone would wait."""
_MB = 1_000_000
_WIDTH = 24


@contextmanager
def show_progress(store: Store, most_bytes: int, stream: TextIO | None = None) -> Iterator[Store]:
    """Show progress while the `with` block runs, if much may be sent over a network.

    Args:
        store: where it goes.
        most_bytes: how much is sent if the store has nothing of it.
        stream: a terminal; stderr by default.
    """
    stream = sys.stderr if stream is None else stream
    is_seen = most_bytes >= WORTH_BYTES and console.can_redraw(stream)
    if not is_seen or not isinstance(store, Watchable):
        yield store
        return
    lock, sent_bytes, width = threading.Lock(), 0, 0

    def write(words: str) -> None:
        nonlocal width
        with suppress(OSError, ValueError):
            stream.write(f"\r{words}")
            stream.flush()
        width = max(width, len(words))

    def count_sent(size_bytes: int) -> None:
        nonlocal sent_bytes
        with lock:
            sent_bytes += size_bytes
            bar = ("#" * round(min(1.0, sent_bytes / most_bytes) * _WIDTH)).ljust(_WIDTH, ".")
            sent_mb, most_mb = sent_bytes // _MB, most_bytes // _MB
            write(f"kinetic: sending [{bar}] {sent_mb} of at most {most_mb} MB")

    try:
        yield store.with_progress(count_sent)
    finally:
        if width:
            write(" " * width)
            write("")
