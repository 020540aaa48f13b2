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
from pathlib import Path

import pytest
from forking import become_a_daemon, leave_the_family
from gangs import (
    PATIENCE_S,
    kill,
    processes,
    wait_until,
    worker_of,
)

import kinetic
from kinetic import errors


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


def start_a_program_and_lose_the_agent(folder):
    """Return whether the program of attempt 1 still runs in attempt 2."""
    known = Path(folder, "pid")
    if os.environ["KINETIC_ATTEMPT"] == "1" and os.environ["KINETIC_HOST_INDEX"] == "0":
        known.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    with contextlib.suppress(OSError):
        return Path("/proc", known.read_text(), "cmdline").read_bytes().startswith(b"sleep")
    return False


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_retry_does_not_meet_what_a_killed_agent_has_left(accelerator, home, tmp_path):
    again = kinetic.run(accelerator=accelerator, retries=1)(start_a_program_and_lose_the_agent)
    assert again(str(tmp_path)) is False


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
