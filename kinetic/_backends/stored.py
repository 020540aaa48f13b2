"""What a job's leader leaves in the store, and what it is asked there.

In: a store, a reference. Out: a `Status`, whether an attempt has begun. The same for all backends
whose host 0 leads the gang.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinetic._backends.base import Status
from kinetic._core import events, layout, record
from kinetic._core.exits import Exit
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic._store.tunnel import Side, StoreConnection
from kinetic.errors import BackendUnavailable, CorruptRecord, NotFound, StoreError

ANSWERED_WITHIN_S = 30.0
"""Where a look is a call, leaders look for requests every ten seconds."""
_LOOK_EVERY_S = 0.25


def verdict(store: Store, ref: JobRef) -> Status | None:
    """Return the status of the stored verdict; None if there is none."""
    try:
        return parse_verdict(store.get(layout.JobKeys(ref.job_id).outcome))
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
    told = _read_events(store, ref)
    if attempt:
        return any(event.attempt == attempt for event in told)
    return any(event.kind is events.EventKind.READY for event in told)


def is_given_up(store: Store, ref: JobRef) -> bool:
    """Return whether all hosts of the newest attempt have ended because they were told to, and
    their leader knows nothing of it: it does not run, and they have given it up."""
    attempt = attempts.newest(store, ref.job_id)
    told = [event for event in _read_events(store, ref) if event.attempt == attempt]
    kinds = {event.kind for event in told}
    if events.EventKind.READY not in kinds or events.EventKind.STOP in kinds:
        return False
    joined = {event.host for event in told if event.kind is events.EventKind.JOINED}
    left = attempts.reports(store, ref.job_id, attempt, ref.hosts)
    return joined <= {report.host for report in left if report.exit is Exit.STOPPED}


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
    """Have a leader kill these hosts; return those that ran, () once the job has ended.

    Raises:
        BackendUnavailable: it has not answered.
    """
    place, request_id = (ref.job_id, attempts.newest(store, ref.job_id)), os.urandom(8).hex()
    request = {"id": request_id, "hosts": list(hosts)}
    answer = _ask_leader(store, place, request, clock, pause)
    return () if answer is None else tuple(map(int, answer["hosts"]))


def open_tunnel(
    store: Store,
    ref: JobRef,
    host: int,
    port: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> StoreConnection:
    """Have a leader bring a port of the loopback address of a host to a tunnel in the store.

    Raises:
        BackendUnavailable: it has not answered.
        ConnectionRefusedError: nothing listens there, or the job has ended.
    """
    place, request_id = (ref.job_id, attempts.newest(store, ref.job_id)), os.urandom(8).hex()
    request = {"id": request_id, "host": host, "port": port}
    answer = _ask_leader(store, place, request, clock, pause)
    if answer is None or answer["refused"]:
        why = f"{ref.job_id} has ended" if answer is None else answer["refused"]
        raise ConnectionRefusedError(f"port {port} of host {host} was refused: {why}")
    return StoreConnection(store, layout.AttemptKeys(*place).tunnel(request_id), Side.CALLER)


def _ask_leader(
    store: Store,
    place: tuple[str, int],
    request: Mapping[str, object],
    clock: Callable[[], float],
    pause: Callable[[float], object],
) -> Mapping[str, Any] | None:
    """Return what the leader of an attempt has answered; None once the job has ended."""
    job_id, request_id = place[0], str(request["id"])
    answer_key = layout.AttemptKeys(*place).order_answer(request_id)
    store.put(layout.AttemptKeys(*place).order(request_id), json.dumps(request).encode())
    try:
        until = clock() + ANSWERED_WITHIN_S
        while clock() < until:
            with contextlib.suppress(NotFound):
                return record.parse(store.get(answer_key))
            if store.has(layout.JobKeys(job_id).outcome):
                return None
            pause(_LOOK_EVERY_S)
    finally:  # What nobody waits for is not to happen later.
        for key in (layout.AttemptKeys(*place).order(request_id), answer_key):
            with contextlib.suppress(StoreError):
                store.delete(key)
    raise BackendUnavailable(
        f"The leader of {job_id} has not answered within {ANSWERED_WITHIN_S:g} s. It may be "
        "starting, or has begun another attempt: try again."
    )
