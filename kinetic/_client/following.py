"""Step 4, follow: a job's output as it is printed, then its verdict.

In: `JobRef`, a backend, a store. Out: `LogChunk`s and `Tick`s, then exactly one `Finished`; bytes
on this process's streams. Also the one place of the library that tells the caller something on
stderr (`notice`).
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import functools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from kinetic._backends.base import Backend, LogRequest, Phase
from kinetic._core import layout, record
from kinetic._core.log_format import STDERR, LogChunk
from kinetic._core.outcome import Exit, HostReport, Outcome, judge
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, StoreError

_log = logging.getLogger("kinetic.following")
STARTING_S = 60.0
"""A job that nobody runs yet counts as being submitted for this long after its reference was
made."""
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
OnStatus = Callable[[Phase], Any]


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
    if not phase.ended or is_starting(store, ref, phase, now):
        return None
    return stored(store, ref, now) or _judge_orphan(store, ref, phase, now)


def standing(store: Store, ref: JobRef, phase: Phase, now: float) -> tuple[Phase, Outcome | None]:
    """Return where a job stands of which its backend says `phase`, and the verdict where there is
    one.

    The one answer for Python, the CLI and the notebook: a job whose supervisor was killed is judged
    by what its hosts reported.
    """
    found = stored(store, ref, now)
    if found is None and phase is Phase.NOT_FOUND:
        with contextlib.suppress(NotFound):
            phase = Phase.PENDING if is_starting(store, ref, phase, now) else phase
    elif found is None and phase.ended:
        found = _judge_orphan(store, ref, phase, now)
    if found is not None:
        phase = Phase.SUCCEEDED if found.ok else Phase.FAILED
    return phase, found


def is_starting(store: Store, ref: JobRef, phase: Phase, now: float) -> bool:
    """Whether a job that its backend does not know (yet) may be in the hands of the process that
    submits it.

    A clock that was set back since does not make a job start for ever.

    Raises:
        NotFound: the job's records were removed.
    """
    if phase is not Phase.NOT_FOUND:
        return False
    if not (
        store.has(layout.ref(ref.job_id)) and store.has(layout.plan(ref.job_id))
    ):  # The plan is written first.
        raise NotFound(f"The records of {ref.job_id} were removed: there is nothing left to read.")
    return abs(now - ref.created_at) < STARTING_S


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


def _judge_orphan(store: Store, ref: JobRef, phase: Phase, now: float) -> Outcome:
    """Judge a job whose supervisor was killed first, and leave the verdict for others; the first
    one to do so is right."""
    gone = phase is Phase.NOT_FOUND
    reason = (
        "the job was never started: its submission was interrupted"
        if gone
        else "the job's supervisor was killed"
    )
    outcome = replace(_judge(store, ref, now, reason), supervisor_lost=True)
    if not gone and all(r.exit in (Exit.STOPPED, Exit.AGENT_LOST) for r in outcome.reports):
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
        self, status: Callable[[], Phase], on_status: OnStatus | None, clock: Callable[[], float]
    ) -> None:
        self._status = status
        self._on_status = on_status
        self._clock = clock
        self._last: Phase | None = None
        self._next_look = -math.inf

    def __call__(self, outcome: Outcome | None = None) -> None:
        """Look, if it is time to; with a verdict, tell that."""
        if self._on_status is None or (outcome is None and self._clock() < self._next_look):
            return
        self._next_look = self._clock() + LOOK_EVERY_S
        phase = (
            self._status() if outcome is None else Phase.SUCCEEDED if outcome.ok else Phase.FAILED
        )
        if phase is not self._last:
            self._last = phase
            self._on_status(phase)


class Printer:
    """Writes output to this process's stdout and stderr: the same bytes, on the same stream, at
    once.

    Promises: (1) real streams get the bytes unchanged, streams without bytes (notebooks) get text;
    (2) a stream that breaks is left alone, and the job goes on being watched.
    """

    def __init__(self, *, prefixed: bool = False) -> None:
        self._prefixed = prefixed
        self._broken: set[int] = set()
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}
        self._open_line_of: int | None = None

    def write(self, chunk: LogChunk) -> None:
        """Write one chunk."""
        if chunk.stream in self._broken:
            return
        stream = sys.stderr if chunk.stream == STDERR else sys.stdout
        try:
            self._put(stream, self.shown(chunk), (chunk.host, chunk.stream))
        except (OSError, ValueError) as error:  # ValueError: the stream was closed.
            self._broken.add(chunk.stream)
            _log.warning(
                "output cannot be written any more (%s); it is kept, see `kinetic jobs logs`", error
            )

    def _put(self, stream: Any, data: bytes, source: tuple[int, int]) -> None:
        if stream is None:
            return
        raw = getattr(stream, "buffer", None)
        if raw is None:
            decoder = self._decoders.setdefault(
                source, codecs.getincrementaldecoder("utf-8")("replace")
            )
            stream.write(decoder.decode(data))
            stream.flush()
            return
        stream.flush()
        _write_all(raw, data)

    def shown(self, chunk: LogChunk) -> bytes:
        """Return the bytes to show: with the host in front of each line, where that was asked
        for."""
        if not self._prefixed:
            return chunk.data
        prefix = b"[host %d] " % chunk.host
        body, end = (chunk.data[:-1], b"\n") if chunk.data.endswith(b"\n") else (chunk.data, b"")
        text = body.replace(b"\n", b"\n" + prefix) + end
        start = b"" if self._open_line_of is None else b"\n"
        start = b"" if self._open_line_of == chunk.host else start + prefix
        self._open_line_of = None if end else chunk.host
        return start + text


def _write_all(raw: Any, data: bytes) -> None:
    """Write to a stream that may be unbuffered (it may take less than it is given) or not block (it
    may take nothing)."""
    view = memoryview(data)
    while view:
        try:
            taken = raw.write(view) or 0
        except BlockingIOError as full:
            taken = full.characters_written
        view = view[taken:]
        if view and not taken:
            time.sleep(0.01)
    while not _flushed(raw):
        time.sleep(0.01)


def _flushed(raw: Any) -> bool:
    try:
        raw.flush()
    except BlockingIOError:  # What it still holds would be lost when the stream is closed.
        return False
    return True


_told: set[str] = set()


def notice(text: str, *, once: bool = True) -> None:
    """Tell the caller something on stderr; the same words only once in a process."""
    if once and text in _told:
        return
    _told.add(text)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # AttributeError: there is no stderr (pythonw).
        _log.info("%s", text)


def tell_last(interrupt: KeyboardInterrupt, text: str) -> None:
    """Let these be the last words of what Python prints of an interrupt; where it is caught, the
    last words of this process."""
    interrupt.add_note(text)
    atexit.register(_tell_unless_shown, interrupt, text)


def _tell_unless_shown(interrupt: KeyboardInterrupt, text: str) -> None:
    # what the interpreter, or a notebook, has printed
    if getattr(sys, "last_value", None) is not interrupt:
        notice(text, once=False)


F = TypeVar("F", bound=Callable[..., Any])


def leads_to_the_caller(method: F) -> F:
    """Leave our frames out of what a handle's blocking method raises; after Ctrl-C, say last how to
    come back to the job."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            if not getattr(interrupt, "__notes__", ()):
                tell_last(interrupt, self._parting_words())
            interrupt.__traceback__ = None
            raise
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code in (call.__code__, method.__code__):
                trace = trace.tb_next
            error.__traceback__ = trace
            raise

    return cast("F", functools.wraps(method)(call))
