"""Two programs use one store at the same time, and do not know of each other."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import kinetic

PROGRAM = """
import sys, time
import kinetic
from kinetic.job_status import JobStatus

who = sys.argv[1]

@kinetic.run(accelerator="cpu")
def double(number):
    print(who, number, flush=True)
    return who, number * 2

@kinetic.run(accelerator="cpu")
def sleep():
    time.sleep(1000)

long = sleep.run_async()
batch = double.run_async_map(range(8), max_concurrent=3, name=who)
assert [double(number) for number in range(4)] == [(who, number * 2) for number in range(4)]
assert batch.results() == [(who, number * 2) for number in range(8)]
for number, job in enumerate(batch.jobs):
    assert job.tail(5).strip() == f"{who} {number}", job.tail(5)
assert long.status() in (JobStatus.PENDING, JobStatus.RUNNING)
long.cancel()
long.wait()
long.cleanup()
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'shared'\n")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def test_two_users_of_one_store_do_not_see_each_others_work(project):
    first, second = (
        subprocess.Popen(
            [sys.executable, "program.py", who], cwd=project, stderr=subprocess.PIPE, text=True
        )
        for who in ("ada", "bob")
    )
    errors = [user.communicate()[1] for user in (first, second)]
    assert [user.returncode for user in (first, second)] == [0, 0], errors
    listed = [sys.executable, "-m", "kinetic", "jobs", "list", "--all", "--json"]
    jobs = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True).stdout)
    assert [job["state"] for job in jobs] == ["SUCCEEDED"] * 24
    assert len(kinetic.list_jobs()) == 24
    assert len({job.get("group_id") for job in jobs} - {None}) == 2
