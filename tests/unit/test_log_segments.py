"""Output and events of a job in a store that is not a folder."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore

from kinetic._backends import attempt_logs
from kinetic._backends.attempt_logs import LogReader, drain
from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.log_format import FAILURE, STDERR, STDOUT, LogChunk, Position
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._host.agent.log_writer import HostLog
from kinetic._store import log_segments
from kinetic._store.event_log import EventLog
from kinetic._store.local import LocalStore
from kinetic._store.log_segments import FileLog, ObjectLog, SegmentWriter
from kinetic.errors import StoreError

JOB = "job-00c0ffee"
KEY = layout.HostKeys(JOB, 1, 0).log


class Host:
    """A host's log, which is two files, and the writer that sends the log to the store."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        folder.mkdir()
        self.files = (folder / "log", folder / "log.idx")
        self.times = iter(range(1, 10**6))
        self.log = HostLog(*self.files, clock_ns=lambda: next(self.times))
        self.writer = SegmentWriter(store, KEY, self.files)

    def local(self, **options) -> list[LogChunk]:
        reader = LogReader(FileLog(*self.files), 0, **options)
        return [*reader.read(), *drain([reader], threads=1)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(delay_s=0.0001)


@pytest.fixture
def host(tmp_path, store) -> Host:
    return Host(tmp_path / "host", store)


def reader_of(store: MemoryStore, *, clock=time.monotonic, **options) -> LogReader:
    return LogReader(ObjectLog(store, KEY, clock=clock), 0, **options)


def everything(reader: LogReader) -> list[LogChunk]:
    return list(drain([reader], threads=1))


def speak(host: Host, rounds: int, *, seed: int = 0) -> None:
    """Print random lines, and send the log to the store after about every third print."""
    chance = random.Random(seed)
    for n in range(rounds):
        line = f"line {n} {'x' * chance.randrange(30)}\n" * chance.randrange(1, 4)
        host.log.write(chance.choice((STDOUT, STDERR)), line.encode())
        if chance.random() < 0.3:
            assert host.writer.flush()
    assert host.writer.flush()


def test_segments_hold_what_the_files_hold(host, store):
    speak(host, 50)
    assert everything(reader_of(store)) == host.local()
    assert len(list(store.list(f"{KEY}.d"))) < 30


def test_a_reader_gets_what_is_new_and_no_more(host, store):
    reader, chunks = reader_of(store, clock=iter(range(1000)).__next__), []
    for n in range(5):
        speak(host, 3, seed=n)
        while new := list(reader.read()):
            chunks += new
    assert chunks == host.local()


@pytest.mark.parametrize("failures", [True, False])
def test_a_reader_can_start_at_the_end_of_any_chunk(host, store, failures):
    speak(host, 20)
    host.log.say("Traceback", FAILURE)
    assert host.writer.flush()
    chunks = everything(reader_of(store, failures=failures))
    for n, chunk in enumerate(chunks):
        reader = reader_of(store, failures=failures)
        reader.start_at(chunk.end.offset)
        assert reader.mark_position().end == chunk.end
        assert everything(reader) == chunks[n + 1 :]
    assert [c.end for c in chunks] == [
        Position(offset=c.end.offset) for c in host.local(failures=failures)
    ]


@pytest.mark.parametrize("failures", [True, False])
@pytest.mark.parametrize("open_line", [b"", b"open"])
def test_a_tail_is_that_of_the_files(host, store, failures, open_line):
    speak(host, 30)
    if open_line:
        host.log.write(STDOUT, open_line)
    host.log.say("Traceback\nmore", FAILURE)
    assert host.writer.flush()
    for lines in (0, 1, 2, 3, 7, 30, 1000):
        expected = LogReader(FileLog(*host.files), 0, failures=failures)
        expected.start_at_tail(lines)
        reader = reader_of(store, failures=failures)
        reader.start_at_tail(lines)
        assert reader.mark_position().end.offset == expected.mark_position().end.offset
        assert b"".join(c.data for c in everything(reader)) == b"".join(
            c.data for c in expected.read()
        )


def test_a_tail_of_nothing_is_nothing(store):
    reader = reader_of(store)
    reader.start_at_tail(3)
    assert everything(reader) == []


@pytest.mark.parametrize("takes_it", [True, False])
def test_a_store_that_fails_loses_nothing_and_doubles_nothing(tmp_path, takes_it):
    class Failing(MemoryStore):
        fails = False

        def put(self, key, data, *, if_absent=False):
            if self.fails and not takes_it:
                raise StoreError("no")
            wrote = super().put(key, data, if_absent=if_absent)
            if self.fails:
                raise StoreError("the answer was lost")
            return wrote

    store = Failing()
    host = Host(tmp_path / "host", store)
    for n in range(10):
        host.log.write(STDOUT, f"{n}\n".encode())
        store.fails = n % 3 == 1
        assert host.writer.flush(patience_s=0) == (not store.fails)
    store.fails = False
    host.log.close()
    host.writer.close()
    assert b"".join(c.data for c in everything(reader_of(store))) == b"".join(
        f"{n}\n".encode() for n in range(10)
    )


def test_another_agent_goes_on_behind_the_one_that_was_killed(tmp_path, host, store):
    speak(host, 5)
    before = host.local()
    second = Host(tmp_path / "again", store)
    speak(second, 5, seed=1)
    chunks = everything(reader_of(store))
    assert [c.data for c in chunks] == [c.data for c in [*before, *second.local()]]
    ends = [c.end.offset for c in chunks]
    assert ends == sorted(set(ends))


def test_output_without_an_index_record_is_sent_when_the_writer_closes(host, store):
    host.log.write(STDOUT, b"with a record\n")
    with host.files[0].open("ab") as log:
        log.write(b"without")
    host.writer.close()
    assert [c.data for c in everything(reader_of(store))] == [b"with a record\n", b"without"]


def test_a_damaged_segment_is_passed_over(host, store, caplog):
    for n in range(4):
        host.log.write(STDOUT, b"%d\n" % n)
        assert host.writer.flush()
    keys = list(store.list(f"{KEY}.d"))
    store.put(keys[1], b"garbage")
    assert b"".join(c.data for c in everything(reader_of(store))) == b"0\n2\n3\n"
    assert "skipped" in caplog.text
    store.put(keys[0], b"garbage")
    assert b"".join(c.data for c in everything(reader_of(store))) == b"2\n3\n"


def test_a_failure_that_is_left_out_does_not_hide_what_follows(host, store):
    reader = reader_of(store, failures=False)
    assert not list(reader.read())
    for stream, data in ((FAILURE, b"Traceback\n"), (STDERR, b"of an exit handler\n")):
        host.log.write(stream, data)
        assert host.writer.flush()
    assert [chunk.data for chunk in everything(reader)] == [b"of an exit handler\n"]


def test_a_long_log_is_cut_into_pieces(host, store, monkeypatch):
    monkeypatch.setattr(log_segments, "SEGMENT_BYTES", 1 << 14)
    for _ in range(20):
        host.log.write(STDOUT, b"x" * 9999 + b"\n")
    assert host.writer.flush()
    assert len(list(store.list(f"{KEY}.d"))) == 20
    assert everything(reader_of(store)) == host.local()


def test_output_is_sent_while_it_is_printed(tmp_path):
    arrived = threading.Event()

    class Telling(MemoryStore):
        def put(self, key, data, *, if_absent=False):
            wrote = super().put(key, data, if_absent=if_absent)
            arrived.set()
            return wrote

    store = Telling()
    host = Host(tmp_path / "host", store)
    host.log.send_by(host.writer)
    host.log.write(STDOUT, b"first\n")
    assert arrived.wait(200)
    assert [c.data for c in reader_of(store).read()] == [b"first\n"]
    host.log.write(STDOUT, b"last\n")
    host.log.close()
    assert [c.data for c in everything(reader_of(store))] == [b"first\n", b"last\n"]


# -- long jobs: the newest segment grows -----------------------------------------------------------


class Clock:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def old_host(tmp_path, store, clock, monkeypatch) -> Host:
    """A host as after a minute of output: new output makes the newest segment grow."""
    monkeypatch.setattr(log_segments, "FEW", 0)
    host = Host(tmp_path / "old", store)
    host.writer = SegmentWriter(store, KEY, host.files, clock=clock)
    return host


def objects(store: MemoryStore) -> int:
    return len(list(store.list(f"{KEY}.d")))


@pytest.mark.parametrize("seed", range(20))
def test_readers_see_a_log_whose_segments_grow_as_it_is(old_host, store, clock, seed):
    """Readers get all output once, whenever they begin and wherever they continue."""
    chance = random.Random(seed)
    readers, chunks = [reader_of(store, clock=clock)], [[]]
    for n in range(150):
        for _ in range(chance.randrange(3)):
            line = f"{n} {'x' * chance.choice((0, 10, 3000))}\n"
            old_host.log.write(chance.choice((STDOUT, STDERR)), line.encode())
        if chance.random() < 0.7:
            assert old_host.writer.flush()
        clock.now += chance.choice((0.0, 1.0, 1.0, 7.0, 40.0))
        for reader, got in zip(readers, chunks, strict=True):
            if chance.random() < 0.5:
                got.extend(reader.read())
        if chance.random() < 0.05:
            begun = chance.choice(chunks)[:]
            reader = reader_of(store, clock=clock)
            reader.start_at(begun[-1].end.offset if begun else 0)
            readers.append(reader)
            chunks.append(begun)
    old_host.log.close()
    old_host.writer.close()
    for reader, got in zip(readers, chunks, strict=True):
        got.extend(drain([reader], threads=1))
        assert got == old_host.local()
        assert [c.end for c in got] == sorted({c.end for c in got})


def test_a_log_of_days_has_few_segments(old_host, store, clock):
    for n in range(3600):
        old_host.log.write(STDOUT, f"step {n}\n".encode())
        assert old_host.writer.flush()
        clock.now += 1.0
    assert objects(store) <= 361
    assert everything(reader_of(store)) == old_host.local()


def test_each_read_gets_the_lines_printed_since_the_last_read(old_host, store, clock):
    reader = reader_of(store, clock=clock)
    for n in range(100):
        clock.now += n % 30
        old_host.log.write(STDOUT, f"{n}\n".encode())
        assert old_host.writer.flush()
        assert [chunk.data for chunk in reader.read()] == [f"{n}\n".encode()]


def test_a_quiet_log_is_not_read_again_and_again(old_host, store, clock):
    reader = reader_of(store, clock=clock)
    old_host.log.write(STDOUT, b"x" * 9999 + b"\n")
    assert old_host.writer.flush()
    list(reader.read())
    clock.now += 30
    store.forget_calls()
    for _ in range(100):
        assert not list(reader.read())
        clock.now += attempt_logs.POLL_LATE_S
    assert store.calls["get"] <= 100 + 100 * 0.5 / log_segments.REREAD_EVERY_S + 1


def test_a_segment_that_was_written_late_is_found(old_host, store, clock, monkeypatch):
    """A reader finds output that was added to the newest segment by a write that took minutes."""
    reader = reader_of(store, clock=clock)
    old_host.log.write(STDOUT, b"one\n")
    assert old_host.writer.flush()
    list(reader.read())
    old_host.log.write(STDOUT, b"two\n")
    arriving = []
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", lambda *call: arriving.append(call))
        assert old_host.writer.flush()
    for _ in range(200):
        clock.now += 1
        assert not list(reader.read())
    store.put(*arriving.pop())
    clock.now += log_segments.REREAD_EVERY_S
    assert [chunk.data for chunk in reader.read()] == [b"two\n"]


def test_a_reader_of_a_free_store_keeps_up_with_a_frequent_writer(tmp_path, store):
    """To a store with free calls, a writer sends many times a second. Regression: each send made an
    object, a reader read one object per poll, and output came later and later."""
    store.is_unmetered = True
    host, reader = Host(tmp_path / "host", store), reader_of(store)
    for look in range(3):
        for n in range(5):
            host.log.write(STDOUT, f"{look} {n}\n".encode())
            assert host.writer.flush()
        assert [chunk.data for chunk in reader.read()] == [
            f"{look} {n}\n".encode() for n in range(5)
        ]
    assert objects(store) == 1


def test_what_was_sent_twice_does_not_grow(tmp_path, monkeypatch):
    """A segment that was sent again never grows: the first write may arrive late and replace it."""
    monkeypatch.setattr(log_segments, "FEW", 0)

    class Failing(MemoryStore):
        fails = False

        def put(self, key, data, *, if_absent=False):
            if self.fails:
                raise StoreError("no")
            return super().put(key, data, if_absent=if_absent)

    store = Failing()
    host = Host(tmp_path / "host", store)
    for n in range(4):
        host.log.write(STDOUT, f"{n}\n".encode())
        store.fails = n == 1
        host.writer.flush(patience_s=0)
        store.fails = False
        host.writer.flush()
    assert objects(store) == 2
    assert everything(reader_of(store)) == host.local()


def test_a_job_is_followed_to_its_end(host, store):
    ref = JobRef(JOB, Place("gke"), "cpu:1", "f", "f", 0.0, store.uri)
    host.log.write(STDOUT, b"first\n")
    assert host.writer.flush()
    ended = iter([False, True])
    found = []
    for chunk in attempt_logs.read(store, ref, LogRequest(), lambda: next(ended)):
        if chunk is None and len(found) == 1:
            host.log.write(STDERR, b"last\n")
            assert host.writer.flush()
        if chunk is not None:
            found.append(chunk)
    assert found == host.local()
    after = LogRequest(after={0: found[0].end}, follow=False)
    assert list(attempt_logs.read(store, ref, after, lambda: True)) == found[1:]
    tail = LogRequest(tail=1, follow=False)
    assert [c.data for c in attempt_logs.read(store, ref, tail, lambda: True)] == [b"", b"last\n"]


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "distant"])
def test_events_are_added_in_order(tmp_path, kind):
    store = LocalStore(tmp_path) if kind == "folder" else MemoryStore(delay_s=0.001)
    key = layout.JobKeys(JOB).events
    store.put(layout.JobKeys(JOB).plan, b"{}")
    for attempt in range(2):
        log = EventLog(store, key)
        for n in range(50):
            log.write(json.dumps([attempt, n]) + "\n")
        log.close()
    lines = [json.loads(line) for line in store.get(key).splitlines()]
    assert lines == [[attempt, n] for attempt in range(2) for n in range(50)]
    if isinstance(store, MemoryStore):
        assert store.calls["put"] < 60


def test_events_wait_for_a_store_that_fails(monkeypatch):
    monkeypatch.setattr("kinetic._store.event_log.RETRY_PAUSE_S", 0.001)

    class Failing(MemoryStore):
        failures = 3

        def put(self, key, data, *, if_absent=False):
            if self.failures:
                self.failures -= 1
                raise StoreError("no")
            return super().put(key, data, if_absent=if_absent)

    store = Failing()
    log = EventLog(store, "events")
    log.write("one\n")
    log.write("two\n")
    log.close()
    assert store.get("events") == b"one\ntwo\n"


@pytest.mark.parametrize("printed", [b"", b"a line\n", b"no end of line"])
def test_a_leader_adds_its_lines_when_the_host_writes_no_more(host, store, printed):
    reader = reader_of(store)
    if printed:
        host.log.write(STDOUT, printed)
    host.writer.close()
    before = list(reader.read())
    log_segments.add_lines(store, KEY, "kinetic: slice 1 lost", 7)
    (lines,) = everything(reader)
    assert (lines.stream, lines.data.strip()) == (STDERR, b"kinetic: slice 1 lost")
    assert b"".join(c.data for c in everything(reader_of(store))) == (printed + lines.data), (
        "for those who come later as well"
    )
    assert (printed + lines.data).splitlines()[-1] == b"kinetic: slice 1 lost"
    assert b"".join(c.data for c in before) in (printed, b"")
