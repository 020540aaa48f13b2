"""A caller is killed, or gets Ctrl-C, at each step of its submission: it leaves nothing, or a job
that can be listed, cancelled and removed. `no_leftovers` and `on_cluster` check for leftovers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from gangs import PATIENCE_S, wait_until

import kinetic
from kinetic import errors
from kinetic._backends.local import launcher
from kinetic._client.board.reader import JobBoard
from kinetic._core import state

CALLER = """
import importlib, os, signal, sys, time
import kinetic

module, owner, name, moment, kind = sys.argv[1:]
importlib.import_module(module)
owner = getattr(importlib.import_module(module), owner) if owner else sys.modules[module]
if (kept := os.environ.get("KEPT")):
    from kinetic._backends.local.backend import LocalBackend
    from kinetic.errors import BackendUnavailable

    def refuse(*_):
        raise BackendUnavailable("It does not answer.")

    LocalBackend.cancel = refuse
step = getattr(owner, name)

def die(found, *args, **more):
    kinds = [getattr(each, "plural", each) for each in args]
    is_other = kind and not any(isinstance(each, str) and each.endswith(kind) for each in kinds)
    if is_other or more.get("dry_run"):
        return step(found, *args, **more)
    if moment == "after":
        step(found, *args, **more)
    setattr(owner, name, step)
    os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGKILL")))
    return step(found, *args, **more)

setattr(owner, name, die)

@kinetic.run(accelerator=os.environ["SLICE"], start_timeout=os.environ.get("PATIENCE", "1h"))
def wait():
    time.sleep(1000)

wait.run_async()
"""
REFERENCE = ("kinetic._store.index", "", "add")
CREATE = ("kinetic._backends.kubernetes.connection", "HttpApi", "create")
STEPS = {
    "before the reference": (*REFERENCE, "before", ""),
    "after the reference": (*REFERENCE, "after", ""),
}
CLUSTER_STEPS = {
    "after the Job": (*CREATE, "after", "jobs"),
    "before the JobSet": (*CREATE, "before", "jobsets"),
    "after the JobSet": (*CREATE, "after", "jobsets"),
    "after the Secret": (*CREATE, "after", "secrets"),
}


def run_killed_caller(step, accelerator, monkeypatch):
    monkeypatch.setenv("SLICE", accelerator)
    done = subprocess.run(
        [sys.executable, "-c", CALLER, *step], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("step", STEPS)
def test_a_caller_that_is_killed_around_its_reference(step, place, home, monkeypatch):
    # Seconds from a job's reference until its first process must exist.
    monkeypatch.setattr(state, "STARTING_S", 5.0)
    run_killed_caller(STEPS[step], "tpu-v6e-8", monkeypatch)
    if step == "before the reference":
        assert kinetic.list_jobs() == []
    else:
        remove_the_only_job(home)


def test_a_job_that_was_never_created_was_not_removed_either(on_cluster, monkeypatch):
    run_killed_caller(STEPS["after the reference"], "cpu", monkeypatch)
    (job,) = kinetic.list_jobs()
    outcome = JobBoard(job._store, lambda _: job._backend, lambda: time.time() + 600).outcome(
        job.ref
    )
    assert outcome.reason == "the job was never started: its submission was interrupted"


@pytest.mark.parametrize("step", CLUSTER_STEPS)
def test_a_caller_that_is_killed_while_objects_are_created(step, on_cluster, home, monkeypatch):
    run_killed_caller(
        CLUSTER_STEPS[step], "cpu" if "Job" in step.split() else "tpu-v6e-8", monkeypatch
    )
    remove_the_only_job(home)


INTERRUPTED = {
    "after the plan": ("kinetic._store.local", "LocalStore", "put", "after", "/plan.json"),
    **STEPS,
    "before the start": ("kinetic._backends.local.launcher", "", "launch", "before", ""),
    "before the answer": ("kinetic._backends.local.launcher", "Zygote", "_read_line", "before", ""),
    "after the answer": ("kinetic._backends.local.launcher", "Zygote", "_read_line", "after", ""),
    "after the start": ("kinetic._backends.local.launcher", "", "launch", "after", ""),
    "before the handle": ("kinetic._client.handle", "JobHandle", "__init__", "before", ""),
}


def run_interrupted_caller(step, monkeypatch, **environ):
    for name, value in {"SLICE": "tpu-v6e-8", "SIGNAL": "SIGINT", **environ}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", CALLER, *INTERRUPTED[step]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode in (1, -signal.SIGINT), done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("step", INTERRUPTED)
def test_ctrl_c_during_a_submission_leaves_nothing(step, home, monkeypatch):
    err = run_interrupted_caller(step, monkeypatch)
    assert "was interrupted, and the job was removed" in err
    assert kinetic.list_jobs() == []
    assert list(home.glob("jobs/*")) == []


def test_ctrl_c_says_that_a_job_is_there_if_it_cannot_be_removed(home, monkeypatch):
    err = run_interrupted_caller("after the start", monkeypatch, KEPT="1")
    (handle,) = kinetic.list_jobs()
    assert f"`kinetic jobs cleanup {handle.job_id}` stops and removes it." in err
    remove_the_only_job(home)


def test_a_supervisor_that_comes_after_its_job_was_removed_makes_nothing(home):
    """A caller requested a supervisor and was interrupted; the job was then removed. The late
    supervisor fails, and creates no folder."""
    kinetic.run(accelerator="cpu")(int)()
    (done,) = kinetic.list_jobs()
    done.cleanup()
    late = (
        "import sys; from kinetic._host.local.supervisor import Request, Supervisor; "
        "Supervisor(Request(*sys.argv[1:])).run(-1)"
    )
    run = [sys.executable, "-c", late, str(home), done.job_id]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "FileNotFoundError" in ended.stderr
    assert list(home.glob("jobs/*")) == []


@pytest.mark.parametrize("when", ["at once", "once the job has ended"])
def test_a_zygote_that_dies_before_it_answers_starts_no_second_supervisor(
    when, home, tmp_path, monkeypatch
):
    read, calls = launcher.Zygote._read_line, tmp_path / "calls"

    def die(zygote):
        read(zygote)
        if when != "at once":
            wait_until(lambda: list(home.glob("jobs/*/outcome.json")), "the job has not ended")
        zygote._process.kill()
        monkeypatch.setattr(launcher.Zygote, "_read_line", read)
        raise ConnectionResetError

    def call():
        with calls.open("a") as file:
            file.write("called\n")

    monkeypatch.setattr(launcher.Zygote, "_read_line", die)
    kinetic.run(accelerator="cpu")(call)()
    assert calls.read_text() == "called\n"


def remove_the_only_job(home):
    """List, cancel and remove the only job, as a process that did not submit it."""
    (ref,) = kinetic.list_jobs()
    handle = kinetic.attach(ref.job_id)
    assert handle.status() != "NOT_FOUND"
    handle.cancel()
    with pytest.raises(errors.JobFailed):
        handle.result(timeout=PATIENCE_S)
    handle.cleanup()
    assert kinetic.list_jobs() == []
    assert not list(home.glob(f"jobs/{ref.job_id}/**/*.json"))


def test_a_caller_that_was_killed_after_its_jobset_needs_nobody_to_cancel_it(
    on_cluster, monkeypatch
):
    """The caller dies before it has created the Secret for which the pods wait: start_timeout ends
    the job."""
    monkeypatch.setenv("PATIENCE", "5s")
    run_killed_caller(CLUSTER_STEPS["after the JobSet"], "tpu-v6e-8", monkeypatch)
    (handle,) = kinetic.list_jobs()
    with pytest.raises(errors.JobFailed, match=r"did not start within 5 s: .* was interrupted"):
        handle.result(timeout=PATIENCE_S)


@pytest.mark.double
def test_a_caller_that_is_killed_while_the_cluster_does_not_answer(on_cluster):
    """The cluster has received the request, but the caller is killed before the answer: the job
    exists and can be cancelled."""
    on_cluster.faults.slow(PATIENCE_S, verb="create", resource="secrets")
    source = "import kinetic; kinetic.run(accelerator='cpu')(int).run_async()"
    with subprocess.Popen([sys.executable, "-c", source]) as caller:
        wait_until(lambda: "create secrets" in on_cluster.counts(), "no Secret was asked for")
        caller.kill()
    on_cluster.faults.clear()
    (handle,) = kinetic.list_jobs()
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result(timeout=PATIENCE_S)
