"""The worker's stdout and stderr: the agent reads lines in the order of the writes, and a write
never waits forever for the agent."""

from __future__ import annotations

import io
import os
import selectors
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from kinetic._host.worker import streams


class Pair:
    """A stdout and a stderr, each a text stream over a pipe."""

    def __init__(self) -> None:
        self.reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        self.out, self.err = (
            io.TextIOWrapper(open(fd, "wb"), line_buffering=True) for fd in writes
        )
        streams.keep_order(self.out, self.err)

    def close(self) -> None:
        for stream in (self.out, self.err):
            stream.close()
        for fd in self.reads:
            os.close(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    streams = Pair()
    yield streams
    streams.close()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waits")

    monkeypatch.setattr(streams.time, "sleep", sleep)


def read(pair: Pair, lines: int, into: list[str]) -> None:
    """Read lines as the agent does: empty each pipe as soon as it has data."""
    selector = selectors.DefaultSelector()
    for fd in pair.reads:
        selector.register(fd, selectors.EVENT_READ)
    while len(into) < lines:
        for key, _ in selector.select():
            into += os.read(key.fd, 1 << 20).decode().splitlines()
    selector.close()


def test_lines_written_by_turns_are_read_in_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "READER_S", 60.0)  # This machine may be busy.
    got: list[str] = []
    reader = threading.Thread(target=read, args=(pair, 2000, got))
    reader.start()
    for number in range(2000):
        print(number, file=pair.err if number % 3 else pair.out)
    reader.join()
    assert got == [str(number) for number in range(2000)]


def test_to_write_on_to_the_same_stream_costs_nothing(pair: Pair) -> None:
    print("a", file=pair.out)
    assert "write" not in vars(pair.out)
    print("b", file=pair.err)
    assert "write" not in vars(pair.err)
    assert "write" in vars(pair.out)


def test_a_reader_that_does_not_read_is_waited_for_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += max(seconds, 1e-4)

    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(streams.time, "sleep", sleep)
    by_turns(pair.out, pair.err)
    assert 0 < now[0] < 2.1 * streams.READER_S, "once for each pipe"
    assert max(slept) <= streams.LONGEST_PAUSE_S
    before = now[0]
    by_turns(pair.out, pair.err)
    assert now[0] == before
    assert [os.read(fd, 100) for fd in pair.reads] == [b"out\n" * 6, b"err\n" * 6]
    by_turns(pair.out, pair.err)
    assert now[0] > before, "it reads again, so it is waited for again"


def by_turns(out: TextIO, err: TextIO) -> None:
    for _ in range(3):
        print("out", file=out)
        print("err", file=err)


def test_nobody_waits_for_a_descriptor_that_is_something_else_now(
    pair: Pair, no_waiting: None, tmp_path
) -> None:
    with open(tmp_path / "log", "wb") as file:
        os.dup2(file.fileno(), pair.out.fileno())
        os.dup2(file.fileno(), pair.err.fileno())
    by_turns(pair.out, pair.err)
    assert (tmp_path / "log").read_text() == "out\nerr\n" * 3


def test_nobody_waits_for_a_stream_that_was_no_pipe_to_begin_with(
    no_waiting: None, tmp_path
) -> None:
    with (
        open(tmp_path / "log", "a", buffering=1) as out,
        open(tmp_path / "log", "a", buffering=1) as err,
    ):
        streams.keep_order(out, err)
        by_turns(out, err)
    assert (tmp_path / "log").read_text() == "out\nerr\n" * 3


def test_a_write_that_the_function_put_in_place_stays(pair: Pair) -> None:
    got: list[str] = []
    pair.out.write = got.append  # type: ignore[method-assign,assignment]
    by_turns(pair.out, pair.err)
    assert "".join(got) == "out\n" * 3
    assert os.read(pair.reads[1], 100) == b"err\n" * 3


def test_a_write_that_the_function_kept_works_on(pair: Pair) -> None:
    writes = pair.out.write, pair.err.write
    for _ in range(3):
        assert [write("x\n") for write in writes] == [2, 2]
        for fd in pair.reads:
            assert os.read(fd, 100) == b"x\n"


def test_a_closed_stream_says_so(pair: Pair, no_waiting: None) -> None:
    pair.out.close()
    with pytest.raises(ValueError, match="closed file"):
        print("x", file=pair.out)
    print("y", file=pair.err)
    assert os.read(pair.reads[1], 100) == b"y\n"
    pair.out = pair.err
