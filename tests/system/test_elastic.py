"""Elastic jobs that lose slices: they go on, wait, shrink or give up. Their leader forks their
agents; test_cluster_elastic.py covers jobs with a separate head pod."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S, elastic, half, wait_for_step, whole
from gangs import wait_until
from on_elastic_hosts import compile_once, hold, keep, learn, train

import kinetic

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


@pytest.fixture
def begin(begin):
    """A function that starts a job and waits for its second step; `wait=False` skips the wait."""
    return functools.partial(begin, wait=True)


# -- a slice is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [pytest.param(3, marks=pytest.mark.long), 0])
def test_it_waits_for_a_lost_slice_and_goes_on_with_the_same_mesh(begin, victim):
    job = begin(elastic(function=train), [(1, 3, victim)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    which = victim // 2
    lost, waiting, begins, recovered = job.story()
    assert lost.startswith(
        f"slice {which} lost (failure 1 of at most 10): host {victim % 2} of slice {which}: The "
        "worker process was killed by SIGKILL"
    )
    assert waiting == f"waiting for slice {which} to return, for at most 300 s (slice_timeout)."
    assert begins == "attempt 2 of 11 begins on all 2 slices."
    assert re.fullmatch(r"the function runs again, [\d.]+ s after the interruption\.", recovered)
    assert job.slices() == [(0, 1), (0, 1)]


@pytest.mark.parametrize("victim", [pytest.param(2, marks=pytest.mark.long), 0])
def test_it_shrinks_at_once_also_without_the_first_slice(begin, victim, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    remote = elastic(function=train, on_slice_loss="shrink")
    job = begin(remote, [(1, 3, victim)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == half(2)
    which = victim // 2
    lost, shrinking, begins, _ = job.story()
    assert lost.startswith(f"slice {which} lost")
    assert shrinking == "continuing on 1 slice until lost slices return."
    assert begins == f"attempt 2 of 11 begins on slice {1 - which} of 2."
    assert job.slices() == [(0, 1), (1 - which,)]
    status = subprocess.run(
        [*KINETIC, "jobs", "status", job.handle.job_id], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"(?m)^0, 1 +1 .* failed", status), status
    assert re.search(rf"(?m)^{1 - which} +2 .* succeeded", status), status
    assert re.findall(r"(?m)^(\d) +(\d) +returned", status) == [
        (str(1 - which), "0"),
        (str(1 - which), "1"),
    ]


@pytest.mark.long
def test_a_host_is_lost_before_it_uses_jax(begin):
    job = begin(elastic(function=train), [(1, -1, 1), (2, -1, 3)], wait=False)
    assert job.handle.result(timeout=LIMIT_S) == whole(3)
    assert job.losses() == [(0,), (1,)]


@pytest.mark.long
def test_a_host_is_lost_while_it_compiles(begin):
    job = begin(elastic(function=compile_once, all_hosts=True), wait=False)
    assert job.handle.results(timeout=LIMIT_S) == [16.0] * 4
    assert job.losses() == [(1,)]


def test_a_host_keeps_its_folder_whatever_its_place_in_an_attempt(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(function=keep, on_slice_loss="shrink"), wait=False)
    assert job.handle.result(timeout=LIMIT_S) == (2, 2, "1 of 2"), "slice 1 is the first there"


def test_all_values_of_a_smaller_attempt(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "600")
    job = begin(elastic(on_slice_loss="shrink", all_hosts=True), [(1, 3, 0)], wait=False)
    assert job.handle.results(timeout=LIMIT_S) == [half(2)] * 2


def test_an_agent_is_stopped(begin):
    """A stopped agent is silent for longer than hang_timeout: its slice counts as lost."""
    job = begin(elastic(hang_timeout=9), (), 2.0)
    os.kill(job.agents()[2], signal.SIGSTOP)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(1,)]


def test_an_agent_is_killed(begin, tmp_path):
    job = begin(elastic(), (), 0.3)
    before = job.agents()
    os.kill(before[1], signal.SIGKILL)
    wait_for_step(tmp_path, 2, 0)
    after = job.agents()
    unchanged = {host for host in before if before[host] == after[host]}
    assert unchanged == {2, 3}, "agents of the other slice stay"
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,)]


def test_a_whole_slice_is_killed(begin):
    job = begin(elastic(), (), 0.3)
    assert job.handle.kill_hosts(slice=0, agents=True) == (0, 1)
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(0,)]


def test_all_slices_are_killed(begin):
    job = begin(elastic(on_slice_loss="shrink"), (), 0.3)
    agents, leader = job.agents().values(), job.leader()
    # Stop the leader meanwhile: on a busy machine it would notice the deaths one by one.
    os.kill(leader, signal.SIGSTOP)
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    os.kill(leader, signal.SIGCONT)
    assert job.handle.result(timeout=LIMIT_S)[0] == 2
    assert job.losses() == [(0, 1)]


def test_nothing_that_an_attempt_has_started_lives_on(begin, tmp_path):
    job = begin(elastic(function=hold), True, wait=False)
    marks = [tmp_path / f"child-1-{host}" for host in range(4)]
    wait_until(lambda: all(mark.exists() for mark in marks), "no children")
    children = [int(mark.read_text()) for mark in marks]
    os.kill(job.agents()[2], signal.SIGKILL)
    marks = [tmp_path / f"child-2-{host}" for host in range(4)]
    wait_until(lambda: all(mark.exists() for mark in marks), "no second attempt")
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    (tmp_path / "over").touch()
    assert job.handle.result(timeout=LIMIT_S) is None


def test_it_grows_back_at_a_step_and_repeats_none(begin, monkeypatch):
    monkeypatch.setenv("KINETIC_SLICE_AWAY_S", "5")
    job = begin(elastic(function=learn, on_slice_loss="shrink"), 1.0, wait=False)
    attempt, steps, sizes = job.handle.result(timeout=LIMIT_S)
    assert (attempt, steps, len(sizes)) == (3, 40, 40), "the second attempt began anew, unsaved"
    assert sizes == sorted(sizes)
    assert {2, 4} == set(sizes)
    assert job.slices() == [(0, 1), (0,), (0, 1)]
    assert job.losses() == [(1,)]
    story = job.story()
    assert "slice 1 is back: the next attempt begins with more slices." in story
    assert "attempt 3 of 11 begins on all 2 slices." in story


def test_outside_of_elastic_jobs_nobody_is_asked_to_make_room():
    assert not kinetic.should_reform()
