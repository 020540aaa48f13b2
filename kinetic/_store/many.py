"""Many calls to a store at the same time.

Threads make calls in parallel if a store is reached over a network (`Store.calls_at_once` > 1).
Calls to a folder use no threads, which would only make them slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kinetic._store.base import Store
from kinetic.errors import NotFound

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

FILE_THREADS = 4
"""The number of threads that read files: hashing and file access release the GIL."""
T = TypeVar("T")
R = TypeVar("R")


def has_many(store: Store, keys: Collection[str]) -> set[str]:
    """Return which of the keys exist."""
    wanted = list(keys)
    answers = at_once(store.has, wanted, store.calls_at_once)
    return {key for key, exists in zip(wanted, answers, strict=True) if exists}


def renew_many(store: Store, keys: Collection[str]) -> set[str]:
    """Renew the keys; return which of them exist."""
    wanted = list(keys)
    answers = at_once(store.renew, wanted, store.calls_at_once)
    return {key for key, exists in zip(wanted, answers, strict=True) if exists}


def get_many(store: Store, keys: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the keys that exist, by key, in the order of the keys."""

    def content(key: str) -> bytes | None:
        try:
            return store.get(key)
        except NotFound:
            return None

    wanted = list(keys)
    contents = at_once(content, wanted, store.calls_at_once)
    return {key: data for key, data in zip(wanted, contents, strict=True) if data is not None}


def put_many(
    store: Store,
    contents: Mapping[str, bytes | Path | Iterator[bytes]],
    *,
    if_absent: bool = False,
) -> set[str]:
    """Write contents by key, in no order; return the keys that this call wrote.

    If a call fails, any of the other keys may have been written.
    """
    items = list(contents.items())
    wrote = at_once(lambda item: store.put(*item, if_absent=if_absent), items, store.calls_at_once)
    return {key for (key, _), did in zip(items, wrote, strict=True) if did}


def put_content(store: Store, key: str, parts: Sequence[bytes]) -> bool:
    """Write content under its digest's key, or renew an existing object; return whether this call
    wrote."""
    while not store.put(key, iter(parts), if_absent=True):
        if store.renew(key):  # If False, the object was removed as unused since `put`.
            return False
    return True


def at_once(act: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Call `act` with each item, on this many threads, and return the results in order. The first
    exception propagates, and items that no thread has begun are dropped. Once the main thread has
    ended, Python allows no pools, so calls are made one after another."""
    if threads < 2 or len(items) < 2 or (pool := _open_pool(threads)) is None:
        return [act(item) for item in items]
    size = -(-len(items) // (threads * 8))
    portions = [items[at : at + size] for at in range(0, len(items), size)]
    futures: list[Future[list[R]]] = []
    with pool:
        with suppress(RuntimeError):
            for portion in portions:
                futures.append(pool.submit(lambda items: [act(item) for item in items], portion))
        try:
            answers = [answer for future in futures for answer in future.result()]
            rest = portions[len(futures) :]
            return [*answers, *(act(item) for portion in rest for item in portion)]
        finally:
            for future in futures:
                future.cancel()


def _open_pool(threads: int) -> ThreadPoolExecutor | None:
    with suppress(RuntimeError):
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(threads, thread_name_prefix="kinetic-store")
    return None
