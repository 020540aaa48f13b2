"""The lock between submissions (shared) and the garbage collection of content (exclusive).

In: a store. Out: a lock, held for a `with` block.

A submission sends only the content that the store lacks, and writes its plan, which names the
content, last. A sweep between the two would find that content unused. The lock is the kernel's: it
is released when its process ends, however it ends.

A store without a folder has no lock, and a lease could outlive its holder or expire too early.
There a submission renews what it finds and relies on (`Store.renew`), and a sweep removes what was
not written or renewed for `content_age_s` and is in no plan: first the records of trees, which
vouch for the rest. Content is listed before plans are read. So a sweep takes away from a job only
what was a week old, was renewed after that list, and is named by a plan that was written after the
plans were read: its host says that it is missing, and to submit the job again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kinetic._store.base import FRESH_S, Store, folder_of, is_near
from kinetic._system import locks
from kinetic.errors import StoreError

SUBMISSIONS_TAKE_S, _LOOK_S = 60.0, 0.05
"""How long a sweep waits for submissions to end, and how often it looks."""


def content_age_s(store: Store) -> float:
    """How long content that no plan names is kept."""
    return FRESH_S if is_near(store) else 7 * FRESH_S


@contextmanager
def lock_for_submission(store: Store) -> Iterator[None]:
    """Hold while content is looked up, sent, and named by a plan. Waits for a sweep, never for
    another submission."""
    with _hold_lock(store, exclusive=False):
        yield


@contextmanager
def lock_for_sweep(store: Store) -> Iterator[None]:
    """Hold while unused content is removed. Waits for submissions to end.

    Raises:
        StoreError: they have not, in `SUBMISSIONS_TAKE_S`: one may be of a process that is stopped.
    """
    with _hold_lock(store, exclusive=True):
        yield


@contextmanager
def _hold_lock(store: Store, *, exclusive: bool) -> Iterator[None]:
    folder = folder_of(store)
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
            f"The store {root} cannot be opened: {error}. Set KINETIC_HOME, or KINETIC_STORE "
            "alone, to a folder that you own."
        ) from error


def _lock(descriptor: int, root: str, *, exclusive: bool) -> None:
    try:
        if exclusive:
            _await_submissions(descriptor, root)
        else:
            locks.hold(descriptor, shared=True)
    except OSError as error:  # network file systems may refuse to lock a folder
        raise StoreError(
            f"The store {root} cannot be locked: {error}. Set KINETIC_HOME to a folder on a local "
            "disk."
        ) from error


def _await_submissions(descriptor: int, root: str) -> None:
    until = time.monotonic() + SUBMISSIONS_TAKE_S
    while not locks.try_hold(descriptor):
        if time.monotonic() > until:
            raise StoreError(
                f"Others have submitted to {root}, or removed from it, for the last "
                f"{SUBMISSIONS_TAKE_S:g} s, and what they need must not be removed meanwhile. Try "
                "again later; if one was stopped at that (Ctrl-Z), continue it (fg) or end it."
            )
        time.sleep(_LOOK_S)
