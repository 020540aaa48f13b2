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
from kinetic._store.log_segments import LOOK_EVERY_S, SegmentReader
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
        ask_at = 0.0
        while True:
            ended = False
            if time.monotonic() >= ask_at:
                # Asked before reading: what was printed is there.
                ended = attempt_logs.is_repeated(store, ref, attempt) or has_ended()
                ask_at = time.monotonic() + LOOK_EVERY_S
            look = _rest_of if ended else _new_of
            new = at_once(look, readers, store.calls_at_once)
            for chunks in new:
                yield from chunks
            if ended:
                return
            if not any(new):
                yield None
                time.sleep(POLL_S)

    return attempt_logs.read(store, ref, request, reader_of, follow)


def _new_of(reader: SegmentReader) -> list[LogChunk]:
    return list(reader.read())


def _rest_of(reader: SegmentReader) -> list[LogChunk]:
    return list(reader.rest())
