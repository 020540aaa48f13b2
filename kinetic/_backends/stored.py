"""What a job's hosts leave in the store: their output and the verdict.

In: a store, a reference, a `LogRequest`, whether the job has ended. Out: chunks in order, as
`Backend.logs` promises; a `Status`. The same for all backends whose host 0 leads the gang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kinetic._backends import attempt_logs
from kinetic._backends.base import LogRequest, Status
from kinetic._backends.local.log_reader import LogReader
from kinetic._core import events, layout
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._store.base import Store
from kinetic._store.log_segments import (
    FLOWS_S,
    GROWS_BYTES,
    LOOK_EVERY_S,
    LOOK_SOON_S,
    SegmentReader,
)
from kinetic._store.many import at_once
from kinetic.errors import CorruptRecord, NotFound

FILES_POLL_S, SEGMENTS_POLL_S = 0.02, 0.05


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


def logs(
    store: Store, ref: JobRef, request: LogRequest, has_ended: Callable[[], bool]
) -> Iterator[LogChunk | None]:
    """Yield the hosts' output; with `follow` until the job has ended and all was read."""
    folder = store.as_folder()
    if folder is None:
        return _from_segments(store, ref, request, has_ended)
    return _from_files(folder, store, ref, request, has_ended)


def _from_files(
    folder: Path, store: Store, ref: JobRef, request: LogRequest, has_ended: Callable[[], bool]
) -> Iterator[LogChunk | None]:
    def reader_of(attempt: int, host: int) -> LogReader:
        key = layout.log(ref.job_id, attempt, host)
        index = layout.log_index(ref.job_id, attempt, host)
        files = folder / key, folder / index
        return LogReader(host, *files, attempt=attempt, failures=request.failures)

    def follow(attempt: int, readers: list[LogReader]) -> Iterator[LogChunk | None]:
        ended = False
        while not ended:
            # Checked before reading, so that all that was printed is read.
            ended = attempt_logs.is_repeated(store, ref, attempt) or has_ended()
            got = False
            for reader in readers:
                for chunk in reader.read():
                    got = True
                    yield chunk
            if not got and not ended:
                yield None
                time.sleep(FILES_POLL_S)
        yield from attempt_logs.drain(readers)

    return attempt_logs.read(store, ref, request, reader_of, follow)


def _from_segments(
    store: Store, ref: JobRef, request: LogRequest, has_ended: Callable[[], bool]
) -> Iterator[LogChunk | None]:
    """`has_ended` is asked only now and then: it may be a call over the network."""

    def reader_of(attempt: int, host: int) -> SegmentReader:
        key = layout.log(ref.job_id, attempt, host)
        return SegmentReader(store, key, host, attempt=attempt, failures=request.failures)

    def follow(attempt: int, readers: list[SegmentReader]) -> Iterator[LogChunk | None]:
        def is_over() -> bool:
            return attempt_logs.is_repeated(store, ref, attempt) or has_ended()

        flows_until = 0.0
        while True:
            looked_at = time.monotonic()
            # Checked before reading, so that all that was printed is read.
            over, new = _look(is_over, readers, store.calls_at_once)
            yield from new
            if over:
                for chunks in at_once(_rest_of, readers, store.calls_at_once):
                    yield from chunks
                return
            is_behind = sum(len(chunk.data) for chunk in new) >= GROWS_BYTES
            flows_until = looked_at + FLOWS_S if new else flows_until
            pause_s = LOOK_SOON_S if looked_at < flows_until else LOOK_EVERY_S
            while not is_behind and time.monotonic() < looked_at + pause_s:
                yield None
                time.sleep(SEGMENTS_POLL_S)

    return attempt_logs.read(store, ref, request, reader_of, follow)


def _look(
    is_over: Callable[[], bool], readers: list[SegmentReader], threads: int
) -> tuple[bool, list[LogChunk]]:
    """Make all calls of one look at the same time: each goes over the network."""
    ended: list[bool] = []

    def act(reader: SegmentReader | None) -> list[LogChunk]:
        if reader is not None:
            return list(reader.read())
        ended.append(is_over())
        return []

    found = at_once(act, [None, *readers], threads)
    return ended[0], [chunk for chunks in found for chunk in chunks]


def _rest_of(reader: SegmentReader) -> list[LogChunk]:
    return list(reader.rest())
