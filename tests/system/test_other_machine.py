"""A job on a cluster is attached on another machine, which has the job's id and a profile, but not
the caller's home, cache and environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from gangs import PATIENCE_S, wait_until

import kinetic
from kinetic import errors


def count(gate):
    """Print a line, wait until the file `gate` exists, and print another line."""
    import time

    print("begun", flush=True)
    while not Path(gate).exists():
        time.sleep(0.05)
    print("goes on", flush=True)
    return "value"


class Machine:
    """A simulated second machine: its environment shares only the store and the cluster with this
    one."""

    def __init__(self, folder, store_uri):
        folder.mkdir(parents=True, mode=0o700)
        names = ("PATH", "KUBECONFIG", "TMPDIR", "LANG")
        own = {"HOME": folder, "XDG_CONFIG_HOME": folder / "config"}
        self._folder = folder
        self._environ = {name: os.environ[name] for name in names if name in os.environ}
        self._environ |= {name: str(path) for name, path in own.items()}
        self.run("profile", "create", "theirs", "--cluster", cluster_name(), "--store", store_uri)

    def start(self, *words):
        command = [sys.executable, "-m", "kinetic", *words]
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words):
        with self.start(*words) as program:
            out, err = program.communicate(timeout=PATIENCE_S)
        assert program.returncode == 0, (words, out, err)
        return out

    def script(self, source):
        return subprocess.run(
            [sys.executable, "-c", source],
            cwd=self._folder,
            env=self._environ,
            text=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )


def cluster_name():
    return os.environ["KINETIC_CLUSTER"]


@pytest.fixture
def elsewhere(on_cluster, home):
    if "KINETIC_STORE" not in os.environ:
        os.environ["KINETIC_STORE"] = f"file://{home}"
    return Machine(home.parent / "elsewhere", os.environ["KINETIC_STORE"])


@pytest.fixture
def gate(home):
    if not SHARES_FILES:
        pytest.skip("needs pods that share files with this machine, as its own processes do")
    return home.parent / "gate"


def running(accelerator, gate):
    handle = kinetic.run(accelerator=accelerator)(count).run_async(str(gate))
    wait_until(lambda: "begun" in handle.logs(), "the function has not begun")
    return handle


@pytest.mark.parametrize("accelerator", [pytest.param("cpu", marks=pytest.mark.long), "tpu-v6e-8"])
def test_a_job_is_followed_and_its_value_fetched(accelerator, elsewhere, gate):
    handle = running(accelerator, gate)
    (listed,) = json.loads(elsewhere.run("jobs", "list", "--json"))
    assert (listed["job_id"], listed["state"]) == (handle.job_id, "RUNNING")
    assert "RUNNING" in elsewhere.run("jobs", "status", handle.job_id)
    assert handle.job_id in elsewhere.run("jobs", "top", "--once", handle.job_id)
    with elsewhere.start("jobs", "logs", "--follow", handle.job_id) as follower:
        assert follower.stdout.readline() == "begun\n"
        gate.touch()
        assert follower.stdout.read() == "goes on\n"
    assert follower.returncode == 0
    source = f"import kinetic; print(kinetic.attach({handle.job_id!r}).result())"
    done = elsewhere.script(source)
    assert done.stdout == "value\n", done.stderr


def test_a_job_is_cancelled(elsewhere, gate):
    handle = running("tpu-v6e-8", gate)
    assert "is being cancelled" in elsewhere.run("jobs", "cancel", handle.job_id)
    with pytest.raises(errors.JobCancelled):
        handle.result(timeout=PATIENCE_S)
    assert "CANCELLED" in elsewhere.run("jobs", "status", handle.job_id)


def test_a_job_that_runs_is_removed(elsewhere, gate):
    handle = running("tpu-v6e-8", gate)
    elsewhere.run("jobs", "cleanup", handle.job_id)
    assert json.loads(elsewhere.run("jobs", "list", "--json")) == []
    assert kinetic.list_jobs() == []
