"""Step 4, follow: a job's output as it is printed, then its verdict.

In: `JobRef`, a backend, a store. Out: `LogChunk`s and `Tick`s, then exactly one `Finished`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kinetic._backends.base import Backend, Explains, LogRequest, Status
from kinetic._client.explaining import explain_verdict
from kinetic._core import layout
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import HostReport, Outcome, judge, judge_leaderless, program_code
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of, status_of_verdict
from kinetic._core.values import dataclass
from kinetic._store import attempts, index
from kinetic._store.base import Store
from kinetic._store.many import at_once
from kinetic.errors import (
    BackendUnavailable,
    CorruptRecord,
    KineticError,
    NotFound,
    StoreError,
    StoreFull,
    UnsupportedVersion,
)

_log = logging.getLogger("kinetic.following")
PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
TRIES = 10
"""Failures in a row, without output in between: half a minute."""
QUIET_S = 60.0
"""Failures further apart than this do not count as "in a row"."""
TRIES_UNTOLD = 3
LOOK_EVERY_S = 0.25
EXPLAIN_EVERY_S = 2.0


@dataclass(frozen=True)
class Tick:
    """Nothing new: a moment to look at the clock."""


@dataclass(frozen=True)
class Finished:
    """The job has ended, and all its output was yielded."""

    outcome: Outcome


@dataclass(frozen=True)
class Waiting:
    """The job does not run yet, for a new reason."""

    reason: str

    def line_for(self, ref: JobRef) -> str:
        """Return the line for those who wait."""
        return f"kinetic: {ref.job_id}: {self.reason}"


Event = LogChunk | Tick | Waiting | Finished
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

    Promises: (1) exactly one `Finished`, and nothing after it; (2) a verdict even if the job's
    supervisor was killed; (3) an event at least every tenth of a second, so that the caller can
    look at its clock; (4) a stream that breaks is resumed where it broke: nothing is lost or
    repeated. A backend that does not answer is asked again for as long as the job runs, a remote
    store for half a minute.

    Raises:
        StoreError: the store does not answer.
        NotFound: the job's records were removed.
        UsageError: the job has had no such attempt.
        UnsupportedVersion: another version of kinetic runs the job: its output cannot be read.
    """
    _check(store, ref, request)
    reading, start = _OutputReading(backend, ref, request), _StartReasons(backend, ref)
    outcome: Outcome | None = None
    while True:
        pause_s = PAUSE_S
        try:
            for chunk in reading.stream():
                yield start.news(now()) if chunk is None else chunk
            if outcome is not None:
                break
            outcome = settle(backend, store, ref, now())
            if outcome is not None and request.hosts == ():
                break
            # The stream may have ended early, just before the job did: the rest is read once more.
            # Without a verdict, the job was not started yet, or the stream broke.
            pause_s = PAUSE_S if outcome is None else 0.0
        except (BackendUnavailable, StoreError) as error:
            if not _may_pass(store, error):
                raise
            pause_s = reading.count_failure(error, now())
            if isinstance(error, BackendUnavailable):
                outcome = outcome or _peek_verdict(store, ref, now())
            if outcome is not None and reading.is_hopeless:
                _log.warning("the rest of the output of %s cannot be read: %s", ref.job_id, error)
                break
            if isinstance(error, StoreError) and reading.is_hopeless:
                raise
        for slept_s in _slices(pause_s):
            yield Tick()
            pause(slept_s)
    yield Finished(outcome)


def chunks(
    backend: Backend,
    store: Store,
    ref: JobRef,
    request: LogRequest,
    *,
    tell: Callable[[str], object] | None = None,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[LogChunk | None]:
    """Yield a job's output: what there is, or with `follow` until the job has ended; None while
    there is nothing new. `tell` gets why the job does not run yet.

    Raises:
        BackendUnavailable, StoreError: the output could not be read for half a minute.
        UsageError, UnsupportedVersion: as for `follow`.
    """
    if request.follow:
        for event in follow(backend, store, ref, request, now=now, pause=pause):
            if isinstance(event, Waiting) and tell is not None:
                tell(event.line_for(ref))
            yield event if isinstance(event, LogChunk) else None
        return
    _check(store, ref, request)
    reading = _OutputReading(backend, ref, request)
    while True:
        try:
            yield from reading.stream()
            return
        except (BackendUnavailable, StoreError) as error:
            pause_s = reading.count_failure(error, now())
            if reading.is_hopeless or not _may_pass(store, error):
                raise
        for slept_s in _slices(pause_s):
            yield None
            pause(slept_s)


def _check(store: Store, ref: JobRef, request: LogRequest) -> None:
    """Refuse to read an attempt that the job has not had, or another version's output."""
    if request.hosts == ():
        return
    ref.check_version()
    if request.attempt is not None:
        attempts.check(store, ref.job_id, request.attempt)


def _may_pass(store: Store, error: BackendUnavailable | StoreError) -> bool:
    """Whether asking again may help: not if a folder of this machine cannot be read."""
    if isinstance(error, BackendUnavailable):
        return True
    lasting = isinstance(error, CorruptRecord | UnsupportedVersion | StoreFull)
    return not lasting and store.as_folder() is None


def _peek_verdict(store: Store, ref: JobRef, now: float) -> Outcome | None:
    """The stored verdict; None also if the store does not answer."""
    try:
        return read_verdict(store, ref, now)
    except StoreError as error:
        if not _may_pass(store, error):
            raise
        return None


class _OutputReading:
    """A job's output, read over as many streams as it takes."""

    def __init__(self, backend: Backend, ref: JobRef, request: LogRequest) -> None:
        self._backend = backend
        self._ref = ref
        self._request = request
        self._failures = 0
        self._failed_at = -math.inf

    def stream(self) -> Iterator[LogChunk | None]:
        """Yield what follows the last chunk, until the stream ends."""
        read = dict(self._request.after)
        try:
            for chunk in self._backend.logs(self._ref, self._request):
                if chunk is not None:
                    read[chunk.host] = chunk.end
                    self._failures = 0
                yield chunk if chunk is not None and chunk.data else None
        finally:
            self._request = replace(self._request, after=read)

    def count_failure(self, error: KineticError, now: float) -> float:
        """Count a failure; return how long to wait."""
        if now - self._failed_at > QUIET_S:
            self._failures = 0
        self._failed_at = now
        self._failures += 1
        if self._failures == TRIES_UNTOLD:
            _log.warning(
                "%s cannot be read at present, and is tried again: %s", self._ref.job_id, error
            )
        return min(PAUSE_S * 2.0 ** (self._failures - 1), LONGEST_PAUSE_S)

    @property
    def is_hopeless(self) -> bool:
        """Whether it has failed too often."""
        return self._failures >= TRIES


class _StartReasons:
    """Why a job does not run yet, each time that this changes."""

    def __init__(self, backend: Backend, ref: JobRef) -> None:
        self._backend = backend if isinstance(backend, Explains) else None
        self._ref = ref
        self._look_at = -math.inf
        self._told = ""

    def news(self, now: float) -> Waiting | Tick:
        """Ask, if it is time to."""
        if self._backend is None or now < self._look_at:
            return Tick()
        self._look_at = now + EXPLAIN_EVERY_S
        try:
            reason = self._backend.why_waiting(self._ref)
        except BackendUnavailable:
            return Tick()  # Following reports it and goes on.
        if reason is None:
            self._backend = None
        if not reason or reason == self._told:
            return Tick()
        self._told = reason
        return Waiting(reason)


def _slices(pause_s: float) -> Iterator[float]:
    """Cut a pause into pieces, so that the caller can look at its clock."""
    while pause_s > 0:
        yield min(pause_s, PAUSE_S)
        pause_s -= PAUSE_S


def settle(backend: Backend, store: Store, ref: JobRef, now: float) -> Outcome | None:
    """Return the verdict; judge the job if the process that should have done so was killed. None
    while the job runs.

    Raises:
        NotFound: the job's records were removed.
    """
    found = settle_many(backend, store, [ref], now)[ref.job_id]
    if isinstance(found, KineticError):
        raise found
    return None if found is None else explain_verdict(backend, store, ref, found, now)


def settle_many(
    backend: Backend, store: Store, refs: Sequence[JobRef], now: float
) -> dict[str, Outcome | KineticError | None]:
    """Return what `settle` returns or raises for each of the jobs, by id. The backend is asked
    once for all of them."""
    verdicts = at_once(
        lambda ref: _catch_error(lambda: read_verdict(store, ref, now)), refs, store.calls_at_once
    )
    found = {ref.job_id: verdict for ref, verdict in zip(refs, verdicts, strict=True)}
    going_on = [ref for ref in refs if found[ref.job_id] is None]
    known = backend.status(going_on) if going_on else {}
    for ref in going_on:
        told = known[ref.job_id]
        found[ref.job_id] = _catch_error(partial(_settle_verdict, backend, store, ref, told, now))
    return found


def _release(backend: Backend, ref: JobRef) -> None:
    """Free what a job's leader could not end, such as pods that wait for nodes."""
    try:
        backend.cleanup(ref)
    except KineticError as error:
        _log.warning("%s has ended, and what it holds could not be freed: %s", ref.job_id, error)


def _catch_error(act: Callable[[], Outcome | None]) -> Outcome | KineticError | None:
    try:
        return act()
    except KineticError as error:
        return error


def _settle_verdict(
    backend: Backend, store: Store, ref: JobRef, told: Status, now: float
) -> Outcome | None:
    """Return the verdict of a job that had none before its backend was asked."""
    status = _status_without_verdict(store, ref, told.phase, now)
    if not status.ended:
        return None
    gone = status is JobStatus.NOT_FOUND
    found = None if gone else read_verdict(store, ref, now)
    if found is None:
        judged = None if gone else _judge_orphan(store, ref, told, now)
        if judged is None:
            raise NotFound(
                f"The records of {ref.job_id} were removed: there is nothing left to read."
            )
        found = explain_verdict(backend, store, ref, judged, now)
        if not ref.place.is_supervised:
            _release(backend, ref)
    return found


def read_standing(
    store: Store, ref: JobRef, told: Status, now: float
) -> tuple[JobStatus, Outcome | None]:
    """Return the status of a job, given what its backend says, and its verdict if there is one.

    A job whose supervisor was killed is judged by what its hosts reported.
    """
    phase, found = told.phase, read_verdict(store, ref, now)
    if found is None and phase.ended and phase is not JobStatus.NOT_FOUND:
        found = _judge_orphan(store, ref, told, now)
        phase = JobStatus.NOT_FOUND if found is None else phase
    if found is not None:
        return status_of_verdict(found.verdict), found
    return _status_without_verdict(store, ref, phase, now), None


def _status_without_verdict(store: Store, ref: JobRef, phase: JobStatus, now: float) -> JobStatus:
    known = partial(
        status_of,
        None,
        phase,
        recorded=phase is not JobStatus.NOT_FOUND or _is_recorded(store, ref),
        now=now,
    )
    status = known(created_at=ref.created_at)
    if phase is JobStatus.NOT_FOUND and status is JobStatus.FAILED and not ref.place.is_supervised:
        # The reference has the time of the submitter's clock, which may be wrong.
        return known(created_at=_plan_time(store, ref))
    return status


def _plan_time(store: Store, ref: JobRef) -> float:
    """When the plan was written, by this machine's clock."""
    key = layout.plan(ref.job_id)
    kept = store.entries(key.rpartition("/")[0])
    return next((entry.written_at for entry in kept if entry.key == key), ref.created_at)


def _is_recorded(store: Store, ref: JobRef) -> bool:
    # The plan is written first, the reference is deleted last.
    return store.has(layout.ref(ref.job_id)) and store.has(layout.plan(ref.job_id))


def read_verdict(store: Store, ref: JobRef, now: float) -> Outcome | None:
    """Return the stored verdict; a damaged one is rebuilt from the hosts' reports."""
    try:
        return Outcome.read(store.get(layout.outcome(ref.job_id)))
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
    reports, attempt = _last_attempt(store, ref)
    return judge(ref.hosts, reports, reason=reason, now=now, attempt=attempt)


def _last_attempt(store: Store, ref: JobRef) -> tuple[list[HostReport], int]:
    attempt = attempts.newest(store, ref.job_id)
    return attempts.reports(store, ref.job_id, attempt, ref.hosts), attempt


def _judge_orphan(store: Store, ref: JobRef, told: Status, now: float) -> Outcome | None:
    """Judge a job whose supervisor was killed, and store the verdict unless another process was
    first. None if the job was removed since its backend was asked: nothing is written then."""
    if not store.has(layout.ref(ref.job_id)):
        return None
    outcome = _orphan_verdict(store, ref, told, now)
    try:
        first = index.write_outcome(store, ref.job_id, outcome, if_absent=True)
    except StoreError as error:
        _log.warning("the verdict of %s could not be kept: %s", ref.job_id, error)
        return outcome
    if not store.has(layout.ref(ref.job_id)):
        store.delete(layout.job(ref.job_id))  # Who removed it has not seen this verdict.
        return None
    return outcome if first else read_verdict(store, ref, now) or outcome


def _orphan_verdict(store: Store, ref: JobRef, told: Status, now: float) -> Outcome:
    gone = told.phase is JobStatus.NOT_FOUND
    if not gone and not ref.place.is_supervised:
        reports, attempt = _last_attempt(store, ref)
        return judge_leaderless(
            ref.hosts,
            reports,
            told=[host.as_report() for host in told.hosts if host.phase is not JobStatus.RUNNING],
            reason=told.reason,
            led=store.has(layout.events(ref.job_id)),
            head=ref.place.has_head,
            now=now,
            attempt=attempt,
        )
    reason = (
        "the job was never started: its submission was interrupted"
        if gone
        else "the job's supervisor was killed"
    )
    outcome = replace(_judge(store, ref, now, reason), supervisor_lost=True)
    first = outcome.first
    if first is not None and program_code(first) is not ProgramCode.CODE_FAILED:
        # Had the supervisor lived, another attempt would have followed the loss of a host.
        outcome = replace(outcome, blamed=()) if _is_elastic(store, ref) else outcome
    if not gone and all(r.exit.kind.hearsay for r in outcome.reports):
        outcome = replace(outcome, reason=_as_agents_saw_it(outcome) or reason)
    return outcome


def _is_elastic(store: Store, ref: JobRef) -> bool:
    try:
        plan = Plan.read(store.get(layout.plan(ref.job_id)))
    except KineticError:
        return False
    return plan.elastic_gang is not None


def _as_agents_saw_it(outcome: Outcome) -> str:
    """What the first agent reports: one that gives up ends the supervisor, and the others see only
    that."""
    told = [r for r in outcome.reports if r.exit is Exit.STOPPED and r.detail]
    return min(told, key=lambda r: r.ended_at).detail if told else ""


class StatusWatch:
    """Calls back with each new status, but does not ask too often."""

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
        """Ask, if it is time to; with a verdict, report that."""
        if self._on_status is None or (outcome is None and self._clock() < self._next_look):
            return
        self._next_look = self._clock() + LOOK_EVERY_S
        try:
            status = self._status() if outcome is None else status_of_verdict(outcome.verdict)
        except (BackendUnavailable, StoreError):
            return  # Following meets it too, and goes on or raises.
        if status is not self._last:
            self._last = status
            self._on_status(status)
