"""The polls by which a follower reads new output and checks for the job's end, with frequent output
and with none. Only pauses move the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from doubles.memory_store import MemoryStore

from kinetic._backends import attempt_logs
from kinetic._backends.attempt_logs import LogReader
from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.log_format import Segment
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.log_segments import ObjectLog, add_lines

JOB = "job-00c0ffee"


class SlowTime:
    """A fake `time` module whose clock advances only during `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("is_unmetered", [False, True])
def test_a_follower_of_a_silent_job_polls_less_and_less_often(monkeypatch, is_unmetered):
    """Polls of a silent job become rarer: each is work for a store, even if its calls are free."""
    clock, polled_at, store = SlowTime(), [0.0], MemoryStore()
    monkeypatch.setattr(attempt_logs, "time", clock)
    monkeypatch.setattr(store, "is_unmetered", is_unmetered, raising=False)

    def has_ended() -> bool:
        polled_at.append(clock.now)
        return clock.now > 9

    ref = JobRef(JOB, Place("gke"), "cpu:1", "f", "f", 0.0, store.uri)
    list(attempt_logs.read(store, ref, LogRequest(), has_ended))
    least_s = 0.05 if is_unmetered else attempt_logs.POLL_SOON_S
    for before, after in itertools.pairwise(polled_at[1:]):
        due_s = min(max(least_s, before / 10), attempt_logs.POLL_LATE_S)
        assert due_s <= after - before + 1e-9 <= due_s + attempt_logs.TICK_S + 1e-6


class Chatty(ObjectLog):
    """A log that has new output at each of its first polls, and then no more."""

    def __init__(self, polls: int) -> None:
        self.polls_left = polls

    def read(self, offset: int, *, to_end: bool = False) -> list[Segment]:
        self.polls_left -= 1
        return [Segment(offset, (), b"x")] if self.polls_left > 0 else []


def test_output_that_comes_often_does_not_wait_each_time_for_the_cluster(monkeypatch):
    """With frequent output, the check for the job's end, a network call, is made only sometimes."""
    clock, checks = SlowTime(), []
    monkeypatch.setattr(attempt_logs, "time", clock)
    log = Chatty(polls=100)

    def is_over() -> bool:
        checks.append(clock.now)
        return log.polls_left <= 0

    def pause(new_bytes: int) -> Iterator[None]:
        clock.sleep(0.05)
        yield None

    list(attempt_logs._follow([LogReader(log, 0)], is_over, pause, 8))
    assert len(checks) == pytest.approx(100 * 0.05 / attempt_logs.POLL_SOON_S, abs=2)


@pytest.mark.parametrize(("tail", "lines"), [(2, b"2\n3\n"), (0, b"")])
def test_a_tail_has_no_more_lines_though_the_job_prints_on(tail, lines):
    store, key = MemoryStore(), layout.HostKeys(JOB, 1, 0).log
    ref = JobRef(JOB, Place("gke"), "cpu:1", "f", "f", 0.0, store.uri)
    add_lines(store, key, "1\n2\n3", 0)
    output = attempt_logs.read(store, ref, LogRequest(follow=False, tail=tail), lambda: False)
    assert next(output).data == b"", "the tail is measured"
    add_lines(store, key, "4\n5", 0)
    assert b"".join(chunk.data for chunk in output) == lines
