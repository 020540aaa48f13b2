"""The same act on many files at once: hashing and file systems let go of the interpreter.

In: a function and its arguments. Out: the answers, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 4
_LARGE_BYTES = 512 << 10


def worth_it(count: int, size_bytes: int) -> bool:
    """Return whether the files are so large that threads read them faster; small ones only make
    threads wait for each other."""
    return size_bytes > _LARGE_BYTES * max(count, 1)


def in_threads(act: Callable[[T], R], items: Sequence[T], *, worth: bool) -> list[R]:
    """Return `act` of each item; the first exception ends it, after the acts that have begun."""
    if not worth or len(items) < 2:
        return [act(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    size = -(-len(items) // (_THREADS * 8))
    chunks = [items[at : at + size] for at in range(0, len(items), size)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kinetic-files") as pool:
        futures = [
            pool.submit(lambda chunk: [act(item) for item in chunk], chunk) for chunk in chunks
        ]
        try:
            return [answer for future in futures for answer in future.result()]
        finally:
            for future in futures:
                future.cancel()
