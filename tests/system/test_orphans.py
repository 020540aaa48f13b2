"""What a function has started ends with its job, whoever is killed: its children, and daemons that
left them.

In: functions that start processes, SIGKILL. Out: nothing that still runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gangs import (
    PATIENCE_S,
    kill,
    processes,
    wait_until,
    worker_of,
)

import kinetic
from kinetic import errors


def leave_the_family(marker):
    """Children in sessions of their own, one whose parent is gone."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & sleep 0.1"]).wait()
    Path(marker).touch()
    time.sleep(1000)


@pytest.mark.parametrize("which", ["supervisor", "agent", "worker"])
def test_no_death_leaves_what_the_function_started(which, home, nothing_left):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(leave_the_family).run_async(str(marker))
    wait_until(marker.exists, "not started")
    supervisor, agents = processes(handle)
    kill({"supervisor": supervisor, "agent": agents[0], "worker": worker_of(agents[0])}[which])
    with pytest.raises((errors.HostLost, errors.SupervisorLost)) as caught:
        handle.result(timeout=PATIENCE_S)
    assert "silent" not in str(caught.value)
    nothing_left()


def list_from_the_shell(handle):
    def listed():
        return subprocess.run(
            [sys.executable, "-m", "kinetic", "jobs", "list"], check=True, capture_output=True
        ).stdout

    wait_until(lambda: b"FAILED" in listed(), "the job goes on")


def is_there(pid):
    with contextlib.suppress(OSError):
        return b"kinetic" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def become_a_daemon(marker):
    """Twice forked, in a session of its own, as a program and as a mere fork."""
    subprocess.Popen(["setsid", "sh", "-c", "setsid sleep 1000 & exit 0"]).wait()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()
    Path(marker).touch()
    time.sleep(1000)


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda handle: handle.wait(),
        lambda handle: wait_until(lambda: handle.status().ended, "goes on"),
        list_from_the_shell,
    ],
)
def test_supervisor_and_agents_killed_at_once_leave_no_daemons(
    accelerator, ask, home, nothing_left
):
    """At the latest they are gone once somebody asks for the job."""
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator=accelerator)(become_a_daemon).run_async(str(marker))
    wait_until(marker.exists, "not started")
    supervisor, agents = processes(handle)
    for pid in (supervisor, *agents.values()):
        os.kill(pid, signal.SIGSTOP)  # So that none of them sees another one die.
    for pid in (supervisor, *agents.values()):
        kill(pid)
    wait_until(
        lambda: not any(map(is_there, (supervisor, *agents.values()))), "SIGKILL has no effect"
    )
    ask(handle)
    nothing_left()
    assert handle.status().value == "FAILED"
