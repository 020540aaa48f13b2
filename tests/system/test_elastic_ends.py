"""Elastic jobs that wait, are cancelled, given up, or lose one of kinetic's own processes."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S, elastic, half, whole
from gangs import wait_until
from on_elastic_hosts import (
    fail,
    fail_or_die,
    leave_alone,
    leave_unasked,
    pids,
)

import kinetic
from kinetic import errors
from kinetic.errors import HostLost, JobCancelled, UsageError

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


@pytest.fixture
def begin(begin):
    """A function that starts a job and waits for its second step; `wait=False` skips the wait."""
    return functools.partial(begin, wait=True)


# -- events during a recovery ----------------------------------------------------------------------


def test_another_slice_is_lost_while_the_job_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(), [(1, 3, 0)], wait=False)
    wait_until(lambda: job.losses() == [(0,)], "no loss")
    os.kill(job.agents()[3], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,), (1,)]
    assert any("slice 1 lost (failure 2 of at most 10)" in line for line in job.story())


def test_a_slice_that_does_not_return_in_time(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2, slice_timeout=1), [(1, 3, 2)], wait=False)
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert "slice 1 did not return within 1 s (slice_timeout). The job has 1 slice" in words
    assert (
        "attempt 1: slice 1 lost: host 0 of slice 1: The worker process was killed by SIG" in words
    )


def test_one_that_has_waited_goes_on_with_those_left(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(slice_timeout=1), [(1, 3, 2)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == half(2)


def test_it_is_cancelled_while_it_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2), [(1, 3, 2)], wait=False)
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    job.handle.cancel()
    with pytest.raises(JobCancelled, match="before its next attempt"):
        job.handle.result(timeout=LIMIT_S)


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_function_that_fails_is_called_again_and_losses_are_counted_apart(begin, tmp_path):
    ends = [(1, 1, "raise"), (2, 3, "die"), (3, 0, "raise")]
    remote = elastic(function=fail_or_die, retries=2, max_failures=1)
    job = begin(remote, ends, wait=False)
    assert job.handle.result(timeout=LIMIT_S) == whole(4)
    assert job.losses() == [(1,)]
    failed, begins, lost, waiting, *_ = job.story()
    assert failed == (
        "attempt 1 failed: host 1 of slice 0: LookupError: attempt 1 (1 retry left after the next "
        "attempt)."
    )
    assert begins == "attempt 2 of 4 begins on all 2 slices."
    assert lost.startswith("slice 1 lost (failure 1 of at most 1)")
    assert waiting.startswith("waiting for slice 1")
    each = [set(pids(tmp_path, attempt).values()) for attempt in (1, 2, 3, 4)]
    assert [a & b for a, b in itertools.pairwise(each)] == [set(), set(), set()]


@pytest.mark.long
def test_a_function_that_fails_goes_on_with_the_slices_that_are_there(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    ends = [(1, 1, "die"), (2, 1, "raise"), (3, 0, "raise")]
    remote = elastic(function=fail_or_die, retries=1, on_slice_loss="shrink")
    job = begin(remote, ends, wait=False)
    with pytest.raises(LookupError, match="attempt 3"):
        job.handle.result(timeout=LIMIT_S)
    assert job.slices() == [(0, 1), (1,), (1,)]


# -- ends of a job ---------------------------------------------------------------------------------


def test_its_records_are_removed_while_it_waits(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(2, 2), [(1, 3, 2)], wait=False)
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    pid = job.leader()
    job.folder.rename(job.folder.parents[1] / "removed")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it goes on without its records")
    assert not job.folder.exists()


def test_it_is_cancelled_while_it_runs(begin):
    job = begin(elastic(), (), 1.0)
    job.handle.cancel()
    with pytest.raises(JobCancelled):
        job.handle.result(timeout=LIMIT_S)
    assert job.losses() == []


def test_it_is_cancelled_just_after_a_slice_was_lost(begin):
    job = begin(elastic(), (), 1.0)
    os.kill(job.agents()[3], signal.SIGKILL)
    job.handle.cancel()
    with pytest.raises(JobCancelled):
        job.handle.result(timeout=LIMIT_S)


def test_it_is_given_up_with_the_whole_history(begin):
    job = begin(elastic(max_failures=1), [(1, 2, 3), (2, 2, 0)], wait=False)
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert "given up: it failed 2 times, and max_failures is 1. attempt 1: slice 1 lost" in words
    assert "; attempt 2: slice 0 lost: host 0 of slice 0" in words


def test_an_exception_of_the_function_is_no_loss(begin):
    job = begin(elastic(function=fail), wait=False)
    with pytest.raises(ValueError, match="no luck"):
        job.handle.result(timeout=LIMIT_S)
    assert (job.slices(), job.losses()) == ([(0, 1)], [])


def test_the_leader_is_killed(begin):
    job = begin(elastic(), (), 10.0, wait=False)
    wait_until(lambda: job.slices() == [(0, 1)], "it does not begin")
    os.kill(job.leader(), signal.SIGKILL)
    with pytest.raises(errors.KineticError, match="supervisor"):
        job.handle.result(timeout=LIMIT_S)


def test_a_job_goes_on_after_the_process_that_starts_agents_was_killed(begin, tmp_path):
    """The fork server is the process that starts agents. After its death and that of an agent, the
    slice cannot return, and the job continues on the other slice."""
    job = begin(elastic(on_slice_loss="shrink", slice_timeout=1), (), 0.3)
    os.kill(job.below_supervisor("kinetic-forks"), signal.SIGKILL)
    os.kill(job.agents()[3], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == half(2)


def test_a_lost_slice_that_cannot_be_started_again_is_kinetics_own_fault(begin):
    """After the death of the fork server, no lost slice can return. The error names kinetic's own
    process as the cause, and not the function."""
    job = begin(elastic(2, 2), (), 0.3)
    os.kill(job.below_supervisor("kinetic-forks"), signal.SIGKILL)
    os.kill(job.agents()[3], signal.SIGKILL)
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert (
        "own processes failed 3 times, which is no fault of the function: attempt 1: the" in words
    )
    assert "the fork server " in words
    assert "max_failures does not count them. Other losses: attempt 1: slice 1" in words


@pytest.mark.parametrize("leaver", [0, 3])
def test_a_host_that_leaves_alone_is_told_and_holds_nobody_up(leaver):
    with pytest.raises(UsageError, match=rf"called on host {leaver}, and hosts .* have not called"):
        elastic(function=leave_alone)(leaver)


def test_who_leaves_unasked_is_told_or_begins_again(home, tmp_path, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    run = kinetic.run("cpu", slices=(1, 2), on_slice_loss="shrink")
    job = run(leave_unasked).run_async(str(tmp_path))
    assert job.result(timeout=LIMIT_S) == 3
    assert "has left its attempt, but no lost slice is back" in "".join(job.logs())
