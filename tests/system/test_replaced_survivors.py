"""Processes of hosts that are not lost, and that cannot go on in the next attempt: they are
replaced.

In: elastic jobs whose hosts are killed for real. Out: process ids, what the log says of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from elastic_jobs import LIMIT_S
from gangs import wait_until
from on_elastic_hosts import note, pids
from on_surviving_hosts import cling, hoard, import_half, lose_the_last

import kinetic

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


def elastic(function, slice_="tpu-v6e-4", **options):
    """Of two slices, by default with one host each."""
    return kinetic.run(slice_, slices=(1, 2), **options)(function)


def all_begun(folder):
    wait_until(lambda: len(pids(folder, 1)) == 2, "not all have begun")


HALF = """
import os, sys, time
from pathlib import Path

assert not hasattr(sys, "half"), "a process can register this once"
sys.half = True
if os.environ["KINETIC_ATTEMPT"] == "1":
    Path(os.environ["KINETIC_OUTPUT_DIR"], "half-" + os.environ["KINETIC_HOST_INDEX"]).touch()
    time.sleep(600)
"""


def test_one_that_was_interrupted_in_an_import_is_replaced(begin, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    job = begin(elastic(import_half, output_dir=str(tmp_path)))
    all_begun(tmp_path)
    wait_until((tmp_path / "half-0").exists, "nothing is imported")
    os.kill(pids(tmp_path, 1)[1], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == 2
    before, after = pids(tmp_path, 1), pids(tmp_path, 2)
    assert not set(before.values()) & set(after.values())
    said = "".join(job.handle.logs(attempt=1))
    assert "gets a new process for the next attempt: the import of half was interrupted" in said


def test_each_attempt_has_new_processes_where_that_is_asked_for(begin, tmp_path):
    job = begin(elastic(lose_the_last, "tpu-v6e-8", survivors="restart"))
    assert job.handle.result(timeout=LIMIT_S) == 2
    before, after = pids(tmp_path, 1), pids(tmp_path, 2)
    assert not set(before.values()) & set(after.values())
    agents = [[note(tmp_path, attempt, host)["agent"] for host in range(2)] for attempt in (1, 2)]
    assert agents[0] == agents[1], "agents stay"
    assert not any("in the process" in line for line in job.story())


@pytest.mark.parametrize("how", ["native code", "swallows"])
def test_one_that_does_not_get_free_is_replaced(begin, tmp_path, how):
    job = begin(elastic(cling), how)
    all_begun(tmp_path)
    os.kill(pids(tmp_path, 1)[1], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == 2
    before, after = pids(tmp_path, 1), pids(tmp_path, 2)
    assert not set(before.values()) & set(after.values())
    assert job.losses() == [(1,)]
    said = "".join(job.handle.logs(attempt=1))
    assert "gets a new process for the next attempt: the function did not end within 5 s" in said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("swallows", "the function did not end within 12 s"),
        ("aborts", "it was killed by SIGABRT"),
    ],
)
def test_one_that_must_stay_and_cannot_is_lost(begin, tmp_path, how, why):
    job = begin(elastic(cling, survivors="keep"), how)
    all_begun(tmp_path)
    os.kill(pids(tmp_path, 1)[1], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == 2
    assert job.losses() == [(1,), (0,)]
    assert any(f'{why}, and survivors is "keep"' in line for line in job.story())


@pytest.mark.long
def test_one_whose_variables_hold_arrays_of_its_world_is_replaced(begin, tmp_path):
    job = begin(elastic(hoard))
    all_begun(tmp_path)
    os.kill(pids(tmp_path, 1)[1], signal.SIGKILL)
    assert job.handle.result(timeout=LIMIT_S) == (2, 1, 4.0)
    assert not set(pids(tmp_path, 1).values()) & set(pids(tmp_path, 2).values())
    assert "variables that outlive the function hold 1 array" in "".join(job.handle.logs(attempt=1))


def test_each_attempt_of_a_program_has_new_processes(home, tmp_path):
    """It expects an interpreter of its own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-c", "from kinetic.cli.main import main; main()", "run"]
    options = ["--accelerator", "tpu-v6e-4", "--slices", "1:2"]
    done = subprocess.run(
        [*command, *options, "program.py", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not set(pids(tmp_path, 1).values()) & set(pids(tmp_path, 2).values())


PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import jax
from jax.experimental import multihost_utils

attempt, host = os.environ["KINETIC_ATTEMPT"], os.environ["KINETIC_HOST_INDEX"]
Path(sys.argv[1], f"{attempt}-{host}.json").write_text(json.dumps({"pid": os.getpid()}))
multihost_utils.sync_global_devices("all are there")
if attempt == "1":
    time.sleep(0 if host == "1" else 600)
    os.kill(os.getpid(), signal.SIGKILL)
"""
