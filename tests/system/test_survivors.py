"""Processes of hosts that are not lost, and that go on in the next attempt.

In: elastic jobs whose hosts are killed for real. Out: process ids, what the processes still know,
losses of a training; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S
from gangs import wait_until
from on_elastic_hosts import note, pids
from on_surviving_hosts import (
    STEPS,
    compiled,
    connect_in_vain,
    feed,
    fit,
    late_error,
    learn,
    meet,
    sleep,
    train,
)

import kinetic
from kinetic.errors import HostLost

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


def elastic(function=train, slices=(1, 2), **options):
    return kinetic.run("tpu-v6e-8", slices=slices, **options)(function)


# -- they go on ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_keep_their_process_while_the_slice_returns(begin, tmp_path, victim):
    job = begin(elastic(survivors="keep"), [(1, victim)], [])
    assert job.handle.result(timeout=LIMIT_S) == (2, 4, [0, 1], 4 * (STEPS - 1), [2])
    before, after, lost = pids(tmp_path, 1), pids(tmp_path, 2), victim // 2
    for host in range(4):
        assert (before[host] == after[host]) == (host // 2 != lost)
    survivor = note(tmp_path, 2, 2 * (1 - lost))
    assert survivor["seen"] == [[1, survivor["pid"]], [2, survivor["pid"]]], "its modules stay"
    assert survivor["variable"] == "2"
    assert job.losses() == [(lost,)]


@pytest.mark.long
@pytest.mark.parametrize("survivors", ["keep", "restart"])
def test_no_host_compiles_again_what_it_has_compiled(begin, survivors):
    options = {"slices": (2, 2), "survivors": survivors, "all_hosts": True}
    job = begin(elastic(compiled, **options))
    assert job.handle.results(timeout=LIMIT_S) == [False] * 4


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.long), 1])
def test_survivors_keep_their_process_in_a_smaller_attempt(begin, tmp_path, lost, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    remote = elastic(slices=(1, 3), survivors="keep", on_slice_loss="shrink")
    job = begin(remote, [(1, 2 * lost + 1)], [])
    assert job.handle.result(timeout=LIMIT_S) == (2, 4, [0, 1], 4 * (STEPS - 1), [2])
    before, after = pids(tmp_path, 1), pids(tmp_path, 2)
    assert list(after.values()) != []
    left = [before[host] for host in range(6) if host // 2 != lost]
    assert [after[host] for host in range(4)] == left
    assert [note(tmp_path, 2, host)["slice"] for host in range(4)] == [0, 0, 1, 1]
    assert note(tmp_path, 2, 0)["slices"] == 2
    init = [note(tmp_path, 2, host)["init"] for host in range(4)]
    assert [process for process, _ in init] == ["0", "1", "2", "3"]
    assert {address for _, address in init} == {init[0][1]} != {note(tmp_path, 1, 0)["init"][1]}


@pytest.mark.long
def test_one_process_survives_again_and_again(begin, tmp_path):
    job = begin(elastic(survivors="keep"), [(1, 3), (2, 2), (3, 3)], [])
    assert job.handle.result(timeout=LIMIT_S)[0] == 4
    (first,) = {pids(tmp_path, attempt)[0] for attempt in range(1, 5)}
    assert note(tmp_path, 4, 0)["seen"] == [[attempt, first] for attempt in range(1, 5)]
    story = job.story()
    assert "2 of 4 hosts go on in the process that they have." in story
    early, late = (note(tmp_path, attempt, 0)["descriptors"] for attempt in (2, 4))
    more = [after - before for before, after in zip(early, late, strict=True)]
    assert max(more) < 3, "the agent or the worker opens some in each attempt"


def test_survivors_keep_their_process_when_the_job_grows(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(learn, survivors="keep", on_slice_loss="shrink"))
    assert job.handle.result(timeout=LIMIT_S) == (3, 2)
    each = [pids(tmp_path, attempt) for attempt in (1, 2, 3)]
    assert [each[0][0], each[0][1]] == [each[1][0], each[1][1]] == [each[2][0], each[2][1]]
    assert job.losses() == [(1,)]


def test_a_function_that_is_not_in_a_collective_is_interrupted(begin, tmp_path):
    job = begin(elastic(sleep, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == 2
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0]


def test_a_function_that_waits_at_a_barrier_is_freed(begin, tmp_path):
    job = begin(elastic(meet, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == 2
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0]


@pytest.mark.long
def test_threads_of_jax_that_wait_for_a_lost_host_keep_nobody(begin, tmp_path):
    """Which of two hosts connects to the other is chance: two of three times one waits here."""
    job = begin(elastic(connect_in_vain, survivors="keep"))
    assert job.handle.result(timeout=LIMIT_S) == (2, 64.0)
    assert [pids(tmp_path, 1)[host] == pids(tmp_path, 2)[host] for host in (0, 1)] == [True, True]
    assert job.losses() == [(1,)]


def test_threads_of_the_function_go_on(begin):
    job = begin(elastic(feed, survivors="keep", on_slice_loss="shrink"))
    assert job.handle.result(timeout=LIMIT_S) == (2, True)


def losses(folder):
    """The last of each step."""
    return dict(line.split() for line in Path(folder, "losses").read_text().splitlines())


@pytest.mark.long
def test_a_training_has_the_losses_of_one_that_was_never_interrupted(begin, tmp_path):
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    kills = [(1, 5, 3), (2, 9, 0), (3, 13, 2)]
    remote = elastic(fit, slices=(2, 2), survivors="keep")
    job = begin(remote, 18, kills, 4)
    weights = job.handle.result(timeout=LIMIT_S)
    assert job.losses() == [(1,), (0,), (1,)]
    assert kinetic.run("tpu-v6e-8", slices=2)(fit)(str(quiet), 18, [], 4) == weights
    assert losses(tmp_path) == losses(quiet)
    assert pids(tmp_path, 1)[0] == pids(tmp_path, 2)[0] != pids(tmp_path, 3)[0]
    assert pids(tmp_path, 3)[0] == pids(tmp_path, 4)[0]


# -- more is lost meanwhile ------------------------------------------------------------------------


@pytest.mark.long
def test_a_survivor_is_killed_while_it_waits(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "3")
    job = begin(elastic(), [(1, 3)], [])
    wait_until(lambda: job.losses() == [(1,)], "no loss")
    assert (job.folder / "local/reserve").stat().st_size, "for records when the disk is full"
    victim = pids(tmp_path, 1)[1]
    wait_until(lambda: not has_connections(victim), "it does not leave its world")
    os.kill(victim, signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S)[0] == 2
    assert victim not in pids(tmp_path, 2).values()
    told = "host 1 of slice 0: Its worker process was killed while it waited for its place."
    assert any(told in line for line in job.story()), job.story()


def has_connections(pid):
    """Whether a process has TCP connections."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows}
    return any(open_file(fd) in inodes for fd in Path(f"/proc/{pid}/fd").iterdir())


def open_file(fd):
    """What it leads to; "" once it is closed."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(fd)
    return ""


def test_a_survivor_is_killed_as_soon_as_it_goes_on(begin, tmp_path):
    job = begin(elastic(), [(1, 3)], [], 0.1)
    wait_until(lambda: 0 in pids(tmp_path, 2), "no second attempt")
    os.kill(pids(tmp_path, 2)[0], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S)[:2] == (3, 4)


@pytest.mark.long
def test_an_exception_in_a_process_that_stayed_ends_the_job(begin, tmp_path):
    job = begin(elastic(late_error, survivors="keep"))
    with pytest.raises(ValueError, match="no luck"):
        job.handle.result(timeout=LIMIT_S)
    assert pids(tmp_path, 1)[1] == pids(tmp_path, 2)[1], job.story()
    assert job.losses() == [(1,)]


@pytest.mark.long
def test_it_is_given_up_though_processes_have_stayed(begin):
    job = begin(elastic(max_failures=1), [(1, 3), (2, 0)], [])
    with pytest.raises(HostLost, match="given up: it failed 2 times"):
        job.handle.result(timeout=LIMIT_S)
