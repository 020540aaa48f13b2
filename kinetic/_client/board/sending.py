"""A progress bar on the terminal for large uploads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from kinetic._client.board import console
from kinetic._store.base import Store, Watchable

WORTH_BYTES = 20_000_000
"""Uploads smaller than this show no progress: they take no noticeable time."""
_MB = 1_000_000
_WIDTH = 24


@contextmanager
def show_progress(store: Store, most_bytes: int, stream: TextIO | None = None) -> Iterator[Store]:
    """Show the progress of uploads in the `with` block, on a terminal and for a remote store. The
    block must send through the yielded store.

    Args:
        store: the store to send to.
        most_bytes: the size of the upload if the store has none of the content.
        stream: the terminal; by default stderr.
    """
    stream = sys.stderr if stream is None else stream
    is_worthwhile = most_bytes >= WORTH_BYTES and console.can_redraw(stream)
    if not is_worthwhile or not isinstance(store, Watchable):
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
