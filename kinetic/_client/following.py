"""Step 4, follow: a job's output as it is printed, then its verdict.

In: `JobRef`, a backend, a store. Out: `LogChunk`s and `Tick`s, then exactly one `Finished`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kinetic._backends.base import Backend, Explains, LogRequest
from kinetic._client.board.reader import JobBoard
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._core.values import dataclass
from kinetic._store import attempts
from kinetic._store.base import Store, is_near
from kinetic.errors import (
    BackendUnavailable,
    CorruptRecord,
    KineticError,
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
TRIES_BEFORE_WARNING = 3
POLL_EVERY_S = 0.25
EXPLAIN_EVERY_S = 2.0


@dataclass(frozen=True)
class Tick:
    """Nothing new: a moment to look at the clock.

    Attributes:
        fault: why nothing can be known of the job now; "" while it can.
    """

    fault: str = ""


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
    """Yield a job's output, and in the end its verdict. Ends are awaited by `waiter` where nobody
    reads the output; here the wait is over when all of it was read.

    Promises: (1) exactly one `Finished`, and nothing after it; (2) a verdict even if the job's
    supervisor was killed; (3) an event at least every tenth of a second, so that the caller can
    look at its clock; (4) a stream that breaks is resumed where it broke: nothing is lost or
    repeated. A backend that does not answer is asked again for as long as the job runs, a remote
    store for half a minute. A request without `follow` yields the output so far and no `Finished`,
    and asks a backend, too, for half a minute only.

    Raises:
        StoreError: the store does not answer.
        NotFound: the job's records were removed.
        UsageError: the job has had no such attempt.
        UnsupportedVersion: another version of kinetic runs the job: its output cannot be read.
    """
    _check(store, ref, request)
    reading = _OutputReading(backend, ref, request)
    start = _StartReasons(backend if request.follow else None, ref)
    board = JobBoard(store, lambda _: backend, now)
    outcome: Outcome | None = None
    while True:
        pause_s, fault = PAUSE_S, ""
        try:
            for chunk in reading.stream():
                yield start.news(now()) if chunk is None else chunk
            if outcome is not None or not request.follow:
                break
            outcome = board.outcome(ref)
            if outcome is not None and request.hosts == ():
                break
            # The stream may have ended early, just before the job did: the rest is read once more.
            # Without a verdict, the job was not started yet, or the stream broke.
            pause_s = PAUSE_S if outcome is None else 0.0
        except (BackendUnavailable, StoreError) as error:
            if not _may_pass(store, error):
                raise
            pause_s, fault = reading.count_failure(error, now()), str(error)
            if isinstance(error, BackendUnavailable) and request.follow:
                outcome = outcome or _peek_verdict(board, store, ref)
            if outcome is not None and reading.is_hopeless:
                _log.warning("the rest of the output of %s cannot be read: %s", ref.job_id, error)
                break
            if reading.is_hopeless and (isinstance(error, StoreError) or not request.follow):
                raise
        while pause_s > 0:  # In pieces, so that the caller can look at its clock.
            yield Tick(fault)
            pause(min(pause_s, PAUSE_S))
            pause_s -= PAUSE_S
    if outcome is not None:
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
    for event in follow(backend, store, ref, request, now=now, pause=pause):
        if isinstance(event, Waiting) and tell is not None:
            tell(event.line_for(ref))
        if not isinstance(event, Finished):
            yield event if isinstance(event, LogChunk) else None


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
    return not lasting and not is_near(store)


def _peek_verdict(board: JobBoard, store: Store, ref: JobRef) -> Outcome | None:
    """The stored verdict; None also if the store does not answer."""
    try:
        return board.verdict(ref)
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
        if self._failures == TRIES_BEFORE_WARNING:
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

    def __init__(self, backend: Backend | None, ref: JobRef) -> None:
        self._backend: Explains | None = backend if isinstance(backend, Explains) else None
        self._ref = ref
        self._next_ask_at = -math.inf
        self._reason = ""

    def news(self, now: float) -> Waiting | Tick:
        """Ask, if it is time to."""
        if self._backend is None or now < self._next_ask_at:
            return Tick()
        self._next_ask_at = now + EXPLAIN_EVERY_S
        try:
            reason = self._backend.why_waiting(self._ref)
        except BackendUnavailable:
            return Tick()  # Following reports it and goes on.
        if reason is None:
            self._backend = None
        if not reason or reason == self._reason:
            return Tick()
        self._reason = reason
        return Waiting(reason)


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
        self._next_poll_at = -math.inf

    def __call__(self, outcome: Outcome | None = None) -> None:
        """Ask, if it is time to; with a verdict, report that."""
        if self._on_status is None or (outcome is None and self._clock() < self._next_poll_at):
            return
        self._next_poll_at = self._clock() + POLL_EVERY_S
        try:
            status = self._status() if outcome is None else status_of_verdict(outcome.verdict)
        except (BackendUnavailable, StoreError):
            return  # Following meets it too, and goes on or raises.
        if status is not self._last:
            self._last = status
            self._on_status(status)
