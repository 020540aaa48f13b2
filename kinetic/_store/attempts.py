"""The attempts of a job: starts of its gang, from 1.

In: a store, a job's id. Out: numbers of attempts.
"""

from __future__ import annotations

import itertools

from kinetic._core import layout
from kinetic._store.base import Store
from kinetic.errors import UsageError


def newest(store: Store, job_id: str) -> int:
    """Return the current or last attempt: the only one without a verdict of its own."""
    numbers = itertools.count(1)
    return next(n for n in numbers if not store.has(layout.attempt_outcome(job_id, n)))


def check(store: Store, job_id: str, attempt: int) -> None:
    """Refuse an attempt that the job has not had.

    Raises:
        UsageError: the job has no attempt with this number (yet).
    """
    last = newest(store, job_id)
    if isinstance(attempt, bool) or not isinstance(attempt, int) or not 1 <= attempt <= last:
        attempts = "one attempt" if last == 1 else f"attempts 1 to {last}"
        raise UsageError(f"There is no attempt {attempt!r}: {job_id} has {attempts}.")
