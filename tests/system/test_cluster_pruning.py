"""`kinetic jobs prune` removes records of old jobs and their objects in the cluster, also in a
second try after the cluster was down."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from gangs import PATIENCE_S

import kinetic

PRUNE = (
    sys.executable,
    "-m",
    "kinetic",
    "jobs",
    "prune",
    "--older-than",
    "0.001s",
    "--yes",
    "--json",
)


def double(number):
    return 2 * number


def prune():
    done = subprocess.run(PRUNE, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_what_the_cluster_has_goes_with_the_records(on_cluster):
    jobs = [kinetic.run("cpu")(double).run_async(number) for number in (1, 2)]
    assert [job.result(cleanup=False) for job in jobs] == [2, 4]
    code, report, _ = prune()
    assert (code, report["failed"]) == (0, [])
    assert sorted(report["jobs"]) == sorted(job.job_id for job in jobs)
    assert kinetic.list_jobs() == []


@pytest.mark.double
def test_a_cluster_that_is_away_is_asked_once(on_cluster):
    """While the cluster is down, `prune` keeps its jobs and says so once; later it removes them."""
    jobs = [kinetic.run("cpu")(double).run_async(number) for number in range(4)]
    assert [job.result(cleanup=False) for job in jobs] == [0, 2, 4, 6]
    on_cluster.stop_server()
    code, report, words = prune()
    assert code != 0
    assert sorted(each["job_id"] for each in report["failed"]) == sorted(j.job_id for j in jobs)
    assert words.count("was not removed") == 1
    on_cluster.start_server()
    code, report, _ = prune()
    assert (code, len(report["jobs"])) == (0, 4)
