"""What a job's leader leaves in the store.

In: a store, a reference. Out: a `Status`, whether an attempt has begun. The same for all backends
whose host 0 leads the gang.
"""

from __future__ import annotations

from kinetic._backends.base import Status
from kinetic._core import events, layout
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound


def verdict(store: Store, ref: JobRef) -> Status | None:
    """Return the status of the stored verdict; None if there is none."""
    try:
        return parse_verdict(store.get(layout.outcome(ref.job_id)))
    except NotFound:
        return None


def parse_verdict(data: bytes) -> Status:
    """Return the status of a stored verdict."""
    try:
        outcome = Outcome.read(data)
    except CorruptRecord:
        return Status(JobStatus.FAILED, "its verdict is damaged")
    return Status(status_of_verdict(outcome.verdict), outcome.reason)


def has_begun(store: Store, ref: JobRef, attempt: int = 0) -> bool:
    """Return whether all hosts of an attempt were ever there, as the job's leader says; of one
    attempt, whether it has a leader."""
    try:
        told = events.parse(store.get(layout.events(ref.job_id)))
    except NotFound:
        return False
    if attempt:
        return any(event.attempt == attempt for event in told)
    return any(event.kind is events.EventKind.READY for event in told)


def note_cancellation(store: Store, ref: JobRef) -> bool:
    """Record that somebody wants the job to end; return whether it has not ended yet."""
    if store.has(layout.outcome(ref.job_id)):
        return False
    store.put(layout.cancellation(ref.job_id), b"{}\n", if_absent=True)
    return True
