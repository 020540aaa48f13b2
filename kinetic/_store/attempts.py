"""The attempts of a job: starts of its gang, from 1.

In: a store, a job's id. Out: numbers of attempts.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._core.outcome import HostReport


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


def reports(store: Store, job_id: str, attempt: int, hosts: int) -> list[HostReport]:
    """Return what the hosts of an attempt have reported; a damaged report counts as none."""
    from kinetic._core import record
    from kinetic._core.outcome import HostReport  # numbers of attempts do without

    found = []
    for host in range(hosts):
        try:
            data = store.get(layout.report(job_id, attempt, host))
            found.append(HostReport.from_json(record.parse(data)))
        except (NotFound, CorruptRecord):
            continue  # The judge takes a host without a report for lost.
    return found
