"""Who may change which content is in use: many submissions at a time, or one sweep.

In: a store. Out: a lock, held for a `with` block.

A submission sends only the content that the store lacks, and its plan, which names the content,
comes last. A sweep that looked between the two would find that content unused. The lock is the
kernel's: it ends with the process that held it, however it ends.

A store that is no folder has no such lock, and a lease in its place would outlive its holder or be
lost while it works. So `jobs prune` removes the records of jobs there, and leaves content alone: it
is shared and small beside the outputs, and goes with the store. Whoever lets rules of a bucket
expire content does so by its age, with an age no submission and no job reaches: a job whose content
has expired fails with "submit the job again", and then sends it anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kinetic._store.base import Store
from kinetic.errors import StoreError


@contextmanager
def submitting(store: Store) -> Iterator[None]:
    """Hold while content is looked for, sent, and named by a plan. Waits for a sweep to end, never
    for another submission."""
    with _held(store, exclusive=False):
        yield


@contextmanager
def sweeping(store: Store) -> Iterator[None]:
    """Hold while unused content is removed. Waits for submissions to end."""
    with _held(store, exclusive=True):
        yield


@contextmanager
def _held(store: Store, *, exclusive: bool) -> Iterator[None]:
    folder = store.as_folder()
    descriptor = None if folder is None else _open(str(folder))
    if descriptor is None:  # no folder, or none yet: nothing is swept there
        yield
        return
    try:
        _lock(descriptor, store.uri, exclusive=exclusive)
        yield
    finally:
        os.close(descriptor)


def _open(root: str) -> int | None:
    """Open the root itself: a folder can be locked like a file, and no lock file has to be kept,
    listed or cleaned up."""
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"The store {root} cannot be opened: {error}. Make it yours, or set KINETIC_HOME "
            "elsewhere."
        ) from error


def _lock(descriptor: int, root: str, *, exclusive: bool) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    except OSError as error:  # network file systems may refuse to lock a folder
        raise StoreError(
            f"The store {root} cannot be locked: {error}. Set KINETIC_HOME to a folder on a local "
            "disk."
        ) from error
