"""The log of a host: reads return the bytes that were written, even if its files are damaged."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._backends.attempt_logs import LogReader, drain
from kinetic._core.log_format import FAILURE, RECORD, STDERR, STDOUT
from kinetic._host.agent import log_writer
from kinetic._host.agent.log_writer import HostLog, Tee, open_tees
from kinetic._store import log_segments
from kinetic._store.log_segments import FileLog


@pytest.fixture
def files(tmp_path):
    return tmp_path / "hosts" / "0" / "log", tmp_path / "hosts" / "0" / "log.idx"


def clock():
    return 1_700_000_000_000_000_000


def read_all(files, *, failures=True, start=0, **tail):
    reader = LogReader(FileLog(*files), 3, failures=failures)
    reader.start_at(start)
    if tail:
        reader.start_at_tail(**tail)
    chunks = []
    while got := list(reader.read()):
        chunks += got
    chunks += drain([reader], threads=1)
    reader.close()
    return chunks


@settings(deadline=None, max_examples=30)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(min_size=1, max_size=200)),
        max_size=30,
    )
)
def test_bytes_arrive_as_printed_per_stream(tmp_path_factory, pieces):
    """The log has each stream as it was written. A host without output leaves no files."""
    folder = tmp_path_factory.mktemp("log")
    files = folder / "log", folder / "log.idx"
    log = HostLog(*files, clock_ns=clock)
    for stream, data in pieces:
        log.write(stream, data)
    log.close()
    chunks = read_all(files)
    for stream in (STDOUT, STDERR):
        assert b"".join(c.data for c in chunks if c.stream == stream) == b"".join(
            d for s, d in pieces if s == stream
        )
    written = b"".join(data for _, data in pieces)
    assert b"".join(c.data for c in chunks) == written
    assert [path.exists() for path in files] == [bool(pieces)] * 2
    assert not pieces or files[0].read_bytes() == written
    assert {c.time_ns for c in chunks} <= {clock()}


@pytest.mark.parametrize("damaged", [False, True])
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=9),
    damage=st.integers(0, 8),
)
def test_reading_goes_on_after_any_chunk(tmp_path_factory, pieces, damaged, damage):
    folder = tmp_path_factory.mktemp("log")
    files = folder / "log", folder / "log.idx"
    log = HostLog(*files, clock_ns=clock)
    for data in pieces:
        log.write(STDOUT, data)
    log.close()
    whole = read_all(files)
    if damaged:
        with files[1].open("r+b") as index:
            index.seek(damage % len(pieces) * RECORD.size)
            index.write(b"garbage!")
    for number, chunk in enumerate(whole):
        rest = read_all(files, start=chunk.end.offset)
        assert b"".join(c.data for c in rest) == b"".join(c.data for c in whole[number + 1 :])
        assert damaged or [c.end for c in rest] == [c.end for c in whole[number + 1 :]]


def test_a_tee_cuts_at_line_ends_and_keeps_the_open_line(files):
    log = HostLog(*files, clock_ns=clock)
    read, write = os.pipe()
    tee = Tee(read, STDOUT, log)
    os.write(write, b"one\ntwo\nthr")
    assert tee.pump()
    assert files[0].read_bytes() == b"one\ntwo\n"
    assert tee.has_open_line
    os.write(write, b"ee\n")
    assert tee.pump()
    assert files[0].read_bytes() == b"one\ntwo\nthree\n"
    assert not tee.has_open_line
    os.close(write)
    assert not tee.pump()
    log.close()
    os.close(read)


def test_an_open_line_is_bounded_and_nothing_is_lost(files):
    log = HostLog(*files)
    read, write = os.pipe()
    err_read, err_write = os.pipe()
    out, _ = open_tees(read, err_read, log)
    total = b""
    for _ in range(10):
        data = os.urandom(40_000).replace(b"\n", b"x")
        total += data
        os.write(write, data)
        out.drain()
        assert not out.has_open_line
    assert files[0].read_bytes() == total
    for fd in (read, write, err_read, err_write):
        os.close(fd)
    log.close()


def test_a_full_disk_loses_output_but_says_so_and_recovers(files, monkeypatch):
    log = HostLog(*files, clock_ns=clock)
    log.write(STDOUT, b"kept\n")
    real = os.write

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_writer.os, "write", full)
    log.write(STDOUT, b"lost line\n")
    monkeypatch.setattr(log_writer.os, "write", real)
    log.write(STDOUT, b"kept too\n")
    log.close()
    text = b"".join(c.data for c in read_all(files))
    assert text.startswith(b"kept\nkept too\n")
    assert b"10 bytes of output were lost" in text


@settings(deadline=None, max_examples=40)
@given(damage=st.integers(0, 71), value=st.integers(0, 255))
def test_a_damaged_index_loses_no_output(tmp_path_factory, damage, value):
    folder = tmp_path_factory.mktemp("log")
    files = folder / "log", folder / "log.idx"
    log = HostLog(*files, clock_ns=clock)
    for line in (b"a\n", b"bb\n", b"ccc\n"):
        log.write(STDERR, line)
    log.close()
    index = bytearray(files[1].read_bytes())
    index[damage] = value
    files[1].write_bytes(index)
    assert b"".join(c.data for c in read_all(files)) == b"a\nbb\nccc\n"


def test_a_missing_index_still_shows_the_output(files):
    log = HostLog(*files)
    log.write(STDOUT, b"text\n")
    log.close()
    files[1].unlink()
    assert b"".join(c.data for c in read_all(files)) == b"text\n"


def test_a_host_without_files_is_silent(files):
    assert read_all(files) == []
    assert read_all(files, lines=5) == []


@settings(deadline=None, max_examples=40)
@given(
    lines=st.lists(st.text("ab", max_size=5), max_size=12),
    ends=st.booleans(),
    wanted=st.integers(0, 14),
)
def test_tail_is_what_tail_prints(tmp_path_factory, lines, ends, wanted):
    folder = tmp_path_factory.mktemp("log")
    files = folder / "log", folder / "log.idx"
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    log = HostLog(*files)
    # Write each line separately, as if the lines were printed slowly.
    for line in text.splitlines(keepends=True):
        log.write(STDOUT, line.encode())
    log.close()
    expected = "".join(text.splitlines(keepends=True)[-wanted:]) if wanted else ""
    assert b"".join(c.data for c in read_all(files, lines=wanted)).decode() == expected


def test_a_tail_may_begin_behind_more_records_than_one_batch(files, monkeypatch):
    monkeypatch.setattr(log_segments, "RECORDS_AT_ONCE", 8)
    log = HostLog(*files, clock_ns=clock)
    for number in range(100):
        log.write(STDERR, b"%d\n" % number)
    log.close()
    assert [(c.data, c.stream, c.time_ns) for c in read_all(files, lines=2)] == [
        (b"98\n", STDERR, clock()),
        (b"99\n", STDERR, clock()),
    ]


def test_how_a_host_failed_is_shown_on_stderr_or_left_out(files):
    log = HostLog(*files, clock_ns=clock)
    log.write(STDOUT, b"one\ntwo\n")
    log.say("Traceback 1", FAILURE)
    log.write(STDOUT, b"three\nfour")
    log.say("Traceback 2\nValueError: no", FAILURE)
    assert [(c.stream, c.data) for c in read_all(files)] == [
        (STDOUT, b"one\ntwo\n"),
        (STDERR, b"Traceback 1\n"),
        (STDOUT, b"three\nfour"),
        (STDERR, b"\nTraceback 2\nValueError: no\n"),
    ]
    assert [c.data for c in read_all(files, failures=False)] == [b"one\ntwo\n", b"three\nfour"]
    assert b"".join(c.data for c in read_all(files, lines=2)) == b"Traceback 2\nValueError: no\n"
    assert b"".join(c.data for c in read_all(files, lines=2, failures=False)) == b"three\nfour"
    log.write(STDOUT, b"late\n")  # An exit handler prints this.
    assert [c.data for c in read_all(files, failures=False)][-1] == b"late\n"


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_a_read_that_leaves_out_failures_goes_on_behind_them(files, monkeypatch, batch_bytes):
    monkeypatch.setattr(log_segments, "SEGMENT_BYTES", batch_bytes)
    log = HostLog(*files, clock_ns=clock)
    log.say("Traceback", FAILURE)
    assert read_all(files, failures=False) == []
    log.write(STDERR, b"more\n")
    assert [(c.stream, c.data) for c in read_all(files, failures=False)] == [(STDERR, b"more\n")]
    assert read_all(files, failures=False, lines=0) == []


def test_following_sees_what_is_added_later(files):
    log = HostLog(*files)
    reader = LogReader(FileLog(*files), 0)
    log.write(STDOUT, b"one\n")
    assert [c.data for c in reader.read()] == [b"one\n"]
    assert list(reader.read()) == []
    log.write(STDOUT, b"two\n")
    assert [c.data for c in reader.read()] == [b"two\n"]
    reader.close()
    log.close()


def gloo(rank: int, peers: int) -> bytes:
    return (
        b"[Gloo] Rank %d is connected to %d peer ranks. Expected number of connected peer ranks is "
        b": %d\n"
    ) % (
        rank,
        peers,
        peers,
    )


MIXED = (
    b"[Gloo] Rank [Gloo] Rank 01 is connected to  is connected to 1515 peer ranks. Expected number "
    b"of connected peer ranks is : "
)
MIXED += b"15\n peer ranks. Expected number of connected peer ranks is : 15\n"


def test_only_gloos_own_lines_are_left_out_and_only_where_asked(files):
    log = HostLog(*files)
    read, write = os.pipe()
    err_read, err_write = os.pipe()
    os.write(write, b"a\n" + gloo(0, 15) + b"b\n")
    open_tees(read, err_read, log, without_gloo=True)[0].drain()
    assert files[0].read_bytes() == b"a\nb\n"
    os.write(write, gloo(0, 15))
    open_tees(read, err_read, log)[0].drain()
    assert files[0].read_bytes() == b"a\nb\n" + gloo(0, 15)
    for fd in (read, write, err_read, err_write):
        os.close(fd)
    log.close()


def test_gloos_lines_are_left_out_also_when_a_part_is_read_first(files):
    log = HostLog(*files)
    first = b"mine\n[Gloo] Rank " + gloo(0, 7)
    rest = gloo(1, 7).removeprefix(b"[Gloo] Rank ")
    (read, write), (err_read, err_write) = os.pipe(), os.pipe()
    out = open_tees(read, err_read, log, without_gloo=True)[0]
    for part in (first, rest, b"yours\n"):
        os.write(write, part)
        out.pump()
    out.drain()
    assert files[0].read_bytes() == b"mine\nyours\n"
    for fd in (read, write, err_read, err_write):
        os.close(fd)


INTERRUPTED = b"[Gloo] Rank " + gloo(0, 7) + gloo(1, 7).removeprefix(b"[Gloo] Rank ")


@pytest.mark.parametrize(
    "noise", [gloo(0, 3), gloo(0, 15) + gloo(12, 15), MIXED, gloo(1, 3) + MIXED, INTERRUPTED]
)
def test_gloos_lines_are_known_whole_and_mixed(noise):
    assert log_writer.without_gloo(noise) == b""
    assert log_writer.without_gloo(b"mine\n" + noise + b"7\n mine\n") == b"mine\n7\n mine\n"


@pytest.mark.parametrize(
    "mine",
    [
        b"[Gloo] Rank 3\n",
        b"[Gloo] Rank 0 is mine\n",
        b"42\n",
        b"\n",
        b"7 peer ranks. are too few\n",
        b"[Gloo]\n",
        b"[Gloo] Rank 0 is connected to 3 peer ranks. \n",
        b"3 peer ranks. \n42\n",
        gloo(0, 3)[:-1] + b", says the log\n",
        b"log: " + gloo(0, 3),
    ],
)
def test_lines_that_look_like_gloos_are_kept(mine):
    assert log_writer.without_gloo(mine) == mine
    assert log_writer.without_gloo(b"a\n" + mine + b"b\n") == b"a\n" + mine + b"b\n"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", ""),
        (b"\n \n\t\n", ""),
        (b"one\ntwo\n", "two"),
        (b"one\n\n \n", "one"),
        (b"whole\nhalf", "half"),
        (b"\r 10%|#   |\r 20%|##  |", "20%|##  |"),
        (b"done\r\n", "done"),
        (b"\xff\xfe ok\n", " ok"),
        ("ä".encode() * 200, "ä" * 100),
        (b"x" + "ä".encode() * 200, "x" + "ä" * 99),
    ],
)
def test_the_last_line_is_the_last_that_says_something(data, line):
    assert log_writer.last_line(data) == line


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_the_last_line_of_a_log_is_that_of_its_end(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("log")
    log = HostLog(folder / "log", folder / "log.idx", clock_ns=clock)
    for piece in pieces:
        log.write(STDOUT, piece)
    assert log.last_line() == log_writer.last_line(b"".join(pieces)[-2048:])
    log.close()
