"""All processes that a function has started end with its job, whichever process is killed:
children, and daemons that have left their session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from forking import leave_the_family
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
    """Start a program in attempt 1, and kill the agent. In attempt 2, return whether the program
    still runs."""
    pid_file = Path(folder, "pid")
    if os.environ["KINETIC_ATTEMPT"] == "1" and os.environ["KINETIC_HOST_INDEX"] == "0":
        pid_file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    with contextlib.suppress(OSError):
        return Path("/proc", pid_file.read_text(), "cmdline").read_bytes().startswith(b"sleep")
    return False


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_retry_does_not_meet_what_a_killed_agent_has_left(accelerator, home, tmp_path):
    retried = kinetic.run(accelerator=accelerator, retries=1)(start_a_program_and_lose_the_agent)
    assert retried(str(tmp_path)) is False
