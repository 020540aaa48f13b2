"""One operation on many files in threads: hashing and file access release the GIL.

In: a function and its arguments. Out: the results, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kinetic._store.many import at_once

T = TypeVar("T")
R = TypeVar("R")

THREADS = 4
_LARGE_BYTES = 512 << 10


def is_worth_it(count: int, size_bytes: int) -> bool:
    """Return whether the files are so large that threads read them faster; small ones only make
    threads wait for each other."""
    return size_bytes > _LARGE_BYTES * max(count, 1)


def in_threads(act: Callable[[T], R], items: Sequence[T], *, worth: bool) -> list[R]:
    """Return `act` of each item; the first exception is raised once the running calls have
    ended."""
    return at_once(act, items, THREADS if worth else 1)
