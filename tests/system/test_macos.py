"""The client on a Mac submits to a cluster, follows jobs and lists them. `macos/sitecustomize.py`
removes from the tests' interpreters what only Linux has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles.cluster.fixtures import settings_of
from gangs import wait_until
from kernels import Kernel

MAC = Path(__file__).parent / "macos"

pytestmark = [pytest.mark.timeout(600), pytest.mark.double]


@pytest.fixture
def folder(home, monkeypatch):
    project = home.parent / "project"
    project.mkdir(parents=True)
    (project / "pyproject.toml").touch()
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def on_cluster(cluster, home, monkeypatch):
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, value in settings_of(cluster, home).items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.wait_for(lambda: not cluster.left_over())


def on_a_mac(*words):
    environ = os.environ | {"PYTHONPATH": str(MAC)}
    line = [sys.executable, *words]
    return subprocess.run(
        line, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def script(code):
    Path("script.py").write_text(code)
    return on_a_mac("script.py")


def kinetic(*words):
    return on_a_mac("-m", "kinetic", *words)


def out(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_refusal(done):
    """Check that a command failed without a traceback; return its stderr."""
    assert done.returncode not in (0, None), done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_linux_alone_has_is_gone():
    program = """
import ctypes, os, select, signal, sys
print(sys.platform, os.uname().sysname, os.path.exists("/proc/self"))
print([n for n in ("pidfd_open", "memfd_create", "sched_getaffinity", "pipe2") if hasattr(os, n)])
print(hasattr(select, "epoll"), hasattr(signal, "pidfd_send_signal"))
for act in (lambda: open("/proc/self/stat"), lambda: os.listdir("/proc"), os.fork,
            lambda: ctypes.CDLL(None).prctl):
    try:
        act()
    except (OSError, AttributeError) as error:
        print(type(error).__name__)
"""
    assert out(on_a_mac("-c", program)).splitlines() == [
        "darwin Darwin False",
        "[]",
        "False False",
        "FileNotFoundError",
        "FileNotFoundError",
        "OSError",
        "AttributeError",
    ]


def is_pruned():
    out(kinetic("jobs", "prune", "--older-than", "1s", "--yes"))
    return not json.loads(out(kinetic("jobs", "list", "--all", "--json")))


SCRIPT = """
import sys

import kinetic
from kinetic.errors import JobCancelled


@kinetic.run(accelerator="tpu-v6e-16")
def train(factor):
    import jax

    print("host", jax.process_index(), "on", sys.platform, flush=True)
    return jax.process_count(), jax.device_count() * factor


@kinetic.run(accelerator="cpu")
def fail():
    raise KeyError("on purpose")


@kinetic.run(accelerator="cpu")
def square(x):
    return x * x


@kinetic.run(accelerator="cpu")
def wait_for_ever():
    import time

    time.sleep(1000)


if __name__ == "__main__":
    assert sys.platform == "darwin"
    print(train.plan(2))
    print("value", train(2))
    try:
        fail()
    except KeyError as error:
        print("raised", error, error.__notes__)
    print("batch", square.run_async_map(range(8), max_concurrent=4).results(progress=False))
    handle = train.run_async(3)
    print("later", kinetic.attach(handle.job_id).result(stream_logs=True))
    assert handle.job_id in [job.job_id for job in kinetic.list_jobs()]
    handle = wait_for_ever.run_async()
    handle.cancel()
    try:
        handle.result()
    except JobCancelled as error:
        print("ended", error)
"""


@pytest.mark.long
def test_a_script_runs_its_functions_on_the_cluster(folder, on_cluster):
    done = script(SCRIPT)
    output = out(done)
    assert "creates    JobSet" in output
    assert "host 0 on linux" in output
    assert "value (4, 32)" in output
    assert "raised 'on purpose' ['Remote traceback (host 0 of 1" in output
    assert f"batch {[x * x for x in range(8)]}" in output
    assert "later (4, 48)" in output
    assert "ended wait_for_ever" in output
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_every_command_works(folder, on_cluster):
    Path("tool.py").write_text("import sys\nprint('on', sys.platform, *sys.argv[1:])\n")
    out(kinetic("profile", "create", "dev", "--cluster", os.environ.pop("KINETIC_CLUSTER")))
    assert "dev" in out(kinetic("profile", "list"))
    assert "dev" in out(kinetic("config"))
    assert "tpu-v6e-16" in out(kinetic("accelerators"))
    assert "tpu-v6e-4x4" in out(kinetic("accelerators", "--live"))
    planned = out(kinetic("run", "-a", "tpu-v6e-16", "--dry-run", "-o", "yaml", "tool.py"))
    assert "kind: JobSet" in planned
    assert "on linux fast" in out(kinetic("run", "-a", "cpu", "tool.py", "fast"))
    (job,) = json.loads(out(kinetic("jobs", "list", "--json")))
    job_id = job["job_id"]
    assert "SUCCEEDED" in out(kinetic("jobs", "status", job_id))
    assert "on linux fast" in out(kinetic("jobs", "logs", job_id))
    assert "has already ended" in kinetic("jobs", "cancel", job_id).stderr
    assert "No job is running" in kinetic("jobs", "top").stderr
    out(kinetic("jobs", "cleanup", job_id))
    out(kinetic("run", "-a", "cpu", "--detach", "tool.py"))
    wait_until(is_pruned, "the records of a job that ended a second ago stay")
    examined = json.loads(out(kinetic("doctor", "--json")))
    assert {f["level"] for f in examined["findings"]} == {"ok"}, examined


@pytest.mark.long
def test_a_cell_shows_how_it_goes(folder, on_cluster):
    kernel = Kernel(folder, path=[MAC])
    try:
        kernel.run("import sys, kinetic\nassert sys.platform == 'darwin'")
        kernel.run(
            "@kinetic.run(accelerator='tpu-v6e-16')\ndef train():\n    import time, jax\n"
            "    print('from', jax.process_count()); time.sleep(1); return 42"
        )
        cell = kernel.run("train()")
    finally:
        kernel.close()
    assert cell.value["text/plain"] == "42"
    assert "from 4" in cell.stream("stdout")
    assert any(
        "text/html" in content["data"] for kind, content in cell.messages if "display" in kind
    )


# -- without a cluster -----------------------------------------------------------------------------

WAYS_OUT = ("kinetic profile create", "KINETIC_CLUSTER", "Linux")


def test_without_a_cluster_the_error_says_what_to_do(folder):
    Path("tool.py").touch()
    message = read_refusal(kinetic("run", "-a", "tpu-v6e-16", "tool.py"))
    assert "this is macOS" in message
    assert all(way in message for way in WAYS_OUT)
    assert "simulating" not in message, "what is refused was not begun"
    for call in ("train(2)", "train.run_async(2)", "train.run_async_map([1]).results()"):
        done = script(SCRIPT.partition("if __name__")[0] + call)
        assert done.stderr.count("Traceback") == 1, "the user's own, with one error"
        assert all(way in done.stderr.splitlines()[-1] for way in WAYS_OUT)
        assert "simulating" not in done.stderr
    assert 'backend="local"' in read_refusal(
        kinetic("run", "-a", "cpu", "--backend", "local", "tool.py")
    )
    live = read_refusal(kinetic("accelerators", "--live"))
    assert "No kubeconfig" in live
    assert "simulate" not in live
    assert "There are no jobs yet." in kinetic("jobs", "list").stderr


def test_the_doctor_says_what_is_missing(folder):
    done = kinetic("doctor", "--json")
    assert done.returncode == 1
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["system"]["level"] == "problem"
    assert "macOS" in findings["system"]["detail"]
    assert not {"zygote", "memory", "namespaces", "processors"} & findings.keys()
