"""A follower loses and repeats no output, wherever and however often the stream breaks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from doubles.memory_store import MemoryStore
from hypothesis import given
from hypothesis import strategies as st
from laptop_fakes import NOW, FakeBackend, put_ref, put_success, ref

from kinetic._backends.base import LogRequest, Status
from kinetic._client import following
from kinetic._client.following import Finished
from kinetic._core.log_format import STDOUT, LogChunk, Position
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic.errors import (
    BackendUnavailable,
    StoreError,
    StoreFull,
    UnsupportedVersion,
)

HOSTS = 2


@dataclass(frozen=True)
class Break:
    """A break of a stream after some chunks: by an error if `raises`, otherwise a silent end."""

    after: int
    raises: bool


class Breaking(FakeBackend):
    """A backend whose log streams break one after the other, as `breaks` says; later streams are
    whole. `printed` is the output of all hosts. The job ends with the stream numbered `ends_with`,
    counted from 0; after that, only an error ends a stream early."""

    def __init__(
        self, store: Any, job: JobRef, printed: list[LogChunk], breaks: list[Break], ends_with: int
    ) -> None:
        super().__init__(store)
        self.job, self.printed, self.breaks, self.ends_with = job, printed, breaks, ends_with
        self.phases[job.job_id] = JobStatus.RUNNING

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        number = len(self.requests)
        self.requests.append(request)
        broken = self.breaks[number] if number < len(self.breaks) else None
        ended = number > self.ends_with
        if number == self.ends_with:
            put_success(self.store, self.job, 1)
        for sent, chunk in enumerate(self._asked_for(request)):
            if broken and sent == broken.after and (broken.raises or not ended):
                break
            yield chunk
            yield None
        if broken and broken.raises:
            raise BackendUnavailable("The connection was reset.")

    def _asked_for(self, request: LogRequest) -> Iterator[LogChunk]:
        for chunk in self.printed:
            is_new = chunk.end > request.after.get(chunk.host, Position(0))
            if is_new and (request.hosts is None or chunk.host in request.hosts):
                yield chunk


def printed(*pieces: tuple[int, bytes]) -> list[LogChunk]:
    """Return chunks for (host, data) pieces; the second half of the pieces is from attempt 2."""
    at: dict[int, Position] = {}
    chunks = []
    for number, (host, data) in enumerate(pieces):
        position = at.get(host, Position())
        if number >= len(pieces) // 2 and position.attempt == 1:
            position = Position(2)
        at[host] = position._replace(offset=position.offset + len(data))
        chunks.append(LogChunk(host, STDOUT, number, data, at[host]))
    return chunks


def follow(backend: Breaking, request: LogRequest) -> list[following.Event]:
    return list(
        following.follow(
            backend, backend.store, backend.job, request, now=lambda: NOW + 1, pause=lambda _: None
        )
    )


PIECES = st.lists(
    st.tuples(st.integers(0, HOSTS - 1), st.binary(min_size=1, max_size=3)), max_size=6
)
BREAKS = st.lists(st.builds(Break, st.integers(0, 4), st.booleans()), max_size=5)


@given(PIECES, BREAKS, st.integers(0, 6), st.sampled_from([None, (0,), (1, 0)]))
def test_nothing_is_lost_nothing_comes_twice(tmp_path_factory, pieces, breaks, ends_with, hosts):
    store = LocalStore(tmp_path_factory.mktemp("store"))
    chunks = printed(*pieces)
    backend = Breaking(store, put_ref(store, ref(hosts=HOSTS)), chunks, breaks, ends_with)
    events = follow(backend, LogRequest(hosts=hosts))
    assert [e for e in events if isinstance(e, LogChunk)] == [
        chunk for chunk in chunks if hosts is None or chunk.host in hosts
    ]
    assert [type(e) for e in events].count(Finished) == 1
    assert isinstance(events[-1], Finished)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_a_stream_that_broke_is_asked_for_what_follows(store):
    chunks = printed((0, b"a\n"), (1, b"b\n"), (0, b"c\n"))
    job = put_ref(store, ref(hosts=HOSTS))
    backend = Breaking(store, job, chunks, [Break(2, raises=True)], ends_with=1)
    follow(backend, LogRequest(hosts=None))
    assert [request.after for request in backend.requests[:2]] == [
        {},
        {0: Position(1, 2), 1: Position(2, 2)},
    ]


def test_a_backend_that_does_not_answer_is_reported_once_and_asked_again(store, caplog):
    caplog.set_level(logging.WARNING)
    job = put_ref(store, ref(hosts=1))
    backend = Breaking(store, job, printed((0, b"a\n")), [Break(0, raises=True)] * 9, ends_with=0)
    events = follow(backend, LogRequest())
    assert isinstance(events[-1], Finished)
    (message,) = caplog.messages
    assert "The connection was reset" in message
    assert job.job_id in message


def test_a_status_that_cannot_be_had_is_asked_for_again(store):
    job = put_ref(store, ref(hosts=1))
    backend = Breaking(store, job, printed((0, b"a\n")), [Break(1, raises=False)], ends_with=3)
    refusals = iter([True, True])

    def status(refs: Sequence[JobRef]) -> dict[str, Status]:
        if next(refusals, False):
            raise BackendUnavailable("Too many requests.")
        return {ref.job_id: Status(JobStatus.RUNNING) for ref in refs}

    backend.status = status
    events = follow(backend, LogRequest())
    assert [e.data for e in events if isinstance(e, LogChunk)] == [b"a\n"]


class Flickering(MemoryStore):
    """A distant store whose next `failures` reads raise `error`."""

    failures = 0
    error: type[StoreError] = StoreError

    def get(self, key: str) -> bytes:
        if self.failures:
            self.failures -= 1
            raise self.error("The store answers 503.")
        return super().get(key)


@pytest.mark.parametrize("hosts", [(0,), ()])
@pytest.mark.parametrize("failures", [1, following.TRIES - 1])
def test_a_distant_store_that_fails_for_a_moment_is_asked_again(caplog, hosts, failures):
    caplog.set_level(logging.WARNING)
    store = Flickering()
    job = put_ref(store, ref(hosts=1))
    backend = Breaking(store, job, printed((0, b"a\n")), [Break(1, raises=False)], ends_with=1)
    store.failures = failures
    events = follow(backend, LogRequest(hosts))
    assert [e.data for e in events if isinstance(e, LogChunk)] == [b"a\n"] * len(hosts)
    assert isinstance(events[-1], Finished)
    assert len(caplog.messages) == (failures > 1)


def test_a_distant_store_that_goes_on_failing_is_an_error():
    store = Flickering()
    job = put_ref(store, ref(hosts=1))
    store.failures = 10**6
    with pytest.raises(StoreError, match="503"):
        follow(Breaking(store, job, [], [], ends_with=0), LogRequest(()))
    assert 10**6 - store.failures == following.TRIES


def test_failures_long_apart_are_several_short_ones():
    store = Flickering()
    job = put_ref(store, ref(hosts=1))
    backend = Breaking(store, job, [], [], ends_with=3 * following.TRIES)
    store.failures = 2 * following.TRIES
    clock = itertools.count(NOW, following.QUIET_S + 1)
    request, now = LogRequest(()), clock.__next__
    events = following.follow(backend, store, job, request, now=now, pause=lambda _: None)
    assert isinstance(list(events)[-1], Finished)


@pytest.mark.parametrize("error", [UnsupportedVersion, StoreFull])
def test_what_will_not_pass_is_told_at_once(error):
    store = Flickering()
    job = put_ref(store, ref(hosts=1))
    store.failures, store.error = 1, error
    with pytest.raises(error):
        follow(Breaking(store, job, [], [], ends_with=0), LogRequest(()))


def test_a_folder_that_cannot_be_read_is_told_at_once(tmp_path):
    class Shut(LocalStore):
        def get(self, key: str) -> bytes:
            raise StoreError("Permission denied")

    store = Shut(tmp_path)
    job = put_ref(store, ref(hosts=1))
    with pytest.raises(StoreError, match="denied"):
        follow(Breaking(store, job, [], [], ends_with=5), LogRequest(()))


def test_a_caller_can_look_at_its_clock_while_a_backend_does_not_answer(store):
    job = put_ref(store, ref(hosts=1))
    backend = Breaking(store, job, [], [Break(0, raises=True)] * 6, ends_with=0)
    pauses: list[float] = []
    events = following.follow(backend, store, job, LogRequest(), pause=pauses.append)
    assert len(list(events)) > len(pauses) > 6
    assert max(pauses) <= 0.1


def test_where_a_tail_begins_is_kept(store):
    """The last lines of a host are chosen when the first stream begins, not when it is resumed."""
    job = put_ref(store, ref(hosts=1))
    begins = LogChunk(0, STDOUT, 0, b"", Position(1, 6))
    chunks = [begins, LogChunk(0, STDOUT, 0, b"four\n", Position(1, 11))]
    backend = Breaking(store, job, chunks, [Break(1, raises=True)], ends_with=1)
    events = follow(backend, LogRequest(tail=1))
    assert [e for e in events if isinstance(e, LogChunk)] == chunks[1:]
    assert backend.requests[1].after == {0: Position(1, 6)}


def chunks_of(backend: Breaking) -> list[LogChunk]:
    request = LogRequest(follow=False)
    read = following.chunks(backend, backend.store, backend.job, request, pause=lambda _: None)
    return [chunk for chunk in read if chunk is not None]


def test_what_is_there_is_read_to_its_end_although_the_stream_breaks(store):
    chunks = printed((0, b"a\n"), (0, b"b\n"), (0, b"c\n"))
    job = put_ref(store, ref(hosts=1))
    breaks = [Break(n, raises=True) for n in (1, 0, 0, 1, 0, 0, 0)]
    assert chunks_of(Breaking(store, job, chunks, breaks, ends_with=0)) == chunks


def test_what_cannot_be_read_at_all_is_an_error(store):
    job = put_ref(store, ref(hosts=1))
    breaks = [Break(0, raises=True)] * following.TRIES
    with pytest.raises(BackendUnavailable, match="reset"):
        chunks_of(Breaking(store, job, printed((0, b"a\n")), breaks, ends_with=0))


def test_output_that_cannot_be_had_does_not_withhold_the_verdict(store, caplog):
    job = put_ref(store, ref(hosts=1))
    breaks = [Break(0, raises=True)] * following.TRIES
    events = follow(Breaking(store, job, printed((0, b"a\n")), breaks, ends_with=0), LogRequest())
    assert isinstance(events[-1], Finished)
    assert "the rest of the output" in caplog.text
