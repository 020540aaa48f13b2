"""Waiting for the first of many jobs: woken by signals where there are some, by looking where there
are none."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace

import laptop_fakes
import pytest
from batch_fakes import Scripted
from laptop_fakes import put_success

from kinetic import errors
from kinetic._client import waiter
from kinetic._client.handle import JobHandle
from kinetic._client.waiter import JobWaiter
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore

PATIENCE_S = 200.0
LONG_S = 3600.0


@pytest.fixture
def source(tmp_path):
    return Scripted(LocalStore(tmp_path), [["hang"]] * 400)


def handles(source, count):
    return [source.submit("grp-00000001", index, f"job-{index:08x}") for index in range(count)]


class Clock:
    """Stands still, so that nothing is looked at because time has passed."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_signal_wakes_whoever_sleeps(source):
    clock = Clock()
    waiting = JobWaiter(first_look_s=0.0, clock=clock)
    for handle in handles(source, 3):
        waiting.add(handle)
    assert waiting.wait(0.0) == [], "looked at, and their signals taken"
    threading.Timer(0.01, source.release, [1]).start()
    found = []
    while not found:
        found = waiting.wait(LONG_S)
    assert [(job.group_index, end.ok) for job, end in found] == [(1, True)]


def test_more_jobs_than_signals(source, monkeypatch):
    monkeypatch.setattr(waiter, "MOST_SIGNALS", 2)
    waiting = JobWaiter(first_look_s=0.0)
    for index, handle in enumerate(handles(source, 5)):
        waiting.add(handle)
        source.release(index) if index in (1, 4) else None
    ended = set()
    while ended != {1, 4}:
        ended |= {job.group_index for job, _ in waiting.wait(PATIENCE_S)}
    assert waiting._signals <= 2
    for index in (0, 2, 3):
        source.release(index)
    while len(ended) < 5:
        ended |= {job.group_index for job, _ in waiting.wait(PATIENCE_S)}
    assert waiting._signals == 0


def test_jobs_without_signals_are_looked_at_ever_less_often(tmp_path):
    source = Scripted(LocalStore(tmp_path))
    source.ending_fd = lambda ref: None
    looks = []
    job = laptop_fakes.put_ref(source.store, laptop_fakes.ref(hosts=1))
    source.phases[job.job_id] = JobStatus.RUNNING
    handle = handle_of(job, source)
    handle.settle = lambda refs: looks.append(clock.now) or {job.job_id: None}
    clock = Clock()
    waiting = JobWaiter(slowest_s=1.0, clock=clock)
    waiting.add(handle)
    while clock.now < 20.0:
        waiting.wait(0.0)
        clock.now += 0.01
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert gaps[0] < 0.05
    assert 0.95 < gaps[-1] < 1.05
    assert gaps == sorted(gaps, key=lambda gap: round(gap, 1))


def handle_of(job, source):
    return JobHandle(job, source, source.store)


def test_a_job_that_cannot_be_looked_at_just_now_is_looked_at_again(source, caplog):
    handle = handles(source, 1)[0]
    source.ending_fd = lambda ref: None
    real, failures = handle.settle, [errors.StoreError("no route")]
    handle.settle = lambda refs: {handle.job_id: failures.pop()} if failures else real(refs)
    waiting = JobWaiter(first_look_s=0.0)
    waiting.add(handle)
    put_success(source.store, handle.ref, 1)
    found = []
    while not found:
        found = waiting.wait(PATIENCE_S)
    assert found[0][1].ok
    assert "no route" in caplog.text


def test_a_backend_that_does_not_answer_is_asked_again(source, caplog):
    handle = handles(source, 1)[0]
    source.ending_fd = lambda ref: None
    real, failures = source.status, [errors.BackendUnavailable("Too many requests.")]
    source.status = lambda refs: (_ for _ in ()).throw(failures.pop()) if failures else real(refs)
    waiting = JobWaiter(first_look_s=0.0)
    waiting.add(handle)
    while failures:
        assert waiting.wait(0.0) == []
    put_success(source.store, handle.ref, 1)
    found = []
    while not found:
        found = waiting.wait(PATIENCE_S)
    assert found[0][1].ok
    assert "Too many requests" in caplog.text


def test_many_jobs_are_asked_for_at_once(source):
    waiting = JobWaiter(first_look_s=0.0, clock=Clock())
    several = handles(source, 20)
    for handle in several:
        waiting.add(JobHandle(handle.ref, source))
    assert waiting.wait(0.0) == []
    assert source.asked == [[handle.job_id for handle in several]]


def test_removed_records_are_an_end(source):
    handle = handles(source, 1)[0]
    gone = handle_of(replace(handle.ref, job_id="job-ffffffff"), source)
    waiting = JobWaiter(first_look_s=0.0)
    waiting.add(gone)
    ((job, end),) = waiting.wait(PATIENCE_S)
    assert job is gone
    assert isinstance(end, errors.NotFound)


def test_somebody_rings(source):
    waiting = JobWaiter(clock=Clock())
    threading.Timer(0.01, waiting.ring).start()
    assert waiting.wait(LONG_S) == []
    for _ in range(100_000):  # more than the pipe holds
        waiting.ring()
    assert waiting.wait(LONG_S) == []


def test_nothing_is_left_open(source):
    waiting = JobWaiter(first_look_s=0.0)
    for handle in handles(source, 3):
        waiting.add(handle)
    waiting.wait(0.0)
    fds = [waiting._bell, waiting._ringer, *(job.fd for job in waiting._watched.values())]
    assert len(fds) == 5
    assert all(map(os.fstat, fds))
    del waiting
    for fd in fds:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
