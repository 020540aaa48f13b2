"""The mirror that repeats a host's output on its standard streams; readers never delay the log."""

from __future__ import annotations

import os
import select
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._core.log_format import FAILURE, STDERR, STDOUT
from kinetic._host.agent import log_writer
from kinetic._host.agent.log_writer import HostLog, Mirror

PATIENCE_S = 200.0


@pytest.fixture
def streams():
    """Yield the readers and the writers of two pipes that replace standard output and error."""
    pipes = os.pipe(), os.pipe()
    (out, out_writer), (err, err_writer) = pipes
    yield (out, err), (out_writer, err_writer)
    for fd in (out, err, out_writer, err_writer):
        try:
            os.close(fd)
        except OSError:
            pass


def read_all(reader: int, writer: int) -> bytes:
    os.close(writer)
    with open(reader, "rb", closefd=False) as file:
        return file.read()


def test_output_is_repeated_and_kinetics_own_lines_are_too(streams, tmp_path):
    (out, err), writers = streams
    log = HostLog(tmp_path / "log", tmp_path / "log.idx")
    mirror = Mirror(*writers)
    log.show_on(mirror)
    log.write(STDOUT, b"one\n")
    log.write(STDERR, b"two\n")
    log.say("Traceback", FAILURE)
    mirror.close(PATIENCE_S)
    log.close()
    assert read_all(out, writers[0]) == b"one\n"
    assert read_all(err, writers[1]) == b"two\nTraceback\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nTraceback\n"


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(min_size=1)), max_size=20))
def test_streams_that_share_a_reader_keep_their_order(chunks):
    reader, writer = os.pipe()
    mirror = Mirror(writer, writer)
    for stream, data in chunks:
        mirror.write(stream, data)
    mirror.close(PATIENCE_S)
    assert read_all(reader, writer) == b"".join(data for _, data in chunks)
    os.close(reader)


def test_nobody_waits_for_a_reader_and_what_it_missed_is_counted(streams, tmp_path):
    (out, err), writers = streams
    log = HostLog(tmp_path / "log", tmp_path / "log.idx")
    mirror = Mirror(*writers)
    log.show_on(mirror)
    lines = [b"%07d\n" % number for number in range(4 * log_writer.MIRRORED_BYTES // 8)]
    for start in range(0, len(lines), 1000):
        log.write(STDOUT, b"".join(lines[start : start + 1000]))
    assert (tmp_path / "log").read_bytes() == b"".join(lines)
    mirror.close(0.0)  # Gives up at once, because nobody reads.
    got = notices = b""
    deadline = time.monotonic() + PATIENCE_S
    while len(got) + _missed_bytes(notices) < 8 * len(lines):
        assert time.monotonic() < deadline, (len(got), notices)
        select.select([out, err], [], [], 1.0)
        got += _read(out)
        notices += _read(err)
    assert len(got) + _missed_bytes(notices) == 8 * len(lines)
    arrived = got.splitlines(keepends=True)
    assert arrived == sorted(set(arrived) & set(lines))  # whole lines, in order, none twice
    assert arrived[:1000] == lines[:1000]


def _missed_bytes(notices: bytes) -> int:
    """Return the sum of the bytes that kinetic's notices count as missed. An incomplete last notice
    does not count."""
    whole = notices[: notices.rfind(b"\n") + 1].splitlines()
    assert all(notice.startswith(b"kinetic: ") for notice in whole)
    return sum(int(notice.split()[1]) for notice in whole)


def _read(fd: int) -> bytes:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("closed", ["reader", "writer"])
def test_a_stream_that_is_closed_costs_the_log_nothing(streams, tmp_path, closed):
    (out, _), writers = streams
    log = HostLog(tmp_path / "log", tmp_path / "log.idx")
    os.close(out if closed == "reader" else writers[0])
    mirror = Mirror(*writers)
    log.show_on(mirror)
    log.write(STDOUT, b"one\n")
    log.write(STDERR, b"two\n")
    mirror.close(PATIENCE_S)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert os.read(streams[0][1], 100) == b"two\n"


def test_a_full_disk_costs_the_log_nothing(tmp_path):
    log = HostLog(tmp_path / "log", tmp_path / "log.idx")
    with open("/dev/full", "wb") as full:
        log.show_on(Mirror(full.fileno(), full.fileno()))
        log.write(STDOUT, b"one\n")
        log.close()
    assert (tmp_path / "log").read_bytes() == b"one\n"
