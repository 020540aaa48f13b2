"""The lock between submissions (shared) and the garbage collection of content (exclusive).

In: a store. Out: a lock, held for a `with` block.

A submission sends only the content that the store lacks, and writes its plan, which names the
content, last. A sweep between the two would find that content unused. The lock is the kernel's: it
is released when its process ends, however it ends.

A store without a folder has no lock; a lease could outlive its holder, or expire while it works.
The age of content is no protection either: a submission sends nothing of what it finds, so content
that was unused for a month may be counted on in the very moment in which it is removed, and saying
so beforehand would cost each submission two more calls. There `jobs prune` removes only the records
of jobs, and leaves content alone: it is shared, and small beside the outputs. A bucket's lifecycle
rules may expire content by age, if no submission and no job lives that long: a job whose content
has expired fails with "submit the job again", and that sends the content again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kinetic._store.base import Store
from kinetic.errors import StoreError


@contextmanager
def submitting(store: Store) -> Iterator[None]:
    """Hold while content is looked up, sent, and named by a plan. Waits for a sweep, never for
    another submission."""
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
    if descriptor is None:  # no folder, or none yet: nothing to sweep
        yield
        return
    try:
        _lock(descriptor, store.uri, exclusive=exclusive)
        yield
    finally:
        os.close(descriptor)


def _open(root: str) -> int | None:
    """Open the root itself: a folder can be locked like a file, without a lock file to clean up."""
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
