"""The lock between submissions (shared) and the garbage collection of content (exclusive).

A submission sends the content that the store lacks, and then writes its plan, which names the
content. If unused content were removed between the two steps (a sweep), the job would lack it. The
kernel releases the lock however its process ends.

A store without a folder has no such lock, and a lease could outlive its holder or expire too early.
So submissions renew the existing content that they need (`Store.renew`). A sweep lists content,
then reads all plans. It removes content that no plan names and that was not written or renewed for
`content_age_s`. It removes the records of trees first, because a tree with a record must be
complete. A job loses content only if that was old, was renewed after the list, and its plan was
written after plans were read. The job's host then reports the missing content and asks to submit
the job again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from kinetic._store.base import FRESH_S, Store, folder_of, is_near
from kinetic._system import locks
from kinetic.errors import StoreError

SUBMISSIONS_TAKE_S, _POLL_S = 60.0, 0.05
"""The longest wait of a sweep for submissions, and the pause between its tries, in seconds."""


def content_age_s(store: Store) -> float:
    """Return the age, in seconds, at which unused content is removed."""
    return FRESH_S if is_near(store) else 7 * FRESH_S


def lock_for_submission(store: Store) -> AbstractContextManager[None]:
    """Hold the shared lock from the search for existing content until the plan is written. Waits
    for a sweep, never for another submission."""
    return _hold_lock(store, exclusive=False)


def lock_for_sweep(store: Store) -> AbstractContextManager[None]:
    """Hold the exclusive lock while unused content is removed. Waits for submissions to end.

    Raises:
        StoreError: submissions did not end within `SUBMISSIONS_TAKE_S`; one of them may belong to
            a stopped process.
    """
    return _hold_lock(store, exclusive=True)


@contextmanager
def _hold_lock(store: Store, *, exclusive: bool) -> Iterator[None]:
    folder = folder_of(store)
    descriptor = None if folder is None else _open(str(folder))
    if descriptor is None:  # The store has no folder, or none yet: nothing to lock.
        yield
        return
    try:
        _lock(descriptor, store.uri, exclusive=exclusive)
        yield
    finally:
        os.close(descriptor)


def _open(root: str) -> int | None:
    """Open the root folder to lock it, so that no lock file needs cleaning up; None if missing."""
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"The store {root} cannot be opened: {error.strerror}. Set KINETIC_HOME, or only "
            "KINETIC_STORE, to a folder that you own."
        ) from error


def _lock(descriptor: int, root: str, *, exclusive: bool) -> None:
    try:
        if exclusive:
            _await_submissions(descriptor, root)
        else:
            locks.hold(descriptor, shared=True)
    except OSError as error:  # network file systems may refuse to lock a folder
        raise StoreError(
            f"The store {root} cannot be locked: {error.strerror}. Set KINETIC_HOME to a folder on "
            "a local disk."
        ) from error


def _await_submissions(descriptor: int, root: str) -> None:
    until = time.monotonic() + SUBMISSIONS_TAKE_S
    while not locks.try_hold(descriptor):
        if time.monotonic() > until:
            raise StoreError(
                f"The store {root} has been in use by other submissions or cleanups for "
                f"{SUBMISSIONS_TAKE_S:g} s, so nothing was removed. Try again later; if one of "
                "these processes is stopped (Ctrl-Z), continue it (fg) or end it."
            )
        time.sleep(_POLL_S)
