"""kill -9 of each process at each phase: the caller gets the right error, nothing is left, the next job runs.

In: a job held in a phase. Out: what its caller sees. The fixture `no_leftovers` looks for processes after each test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import kinetic
from kinetic import errors

PATIENCE_S = 30.0


def wait_until(look, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
    return found


def children(pid):
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def processes(handle):
    """(supervisor, agents by host), once the gang has been forked."""
    told = wait_until(handle.processes, "the supervisor has not started")
    return told["supervisor"], told["agents"]


def worker_of(agent):
    return wait_until(lambda: children(agent), "the agent has no worker")[0]


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def sleep_long(marker):
    print("running", flush=True)
    Path(marker).touch()
    time.sleep(1000)


def return_and_wait(marker):
    """The leader returns at once; its report is in; the others keep the gang from ending."""
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        Path(marker).touch()
        return 1
    time.sleep(1000)
    return None


def held_in(phase, tmp):
    """A job of two hosts, held in the phase."""
    marker = tmp / "marker"
    func = return_and_wait if phase == "reporting" else sleep_long
    handle = kinetic.run(accelerator="tpu-v6e-8")(func).run_async(str(marker))
    if phase == "starting":
        return handle
    _, agents = processes(handle)
    if phase == "joining":
        os.kill(agents[0], signal.SIGSTOP)  # While it is stopped it cannot join, unless it was very quick.
        worker_of(agents[1])
    else:
        wait_until(marker.exists, "the function has not started")
    return handle


def let_go(phase, agents):
    if phase == "joining":
        os.kill(agents[0], signal.SIGCONT)


def assert_next_job_runs():
    assert kinetic.run(accelerator="cpu")(lambda: "next")() == "next"


def assert_record_intact(handle):
    """The job is found, has a verdict, and tells it as often as it is asked."""
    again = kinetic.attach(handle.job_id)
    assert again.status().value == "FAILED"
    assert not again.outcome().ok
    assert again.job_id in [h.job_id for h in kinetic.list_jobs()]


PHASES = ["starting", "joining", "running", "reporting"]


@pytest.mark.parametrize("phase", PHASES)
def test_killing_the_supervisor(phase, home):
    handle = held_in(phase, home.parent)
    supervisor, agents = processes(handle)
    kill(supervisor)
    let_go(phase, agents)
    with pytest.raises(errors.SupervisorLost):
        handle.result()
    assert_record_intact(handle)
    assert_next_job_runs()


@pytest.mark.parametrize("phase", PHASES)
def test_killing_an_agent(phase, home):
    handle = held_in(phase, home.parent)
    _, agents = processes(handle)
    kill(agents[1])
    let_go(phase, agents)
    with pytest.raises(errors.HostLost, match="host 1") as caught:
        handle.result()
    assert caught.value.hosts == (1,)
    assert_record_intact(handle)
    assert_next_job_runs()


@pytest.mark.parametrize("phase", PHASES)
def test_killing_a_worker(phase, home):
    handle = held_in(phase, home.parent)
    _, agents = processes(handle)
    kill(worker_of(agents[1]))
    let_go(phase, agents)
    with pytest.raises(errors.HostLost, match="host 1") as caught:
        handle.result()
    assert caught.value.hosts[0] == 1
    assert_record_intact(handle)
    assert_next_job_runs()


CALLER = """
import json, os, sys, time
import kinetic

@kinetic.run(accelerator="tpu-v6e-8")
def long():
    print("running", flush=True)
    time.sleep(SLEEP)
    return "value"

long()
"""


@pytest.mark.parametrize("phase", ["starting", "running"])
def test_killing_the_caller(phase, home):
    """The job goes on without its caller; another process finds it and gets the value."""
    script = home.parent / "caller.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(textwrap.dedent(CALLER).replace("SLEEP", "2"))
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    if phase == "running":
        assert caller.stdout.readline() == b"running\n"
    else:
        wait_until(lambda: list(home.glob("jobs/*/local/supervisor.json")), "no supervisor")
    caller.kill()
    caller.wait()
    caller.stdout.close()
    (handle,) = kinetic.list_jobs()
    assert handle.result() == "value"
    assert_next_job_runs()


def test_killing_the_preloader_costs_one_restart():
    job = kinetic.run(accelerator="cpu")(os.getpid)
    job()
    preloaders = [pid for pid in children(os.getpid()) if b"kinetic.runner.preload" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert preloaders
    for pid in preloaders:
        kill(pid)
    assert job() > 0


def test_a_job_whose_preloader_dies_goes_on(home):
    marker = home.parent / "marker"

    @kinetic.run(accelerator="cpu")
    def short(path):
        Path(path).touch()
        time.sleep(0.5)
        return "value"

    handle = short.run_async(str(marker))
    wait_until(marker.exists, "not started")
    for pid in children(os.getpid()):
        if b"kinetic.runner.preload" in Path(f"/proc/{pid}/cmdline").read_bytes():
            kill(pid)
    assert handle.result() == "value"


def test_two_deaths_at_once_leave_nothing(home):
    handle = held_in("running", home.parent)
    supervisor, agents = processes(handle)
    for pid in (supervisor, agents[0]):
        kill(pid)
    with pytest.raises(errors.JobFailed):
        handle.result()
    assert_next_job_runs()


def test_events_tell_the_story(home):
    handle = held_in("running", home.parent)
    _, agents = processes(handle)
    kill(agents[1])
    with pytest.raises(errors.HostLost):
        handle.result()
    kinds = [json.loads(line)["kind"] for line in (home / "jobs" / handle.job_id / "events.jsonl").read_text().splitlines()]
    assert kinds[:3] == ["joined", "joined", "ready"]
    assert "lost" in kinds
    assert kinds[-1] == "ended"
