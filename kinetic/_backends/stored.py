"""A leader's records in the store, and requests to it through the store.

This module serves all backends whose host 0 leads the gang.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from kinetic._backends.base import Status
from kinetic._core import events, layout, record
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of, status_of_verdict
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic.errors import BackendUnavailable, CorruptRecord, NotFound, StoreError

ANSWERED_WITHIN_S = 30.0
"""Longest wait in seconds for a leader's answer. Leaders read requests at least every 10 s."""
_POLL_S = 0.25


def read_verdict(store: Store, ref: JobRef) -> Status | None:
    """Return the status of a job's stored verdict; None without a verdict."""
    try:
        return parse_verdict(store.get(layout.JobKeys(ref.job_id).outcome))
    except NotFound:
        return None


def parse_verdict(data: bytes) -> Status:
    """Return the status of a job, parsed from its stored verdict."""
    try:
        outcome = Outcome.read(data)
    except CorruptRecord:
        return Status(JobStatus.FAILED, "its outcome is damaged")
    return Status(status_of_verdict(outcome.verdict), outcome.reason)


def status_of_unknown(store: Store, ref: JobRef, now: float) -> JobStatus:
    """Return the status of a job that has no verdict and is unknown to its backend."""
    reference, plan = layout.JobKeys(ref.job_id).ref, layout.JobKeys(ref.job_id).plan
    # The plan is written first, the reference is deleted last.
    recorded = store.has(reference) and store.has(plan)
    status_if_created = partial(status_of, None, JobStatus.NOT_FOUND, recorded=recorded, now=now)
    status = status_if_created(created_at=ref.created_at)
    if status is JobStatus.FAILED and not ref.place.is_supervised:
        # The time in the reference is from the submitter's clock, which may be wrong.
        entries = store.entries(layout.JobKeys(ref.job_id).prefix)
        written_at = next(
            (entry.written_at for entry in entries if entry.key == plan), ref.created_at
        )
        return status_if_created(created_at=written_at)
    return status


def has_begun(store: Store, ref: JobRef, attempt: int = 0) -> bool:
    """True if the leader's events say that all hosts of any attempt were ready. With `attempt`,
    true if there is any event of this attempt."""
    gang_events = _read_events(store, ref)
    if attempt:
        return any(event.attempt == attempt for event in gang_events)
    return any(event.kind is events.EventKind.READY for event in gang_events)


def is_running(store: Store, ref: JobRef) -> bool:
    """True if the leader's events say that all hosts of the newest attempt are ready."""
    kinds = (events.EventKind.READY, events.EventKind.ENDED, events.EventKind.RETRY)
    last = next((e.kind for e in reversed(_read_events(store, ref)) if e.kind in kinds), None)
    return last is events.EventKind.READY


def _read_events(store: Store, ref: JobRef) -> list[events.GangEvent]:
    try:
        return events.parse(store.get(layout.JobKeys(ref.job_id).events))
    except NotFound:
        return []


def ask_to_kill(
    store: Store,
    ref: JobRef,
    hosts: Sequence[int],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> tuple[int, ...]:
    """Ask a leader to kill hosts. Return those that were running; () if the job has ended.

    Raises:
        BackendUnavailable: the leader has not answered.
    """
    request_id = os.urandom(8).hex()
    keys = layout.AttemptKeys(ref.job_id, attempts.find_newest(store, ref.job_id))
    order, answer = keys.order(request_id), keys.order_answer(request_id)
    store.put(order, json.dumps({"id": request_id, "hosts": list(hosts)}).encode())
    try:
        until = clock() + ANSWERED_WITHIN_S
        while clock() < until:
            with contextlib.suppress(NotFound):
                return tuple(map(int, record.parse(store.get(answer))["hosts"]))
            if store.has(layout.JobKeys(ref.job_id).outcome):
                return ()
            pause(_POLL_S)
    finally:  # The leader must not obey a request that its caller has given up.
        for key in (order, answer):
            with contextlib.suppress(StoreError):
                store.delete(key)
    raise BackendUnavailable(
        f"The process that leads {ref.job_id} has not answered within {ANSWERED_WITHIN_S:g} s. It "
        "may be starting, or beginning another attempt: try again."
    )
