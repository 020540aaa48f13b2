"""The output of a job whose store is no folder.

In: a store, a reference, a `LogRequest`. Out: chunks in order, as promised by `Backend.logs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kinetic._backends import attempt_logs
from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.log_format import LogChunk
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic._store.log_segments import GROWS_BYTES, LOOK_EVERY_S, SegmentReader
from kinetic._store.many import at_once

POLL_S = 0.1


def logs(
    store: Store, ref: JobRef, request: LogRequest, has_ended: Callable[[], bool]
) -> Iterator[LogChunk | None]:
    """Yield what hosts have printed; with `follow` until the job has ended and all was read.

    `has_ended` is asked now and then: it may be a call over a line.
    """

    def reader_of(attempt: int, host: int) -> SegmentReader:
        key = layout.log(ref.job_id, attempt, host)
        return SegmentReader(store, key, host, attempt=attempt, failures=request.failures)

    def follow(attempt: int, readers: list[SegmentReader]) -> Iterator[LogChunk | None]:
        def is_over() -> bool:
            return attempt_logs.is_repeated(store, ref, attempt) or has_ended()

        while True:
            looked_at = time.monotonic()
            # Asked before the last reading: what was printed is there.
            over, new = _look(is_over, readers, store.calls_at_once)
            yield from new
            if over:
                for chunks in at_once(_rest_of, readers, store.calls_at_once):
                    yield from chunks
                return
            is_behind = sum(len(chunk.data) for chunk in new) >= GROWS_BYTES
            while not is_behind and time.monotonic() < looked_at + LOOK_EVERY_S:
                yield None
                time.sleep(POLL_S)

    return attempt_logs.read(store, ref, request, reader_of, follow)


def _look(
    is_over: Callable[[], bool], readers: list[SegmentReader], threads: int
) -> tuple[bool, list[LogChunk]]:
    """All calls of one look at the same time: each takes its time over a line."""
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
