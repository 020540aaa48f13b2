"""Step 4, follow: stream a job's output as it is printed, then its verdict. Outages of the backend
or the store do not end the stream while the job may still run."""

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
"""Give up after this many consecutive failures without output: about half a minute."""
QUIET_S = 60.0
"""Failures that are further apart do not count as consecutive."""
TRIES_BEFORE_WARNING = 3
POLL_EVERY_S = 0.25
EXPLAIN_EVERY_S = 2.0


@dataclass(frozen=True)
class Tick:
    """An event without news, which lets the caller check its deadline.

    Attributes:
        fault: why the backend or the store cannot be read now; "" if it can.
    """

    fault: str = ""


@dataclass(frozen=True)
class Finished:
    """The end of the job, yielded after all its output."""

    outcome: Outcome


@dataclass(frozen=True)
class Waiting:
    """An event: the reason why the job does not run yet has changed."""

    reason: str

    def line_for(self, ref: JobRef) -> str:
        """Return the line to print while the caller waits."""
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
    """Yield a job's output, and at the end its verdict. Without `request.follow`, yield only the
    output so far.

    Promises: (1) with `follow`, exactly one `Finished`, as the last event; (2) a verdict even if
    the job's supervisor was killed; (3) an event at least every 0.1 s, so that the caller can check
    its deadline; (4) a broken stream resumes where it broke: no output is lost or repeated. If the
    backend does not answer, `follow` retries as long as the job may run. It gives up after half a
    minute without `request.follow`, or if a remote store does not answer.

    Raises:
        BackendUnavailable, StoreError: retrying did not help.
        NotFound: the job's records were removed.
        UsageError: the job has no attempt with the requested number.
        UnsupportedVersion: another version of kinetic runs the job, so its output cannot be read.
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
            if outcome is not None and (request.hosts == () or reading.is_complete):
                break
            # If there is a verdict, read once more at once: the stream may have ended just before
            # the job. Without a verdict, pause first: the job has not started yet, or the stream
            # broke.
            pause_s = PAUSE_S if outcome is None else 0.0
        except (BackendUnavailable, StoreError) as error:
            if not _may_pass(store, error):
                raise
            pause_s, fault = reading.count_failure(error, now()), str(error)
            if isinstance(error, BackendUnavailable) and request.follow:
                outcome = outcome or _peek_verdict(board, store, ref)
            if outcome is not None and reading.is_hopeless:
                _log.warning(
                    "the rest of the output of %s cannot be read; `kinetic jobs logs %s` tries "
                    "again. The error: %s",
                    ref.job_id,
                    ref.job_id,
                    error,
                )
                break
            if reading.is_hopeless and (isinstance(error, StoreError) or not request.follow):
                raise
        while pause_s > 0:  # In short pauses, so that the caller can check its deadline.
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
    """Yield a job's output so far, or with `request.follow` until the job ends; yield None when
    there is nothing new. `tell` is called with each reason why the job does not run yet.

    Raises the errors of `follow`.
    """
    for event in follow(backend, store, ref, request, now=now, pause=pause):
        if isinstance(event, Waiting) and tell is not None:
            tell(event.line_for(ref))
        if not isinstance(event, Finished):
            yield event if isinstance(event, LogChunk) else None


def _check(store: Store, ref: JobRef, request: LogRequest) -> None:
    """Refuse to read an attempt that does not exist, or the output of another version."""
    if request.hosts == ():
        return
    ref.check_version()
    if request.attempt is not None:
        attempts.check(store, ref.job_id, request.attempt)


def _may_pass(store: Store, error: BackendUnavailable | StoreError) -> bool:
    """True if the failure may be temporary, so that a retry may help. Failures of a local folder, a
    full store and a damaged record are not."""
    if isinstance(error, BackendUnavailable):
        return True
    lasting = isinstance(error, CorruptRecord | UnsupportedVersion | StoreFull)
    return not lasting and not is_near(store)


def _peek_verdict(board: JobBoard, store: Store, ref: JobRef) -> Outcome | None:
    """Return the stored verdict; None if there is none, or if the store does not answer."""
    try:
        return board.verdict(ref)
    except StoreError as error:
        if not _may_pass(store, error):
            raise
        return None


class _OutputReading:
    """Reads a job's output, continuing with a new stream if one breaks."""

    def __init__(self, backend: Backend, ref: JobRef, request: LogRequest) -> None:
        self._backend = backend
        self._ref = ref
        self._request = request
        self._failures = 0
        self._failed_at = -math.inf
        self.is_complete = False
        """True if the last stream began to read its end when the job had its verdict."""

    def stream(self) -> Iterator[LogChunk | None]:
        """Yield the chunks after the last one that was read, until the stream ends."""
        read = dict(self._request.after)
        try:
            for chunk in self._read():
                if chunk is not None:
                    read[chunk.host] = chunk.end
                    self._failures = 0
                yield chunk if chunk is not None and chunk.data else None
        finally:
            self._request = replace(self._request, after=read)

    def _read(self) -> Iterator[LogChunk | None]:
        chunks: Any = self._backend.logs(self._ref, self._request)
        self.is_complete = (yield from chunks) is True

    def count_failure(self, error: KineticError, now: float) -> float:
        """Count a failure. Return the number of seconds to wait before opening the next stream."""
        if now - self._failed_at > QUIET_S:
            self._failures = 0
        self._failed_at = now
        self._failures += 1
        if self._failures == TRIES_BEFORE_WARNING:
            _log.warning(
                "the output and state of %s cannot be read at present; kinetic keeps trying. The "
                "error: %s",
                self._ref.job_id,
                error,
            )
        return min(PAUSE_S * 2.0 ** (self._failures - 1), LONGEST_PAUSE_S)

    @property
    def is_hopeless(self) -> bool:
        """True after too many consecutive failures."""
        return self._failures >= TRIES


class _StartReasons:
    """Asks the backend why a job does not run yet."""

    def __init__(self, backend: Backend | None, ref: JobRef) -> None:
        self._backend: Explains | None = backend if isinstance(backend, Explains) else None
        self._ref = ref
        self._next_ask_at = -math.inf
        self._reason = ""

    def news(self, now: float) -> Waiting | Tick:
        """Return `Waiting` with a new reason, or `Tick`. Asks the backend at most every 2 s."""
        if self._backend is None or now < self._next_ask_at:
            return Tick()
        self._next_ask_at = now + EXPLAIN_EVERY_S
        try:
            reason = self._backend.why_waiting(self._ref)
        except BackendUnavailable:
            return Tick()  # `follow` handles the outage.
        if reason is None:
            self._backend = None
        if not reason or reason == self._reason:
            return Tick()
        self._reason = reason
        return Waiting(reason)


class StatusWatch:
    """Calls a user's `on_status_change` with each new status; polls at most every 0.25 s."""

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
        """Read the status if a poll is due, or take it from the job's verdict `outcome`. If it is
        new, pass it to the callback."""
        if self._on_status is None or (outcome is None and self._clock() < self._next_poll_at):
            return
        self._next_poll_at = self._clock() + POLL_EVERY_S
        try:
            status = self._status() if outcome is None else status_of_verdict(outcome.verdict)
        except (BackendUnavailable, StoreError):
            return  # `follow` handles the outage.
        if status is not self._last:
            self._last = status
            self._on_status(status)
