"""Step 4, follow: a job's output as it is printed, then its verdict.

In: `JobRef`, a backend, a store. Out: `LogChunk`s and `Tick`s, then exactly one `Finished`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kinetic._backends.base import Backend, LogRequest
from kinetic._core import layout, record
from kinetic._core.exits import Exit
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import HostReport, Outcome, judge
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of, status_of_verdict
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, StoreError

_log = logging.getLogger("kinetic.following")
PAUSE_S = 0.1
LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class Tick:
    """Nothing new: a moment to look at the clock."""


@dataclass(frozen=True)
class Finished:
    """The job has ended and all its output was given."""

    outcome: Outcome


Event = LogChunk | Tick | Finished
OnStatus = Callable[[JobStatus], Any]


def follow(
    backend: Backend,
    store: Store,
    ref: JobRef,
    request: LogRequest,
    *,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Yield a job's output, and in the end its verdict.

    Promises: (1) exactly one `Finished`, and nothing after it; (2) a verdict even when the job's
    supervisor was killed; (3) at least every tenth of a second an event, so that the caller can
    look at its clock.

    Raises:
        NotFound: the job's records were removed.
    """
    silent = replace(request, hosts=())
    while True:
        again = request
        for chunk in backend.logs(ref, request):
            yield Tick() if chunk is None else chunk
            again = again if chunk is None else silent
        outcome = settle(backend, store, ref, now())
        if outcome is not None:
            yield Finished(outcome)
            return
        yield Tick()
        pause(PAUSE_S)
        request = (
            again  # It was not started yet, or the stream broke: what was shown is not shown twice.
        )


def settle(backend: Backend, store: Store, ref: JobRef, now: float) -> Outcome | None:
    """Return the verdict, making one when whoever should have judged was killed; None while the job
    goes on.

    Raises:
        NotFound: the job's records were removed.
    """
    found = stored(store, ref, now)
    if found is not None:
        return found
    phase = backend.phase(ref)
    status = _status_without_verdict(store, ref, phase, now)
    if status is JobStatus.NOT_FOUND:
        raise NotFound(f"The records of {ref.job_id} were removed: there is nothing left to read.")
    if not status.ended:
        return None
    return stored(store, ref, now) or _judge_orphan(store, ref, phase, now)


def standing(
    store: Store, ref: JobRef, phase: JobStatus, now: float
) -> tuple[JobStatus, Outcome | None]:
    """Return what a job is of which its backend says `phase`, and the verdict where there is one.

    A job whose supervisor was killed is judged by what its hosts reported.
    """
    found = stored(store, ref, now)
    if found is None and phase.ended and phase is not JobStatus.NOT_FOUND:
        found = _judge_orphan(store, ref, phase, now)
    if found is not None:
        return status_of_verdict(found.verdict), found
    return _status_without_verdict(store, ref, phase, now), None


def _status_without_verdict(store: Store, ref: JobRef, phase: JobStatus, now: float) -> JobStatus:
    return status_of(
        None,
        phase,
        recorded=phase is not JobStatus.NOT_FOUND or _is_recorded(store, ref),
        created_at=ref.created_at,
        now=now,
    )


def _is_recorded(store: Store, ref: JobRef) -> bool:
    # The plan is written first, the reference is deleted last.
    return store.has(layout.ref(ref.job_id)) and store.has(layout.plan(ref.job_id))


def stored(store: Store, ref: JobRef, now: float) -> Outcome | None:
    """Return the stored verdict; a damaged one is rebuilt from the hosts' reports."""
    try:
        return Outcome.from_json(record.parse(store.get(layout.outcome(ref.job_id))))
    except NotFound:
        return None
    except CorruptRecord as damage:
        _log.warning(
            "the verdict of %s is damaged (%s); it is rebuilt from the hosts' reports",
            ref.job_id,
            damage,
        )
    rebuilt = _judge(store, ref, now)
    return (
        rebuilt
        if rebuilt.ok
        else replace(rebuilt, reason=f"{rebuilt.reason} (the stored verdict is damaged)")
    )


def _judge(store: Store, ref: JobRef, now: float, reason: str = "") -> Outcome:
    reports = list(_reports(store, ref))
    attempt = max((r.attempt for r in reports), default=1)
    attempt = max(attempt, _attempt_begun(store, ref))
    return judge(
        ref.hosts,
        [r for r in reports if r.attempt == attempt],
        reason=reason,
        now=now,
        attempt=attempt,
    )


def _attempt_begun(store: Store, ref: JobRef) -> int:
    """The attempt that was under way: what an earlier one left must not be taken for its end."""
    begun = 1
    with contextlib.suppress(NotFound):
        for line in store.get(layout.events(ref.job_id)).splitlines():
            with contextlib.suppress(CorruptRecord, TypeError):
                event = record.parse(line)
                begun = max(begun, int(event.get("attempt", 1)) + (event.get("kind") == "retry"))
    return begun


def _judge_orphan(store: Store, ref: JobRef, phase: JobStatus, now: float) -> Outcome:
    """Judge a job whose supervisor was killed first, and leave the verdict for others; the first
    one to do so is right.
    """
    gone = phase is JobStatus.NOT_FOUND
    reason = (
        "the job was never started: its submission was interrupted"
        if gone
        else "the job's supervisor was killed"
    )
    outcome = replace(_judge(store, ref, now, reason), supervisor_lost=True)
    if not gone and all(r.exit.kind.hearsay for r in outcome.reports):
        outcome = replace(outcome, reason=_as_agents_saw_it(outcome) or reason)
    try:
        first = store.put(
            layout.outcome(ref.job_id), json.dumps(outcome.to_json()).encode(), if_absent=True
        )
    except StoreError as error:
        _log.warning("the verdict of %s could not be kept: %s", ref.job_id, error)
        return outcome
    return outcome if first else stored(store, ref, now) or outcome


def _reports(store: Store, ref: JobRef) -> Iterator[HostReport]:
    for host in range(ref.hosts):
        try:
            yield HostReport.from_json(record.parse(store.get(layout.report(ref.job_id, host))))
        except (NotFound, CorruptRecord):
            continue  # The judge takes a host without a report for lost.


def _as_agents_saw_it(outcome: Outcome) -> str:
    """What the first of them says: one that gives up ends the supervisor, and the others see only
    that."""
    told = [r for r in outcome.reports if r.exit is Exit.STOPPED and r.detail]
    return min(told, key=lambda r: r.ended_at).detail if told else ""


class StatusWatch:
    """Calls back with each new status, looking not too often."""

    def __init__(
        self,
        status: Callable[[], JobStatus],
        on_status: OnStatus | None,
        clock: Callable[[], float],
    ) -> None:
        self._status = status
        self._on_status = on_status
        self._clock = clock
        self._last: JobStatus | None = None
        self._next_look = -math.inf

    def __call__(self, outcome: Outcome | None = None) -> None:
        """Look, if it is time to; with a verdict, tell that."""
        if self._on_status is None or (outcome is None and self._clock() < self._next_look):
            return
        self._next_look = self._clock() + LOOK_EVERY_S
        status = self._status() if outcome is None else status_of_verdict(outcome.verdict)
        if status is not self._last:
            self._last = status
            self._on_status(status)
