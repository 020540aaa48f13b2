"""Hosts that hang while they start, join JAX or run: they are named, or lost with a slice."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs import LIMIT_S, elastic, wait_for_step, whole
from gangs import stop, wait_until
from on_elastic_hosts import hang_once, meet, pids
from on_hosts import one_waits

import kinetic
from kinetic import errors
from kinetic._client import planning

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


def test_the_output_says_which_host_holds_the_others_up(home, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "STILL_NOTICE_S", 3.0)
    job = kinetic.run("tpu-v6e-8")(one_waits).run_async(str(tmp_path))

    def find_notice():
        return [line for line in job.logs().splitlines() if "has stood still for 3 s" in line]

    (line,) = wait_until(find_notice, "nothing is said")
    assert "kinetic: host 1 of 2 has stood still for 3 s at on_hosts.py:" in line
    assert f"in one_waits; all others wait for it. More: kinetic jobs explain {job.job_id}" in line
    Path(tmp_path, "go on").touch()
    assert job.result(timeout=LIMIT_S) == "done"


def test_a_worker_that_is_stopped_before_it_joins_is_lost_with_its_slice(begin, tmp_path):
    """One worker is stopped before it joins JAX, where all others wait for it. hang_timeout applies
    there, too: its slice is lost, and the job goes on."""
    job = begin(elastic(function=meet, hang_timeout=3))
    for host in range(4):
        wait_for_step(tmp_path, 1, host)
    stop(pids(tmp_path, 1)[3])
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [(1,)]


def test_a_deadlock_of_all_hosts_is_one_failure_of_an_elastic_job(begin):
    job = begin(elastic(function=hang_once, hang_timeout=3, max_failures=1))
    assert job.handle.result(timeout=LIMIT_S) == whole(2)
    assert job.losses() == [()]
    failed, *_ = job.story()
    assert failed.startswith("the attempt failed, with all slices alive (failure 1 of at most 1): ")
    assert "stood still for " in failed


def test_a_deadlock_of_all_hosts_ends_a_job_that_may_not_fail_again(begin):
    job = begin(elastic(function=hang_once, hang_timeout=3, max_failures=0))
    with pytest.raises(errors.JobFailed, match="it failed once, and max_failures is 0"):
        job.handle.result(timeout=LIMIT_S)
