"""The output of a job, one attempt after the other: the same for every backend.

In: readers of one host's output in one attempt, and a function that follows such readers. Out:
chunks in order, as `Backend.logs` promises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.log_format import LogChunk, Position
from kinetic._core.ref import JobRef
from kinetic._store import attempts
from kinetic._store.base import Store


class Reader(Protocol):
    """Reads the output of one host in one attempt."""

    def start_at(self, offset: int) -> None:
        """Skip this many bytes."""
        ...

    def start_at_tail(self, lines: int) -> int:
        """Skip all but the last `lines` lines that exist; return how many those are."""
        ...

    def here(self) -> LogChunk:
        """An empty chunk with the current position."""
        ...

    def read(self) -> Iterator[LogChunk]:
        """Yield some of the new output."""
        ...

    def rest(self) -> Iterator[LogChunk]:
        """Yield what is left at the end."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


R = TypeVar("R", bound=Reader)
ReaderOf = Callable[[int, int], R]
"""Makes the reader of an attempt and a host."""


def read(
    store: Store,
    ref: JobRef,
    request: LogRequest,
    reader_of: ReaderOf[R],
    follow: Callable[[int, list[R]], Iterator[LogChunk | None]],
) -> Iterator[LogChunk | None]:
    """Yield the output so far or, when following, all of it until the job has ended.

    Args:
        store: where the attempts are recorded.
        ref: the job.
        request: which output to read.
        reader_of: makes readers.
        follow: reads an attempt with these readers until it is over.
    """
    newest = request.attempt or attempts.newest(store, ref.job_id)
    first = request.attempt or 1
    starts: dict[int, Position] = {}
    for host in request.hosts if request.hosts is not None else range(ref.hosts):
        if host in request.after:
            starts[host] = request.after[host]
        elif request.tail is not None:
            yield (begin := _tail(host, request.tail, range(first, newest + 1), reader_of))
            starts[host] = begin.end
        else:
            starts[host] = Position(first)
    for attempt in itertools.count(min(starts.values(), default=Position(newest)).attempt):
        readers = _readers(attempt, starts, reader_of)
        try:
            yield from follow(attempt, readers) if request.follow else drain(readers)
        finally:
            for reader in readers:
                reader.close()
        if attempt == request.attempt or not is_repeated(store, ref, attempt):
            return


def is_repeated(store: Store, ref: JobRef, attempt: int) -> bool:
    """Whether the attempt is over and another one has begun."""
    return store.has(layout.attempt_outcome(ref.job_id, attempt))


def drain(readers: Sequence[Reader]) -> Iterator[LogChunk]:
    """Yield everything that is left."""
    for reader in readers:
        while chunks := list(reader.read()):
            yield from chunks
        yield from reader.rest()


def _tail(host: int, lines: int, numbers: Sequence[int], reader_of: ReaderOf[R]) -> LogChunk:
    """An empty chunk with the position at which the last lines of a host begin, possibly in an
    earlier attempt."""
    for number in reversed(numbers):
        reader = reader_of(number, host)
        lines -= reader.start_at_tail(lines)
        begin = reader.here()
        reader.close()
        if lines <= 0:
            break
    return begin


def _readers(attempt: int, starts: Mapping[int, Position], reader_of: ReaderOf[R]) -> list[R]:
    """Readers of the hosts' output in this attempt, each at its starting position."""
    readers = []
    for host, start in starts.items():
        if start.attempt <= attempt:
            readers.append(reader := reader_of(attempt, host))
            if start.attempt == attempt and start.offset:
                reader.start_at(start.offset)
    return readers
