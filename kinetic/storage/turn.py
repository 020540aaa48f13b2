"""Who may change which content is in use: many submissions at a time, or one sweep.

In: a store. Out: a lock, held for a `with` block. Called by submission (`submitting`) and `kinetic jobs prune` (`sweeping`).

A submission sends only the content that the store lacks, and its plan, which names the content, comes last. A sweep that looked
between the two would find that content unused. The lock is the kernel's: it ends with the process that held it, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kinetic.errors import StoreError
from kinetic.storage.base import Store
from kinetic.storage.local import LocalStore

KEY = "locks/content"


@contextmanager
def submitting(store: Store) -> Iterator[None]:
    """Hold while content is looked for, sent, and named by a plan. Waits for a sweep to end, never for another submission."""
    with _held(store, exclusive=False):
        yield


@contextmanager
def sweeping(store: Store) -> Iterator[None]:
    """Hold while unused content is removed. Waits for submissions to end."""
    with _held(store, exclusive=True):
        yield


@contextmanager
def _held(store: Store, *, exclusive: bool) -> Iterator[None]:
    if not isinstance(store, LocalStore):  # buckets expire content by rules of their own
        yield
        return
    import fcntl

    descriptor = _open(store)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _open(store: LocalStore) -> int:
    path: Path = store.path(KEY)
    try:
        store.put(KEY, b"", if_absent=True)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"The lock {path} cannot be opened: {error}. Make it yours, or set KINETIC_HOME elsewhere.") from error
