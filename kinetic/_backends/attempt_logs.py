"""Reading a job's output, one attempt after the other, for every backend and store."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial

from kinetic._backends.base import LogRequest, Status
from kinetic._core import layout
from kinetic._core.log_format import FAILURE, STDERR, STDOUT, LogChunk, Position
from kinetic._core.ref import JobRef
from kinetic._store import attempts
from kinetic._store.base import Store, is_near, pause_after, pause_of
from kinetic._store.log_segments import GROWS_BYTES, FileLog, ObjectLog, open_stored_log
from kinetic._store.many import at_once
from kinetic.errors import BackendUnavailable

FILES_EVERY_S = 0.02
POLL_SOON_S, POLL_LATE_S = 0.2, 0.5
"""Seconds between polls of a store that is not a folder: while output arrives, and after a long
silence. The process that writes the output pauses too, so a line may take longer."""
TICK_S = 0.05
ASK_EVERY_S = 1.0
"""Seconds between calls to a cluster while a job is followed; the store is polled more often."""

Pause = Callable[[int], Iterator[None]]
"""Waits before the next poll, and yields None often meanwhile. The argument is the number of bytes
that the last poll read."""
Watch = Callable[[int, Sequence[int]], AbstractContextManager[Pause]]
"""Watches the output of an attempt's hosts, given the attempt's number and the hosts' indices."""
AskStatus = Callable[[Sequence[JobRef]], Mapping[str, Status]]
"""Returns the status of jobs by id, like `Backend.status`."""


class LogReader:
    """A reader of the growing output of one host in one attempt."""

    def __init__(
        self, log: FileLog | ObjectLog, host: int, *, attempt: int = 1, failures: bool = True
    ) -> None:
        self._log = log
        self.host = host
        self._attempt = attempt
        self._failures = failures
        self._at = 0

    def start_at(self, offset: int) -> None:
        """Start to read at this offset, in bytes."""
        self._at = offset

    def start_at_tail(self, lines: int) -> int:
        """Start to read at the last `lines` existing lines; return how many lines there are."""
        pieces: list[bytes] = []
        line_ends, end, is_end = 0, 0, not self._failures
        segments = self._log.read_back()
        for at, _, stream, data in (c for s in segments for c in reversed([*s.chunks()])):
            is_end = is_end and stream == FAILURE
            if is_end:
                continue
            end = end or at
            pieces.append(data)
            line_ends += data.count(b"\n")
            if line_ends > lines:
                break
        tail_lines = last_lines(b"".join(reversed(pieces)), lines)
        self._at = end - len(tail_lines)
        return tail_lines.count(b"\n") + (not tail_lines.endswith(b"\n") and bool(tail_lines))

    def mark_position(self) -> LogChunk:
        """Return an empty chunk with the current position."""
        return self._chunk(STDOUT, 0, b"")

    def read(self, *, to_end: bool = False) -> Iterator[LogChunk]:
        """Yield the next part of the new output, if there is any. `to_end`: the host has ended."""
        has_output = False
        while not has_output and (segments := self._log.read(self._at, to_end=to_end)):
            for segment in segments:
                for end, time_ns, stream, data in segment.chunks(self._at):
                    self._at = end
                    if stream != FAILURE or self._failures:
                        has_output = True
                        yield self._chunk(STDERR if stream == FAILURE else stream, time_ns, data)

    def close(self) -> None:
        """Close the log's files."""
        self._log.close()

    def _chunk(self, stream: int, time_ns: int, data: bytes) -> LogChunk:
        return LogChunk(self.host, stream, time_ns, data, Position(self._attempt, self._at))


def last_lines(data: bytes, lines: int) -> bytes:
    """Return the last lines of the data. The very last one may lack its line end."""
    if lines <= 0:
        return b""
    at = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        at = data.rfind(b"\n", 0, max(at, 0))
        if at < 0:
            return data
    return data[at + 1 :]


def read(
    store: Store,
    ref: JobRef,
    request: LogRequest,
    has_ended: Callable[[], bool],
    watch: Watch | None = None,
) -> Iterator[LogChunk | None]:
    """Yield the output so far; if `request.follow` is true, all output until the job has ended.

    Args:
        store: the store with the hosts' output.
        ref: the job.
        request: the output to read.
        has_ended: returns True if the job has ended; called rarely, because it may use the network.
        watch: waits for more output; None to poll.
    """

    def open_reader(attempt: int, host: int) -> LogReader:
        log = open_stored_log(store, request.key(ref, attempt, host))
        return LogReader(log, host, attempt=attempt, failures=request.failures)

    @cache
    def find_newest() -> int:
        return request.attempt or attempts.find_newest(store, ref.job_id)

    first = request.attempt or 1
    starts: dict[int, Position] = {}
    tail = None if request.follow else request.tail
    lines_to_read = None if tail is None else dict.fromkeys(range(ref.hosts), tail)
    for host in request.hosts if request.hosts is not None else range(ref.hosts):
        if host in request.after:
            starts[host] = request.after[host]
        elif request.tail is not None:
            numbers = range(find_newest(), first - 1, -1)
            yield (begin := _find_tail(request.tail, (open_reader(n, host) for n in numbers)))
            starts[host] = begin.end
        else:
            starts[host] = Position(first)
    begin_at = min(starts.values()).attempt if starts else find_newest()
    for attempt in itertools.count(begin_at):

        def is_over(attempt: int = attempt) -> bool:
            return has_ended() or _is_repeated(store, ref, attempt)

        hosts = [host for host, start in starts.items() if start.attempt <= attempt]
        readers = [open_reader(attempt, host) for host in hosts]
        for reader in readers:
            if starts[reader.host].attempt == attempt:
                reader.start_at(starts[reader.host].offset)
        try:
            if request.follow:
                with _poll(store) if watch is None else watch(attempt, hosts) as pause:
                    yield from _follow(readers, is_over, pause, store.calls_at_once)
            by_turns = request.follow or request.metrics
            for group in [readers] if by_turns else [[reader] for reader in readers]:
                yield from _limit(drain(group, store.calls_at_once), lines_to_read)
        finally:
            for reader in readers:
                reader.close()
        if attempt == request.attempt or not _is_repeated(store, ref, attempt):
            return


def _limit(chunks: Iterator[LogChunk], lines: dict[int, int] | None) -> Iterator[LogChunk]:
    """Stop after `lines[host]` lines of each host: later lines were written after the start of the
    tail was computed. None for no limit."""
    for chunk in chunks:
        if lines is None:
            yield chunk
            continue
        rows = re.findall(rb"[^\n]*\n|[^\n]+", chunk.data)[: lines[chunk.host]]
        lines[chunk.host] -= sum(row.endswith(b"\n") for row in rows)
        yield replace(chunk, data=b"".join(rows))


def read_of_cluster(
    store: Store,
    ref: JobRef,
    request: LogRequest,
    status: AskStatus,
    open_ending_fd: Callable[[], int | None] | None = None,
) -> Generator[LogChunk | None, None, bool]:
    """Read the output of a job on a cluster, like `read`. Return True if the job had its verdict
    before the last read: then there is no more output. The job has ended if its verdict is
    stored, or if `status` says so; `status` is called less often than the store is polled. A call
    on a session often ends before the first call of `status`: `open_ending_fd` then returns a
    descriptor, and the store is polled as soon as that becomes readable."""
    ask_at, failed = 0.0 if open_ending_fd is None else time.monotonic() + ASK_EVERY_S, False
    has_verdict = False

    def has_ended() -> bool:
        nonlocal ask_at, failed, has_verdict
        has_verdict = store.has(layout.JobKeys(ref.job_id).outcome)
        if has_verdict:
            return True
        if time.monotonic() < ask_at:
            return False
        ask_at = time.monotonic() + ASK_EVERY_S
        try:
            ended = status([ref])[ref.job_id].phase.ended
        except BackendUnavailable:
            if failed:
                raise
            failed = True  # Raise only if it fails again: reading output does not need the cluster.
            return False
        failed = False
        return ended

    def watch(attempt: int, hosts: Sequence[int]) -> AbstractContextManager[Pause]:
        return _poll(store, open_ending_fd() if open_ending_fd else None)

    yield from read(store, ref, request, has_ended, watch)
    return has_verdict


def _is_repeated(store: Store, ref: JobRef, attempt: int) -> bool:
    """True if the attempt is over and another one has begun."""
    return store.has(layout.AttemptKeys(ref.job_id, attempt).outcome)


def _find_tail(lines: int, readers: Iterator[LogReader]) -> LogChunk:
    """Return an empty chunk at the position where the last lines of a host begin, possibly in an
    earlier attempt. The readers come newest attempt first."""
    for reader in readers:
        lines -= reader.start_at_tail(lines)
        begin = reader.mark_position()
        reader.close()
        if lines <= 0:
            break
    return begin


def _follow(
    readers: Sequence[LogReader], is_over: Callable[[], bool], pause: Pause, threads: int
) -> Iterator[LogChunk | None]:
    """Yield output until the attempt is over. `drain` then yields the rest."""
    over, new_bytes, checked_at = False, 0, 0.0

    def check_end() -> Iterator[LogChunk]:
        nonlocal over
        over = is_over()
        return iter(())

    while not over:
        polls: list[Callable[[], Iterator[LogChunk]]] = [reader.read for reader in readers]
        # While there is output, check for the end less often: the check is a call over the network.
        if not new_bytes or threads < 2 or time.monotonic() - checked_at >= POLL_SOON_S:
            checked_at = time.monotonic()
            polls.insert(0, check_end)
        new_bytes = 0
        for chunk in _read_chunks(polls, threads):
            new_bytes += len(chunk.data)
            yield chunk
        if not over:
            yield from pause(new_bytes)


def drain(readers: Sequence[LogReader], threads: int) -> Iterator[LogChunk]:
    """Yield what is left to read after the hosts have ended; use `threads` threads."""
    polls = [partial(reader.read, to_end=True) for reader in readers]
    has_more = True
    while has_more:
        has_more = False
        for chunk in _read_chunks(polls, threads):
            has_more = True
            yield chunk


def _read_chunks(
    polls: Sequence[Callable[[], Iterator[LogChunk]]], threads: int
) -> Iterator[LogChunk]:
    """Yield the chunks of all polls, in order. With two or more `threads`, poll in parallel."""
    if threads < 2:
        for poll in polls:
            yield from poll()
    else:
        for chunks in at_once(lambda poll: list(poll()), polls, threads):
            yield from chunks


@contextlib.contextmanager
def _poll(store: Store, ending_fd: int | None = None) -> Iterator[Pause]:
    """Yield a function that waits between two polls of the store. The wait is longer while no
    output arrives, and in a store that is no folder, where each poll is a call over the network.
    One wait ends early when `ending_fd` becomes readable. That descriptor is closed at the end."""
    soon_s, late_s, tick_s = (POLL_SOON_S, POLL_LATE_S, TICK_S)
    if is_near(store):
        soon_s = late_s = tick_s = FILES_EVERY_S
    polled_at = came_at = time.monotonic()
    is_watched, ending = ending_fd is not None, select.poll()
    if ending_fd is not None:
        ending.register(ending_fd, select.POLLIN)

    def pause(new_bytes: int) -> Iterator[None]:
        nonlocal polled_at, came_at, is_watched
        took_s = time.monotonic() - polled_at
        came_at = polled_at if new_bytes else came_at
        least_s = pause_of(store, took_s, soon_s)
        next_at = polled_at + pause_after(polled_at - came_at, least_s, late_s)
        while new_bytes < GROWS_BYTES and time.monotonic() < next_at:
            yield None
            if not is_watched:
                time.sleep(tick_s)
            elif ending.poll(1000 * tick_s):
                is_watched = False
                break
        polled_at = time.monotonic()

    try:
        yield pause
    finally:
        if ending_fd is not None:
            with contextlib.suppress(OSError):  # The program may have closed it.
                os.close(ending_fd)
