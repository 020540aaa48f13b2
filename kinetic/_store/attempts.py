"""Read the attempts of a job (starts of its gang, numbered from 1) from the store."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._store import many
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._core.outcome import HostReport, Outcome


def find_newest(store: Store, job_id: str) -> int:
    """Return the number of the current or last attempt: the first one without an outcome."""
    numbers = itertools.count(1)
    return next(n for n in numbers if not store.has(layout.AttemptKeys(job_id, n).outcome))


def may_follow(store: Store, job_id: str, attempt: int, retries: int) -> bool:
    """True if another attempt may follow this failed one. Attempts that ended because the cluster
    took a host away do not count against `retries`."""
    if attempt <= retries or not retries:
        return attempt <= retries
    return attempt - count_taken_away(store, job_id, attempt) <= retries


def count_taken_away(store: Store, job_id: str, attempt: int) -> int:
    """Count the attempts before this one that ended because the cluster took a host away."""
    from kinetic._core.exits import Exit
    from kinetic._core.outcome import Outcome

    outcomes = many.get_many(
        store, [layout.AttemptKeys(job_id, n).outcome for n in range(1, attempt)]
    )
    ended = [Outcome.read(data).first for data in outcomes.values()]
    return sum(first is not None and first.exit is Exit.EVICTED for first in ended)


def check(store: Store, job_id: str, attempt: int) -> None:
    """Refuse the number of an attempt that the job has not started.

    Raises:
        UsageError: the job has no attempt with this number.
    """
    last = find_newest(store, job_id)
    if isinstance(attempt, bool) or not isinstance(attempt, int) or not 1 <= attempt <= last:
        attempts = "attempt 1" if last == 1 else f"attempts 1 to {last}"
        raise UsageError(f"{job_id} has no attempt {attempt!r}, only {attempts}.")


def read_verdict(store: Store, job_id: str, attempt: int) -> Outcome:
    """Return the outcome of an attempt that is not the last one.

    Raises:
        NotFound: no attempt followed it.
    """
    from kinetic._core.outcome import Outcome

    return Outcome.read(store.get(layout.AttemptKeys(job_id, attempt).outcome))


def read_reports(store: Store, job_id: str, attempt: int, hosts: int) -> list[HostReport]:
    """Return the reports of an attempt's hosts, without missing and damaged ones."""
    from kinetic._core.outcome import HostReport  # slow to import

    hosts_reports = []
    for host in range(hosts):
        try:
            data = store.get(layout.HostKeys(job_id, attempt, host).report)
            hosts_reports.append(HostReport.read(data))
        except (NotFound, CorruptRecord):
            continue  # A host without a report counts as lost.
    return hosts_reports
