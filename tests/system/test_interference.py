"""People stop and continue processes of a job, or remove its folders: the job ends with the right
error, or goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gangs import PATIENCE_S, family, processes, stop, wait_until, worker_of
from on_hosts import return_when_let_go, sleep_long, step_now_and_then

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._backends.local.backend import LocalBackend
from kinetic._config.settings import worker_environ
from kinetic._store.local import LocalStore

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]


def start_on_both(home, func=sleep_long, **options):
    """Start a job of two hosts; return its handle when both hosts have begun the function."""
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="tpu-v6e-8", **options)(func).run_async(str(marker))
    for host in range(2):
        wait_until(Path(f"{marker}-{host}").exists, f"host {host} has not started")
    return handle


def find_process_of(handle, which):
    supervisor, agents = processes(handle)
    return {"supervisor": supervisor, "agent": agents[1], "worker": worker_of(agents[1])}[which]


# -- one process stopped ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["supervisor", "agent", "worker"])
def test_a_job_of_which_a_process_is_stopped_can_be_cancelled(which, home):
    handle = start_on_both(home)
    stop(find_process_of(handle, which))
    done = subprocess.run(
        [*KINETIC, "jobs", "cancel", handle.job_id],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(errors.JobCancelled):
        handle.result()


def test_a_job_whose_supervisor_is_stopped_at_the_very_start_can_be_cancelled(home):
    handle = kinetic.run(accelerator="tpu-v6e-8")(sleep_long).run_async(str(home.parent / "marker"))
    supervisor = holder_of_lock(home / "jobs" / handle.job_id / "local" / "lock")
    stop(supervisor)
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result()


def holder_of_lock(path):
    """Return the pid of the process that holds the file's lock, from /proc/locks."""
    inode = f":{path.stat().st_ino} "
    (line,) = [line for line in Path("/proc/locks").read_text().splitlines() if inode in line]
    return int(line.split()[4])


def test_cancelling_a_job_whose_supervisor_is_dead_does_nothing(home):
    handle = start_on_both(home)
    os.kill(find_process_of(handle, "supervisor"), signal.SIGKILL)
    with pytest.raises(errors.SupervisorLost):
        handle.result()
    handle.cancel()
    assert handle.status().value == "FAILED"


@pytest.mark.parametrize("which", ["supervisor", "agent", "worker"])
def test_a_process_that_is_stopped_for_a_moment_harms_nothing(which, home):
    handle = start_on_both(home, func=return_when_let_go)
    pid = find_process_of(handle, which)
    stop(pid)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    let_go(home)
    assert handle.result() == "value"


def let_go(home):
    (home.parent / "marker-let-go").touch()


def test_a_stopped_agent_is_told_of_and_waited_for(home):
    handle = start_on_both(home, func=return_when_let_go)
    agent = find_process_of(handle, "agent")
    stop(agent)
    notice = (
        "kinetic: host 1 of 2: no sign of life for 10 s: all processors are busy, or its process "
        "is stopped."
    )
    wait_until(lambda: notice in handle.logs(), "nothing is said")
    os.kill(agent, signal.SIGCONT)
    let_go(home)
    assert handle.result() == "value"


def test_a_stopped_agent_is_a_lost_host_where_there_is_a_hang_timeout(home):
    handle = start_on_both(home, func=step_now_and_then, hang_timeout=8)
    stop(find_process_of(handle, "agent"))
    with pytest.raises(errors.HostLost, match=r"host 1 of 2 was lost\. Fell silent") as caught:
        handle.result()
    assert caught.value.hosts == (1,)


def test_a_stopped_worker_is_a_hung_host_and_is_said_to_be_stopped(home):
    handle = start_on_both(home, hang_timeout=3)
    stop(find_process_of(handle, "worker"))
    with pytest.raises(errors.HostHung, match="host 1") as caught:
        handle.result()
    assert caught.value.hosts == (1,)
    assert "stopped: it received SIGSTOP" in str(caught.value)


def impatient(home, after_s=3.0):
    """Return a local backend whose agents give up after these seconds without the coordinator."""
    return LocalBackend(LocalStore(home), worker_environ(), unreachable_after_s=after_s)


def test_nobody_waits_for_ever_for_a_supervisor_that_is_stopped(home):
    with registry.substitute_backend("local", lambda _, store: impatient(home)):
        handle = start_on_both(home, backend="local")
    stop(find_process_of(handle, "supervisor"))
    with pytest.raises(errors.SupervisorLost, match="has not answered for 3 s"):
        handle.result()


# -- all processes stopped: a machine that was suspended -------------------------------------------


@pytest.mark.parametrize("asleep_s", [15, pytest.param(130, marks=pytest.mark.long)])
def test_a_machine_that_was_suspended_blames_no_host(home, asleep_s):
    """The machine sleeps for longer than each limit of the job (silent host: 10 s, hang,
    coordinator) and, in the long case, than JAX's heartbeat limit. The job goes on."""
    # A supervisor that wakes up on a busy machine may need seconds for its first answer.
    with registry.substitute_backend("local", lambda _, store: impatient(home, 10.0)):
        handle = start_on_both(home, func=step_now_and_then, backend="local", hang_timeout=8)
    whole = family(handle)
    for pid in whole:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(asleep_s)
    for pid in whole:
        os.kill(pid, signal.SIGCONT)
    let_go(home)
    assert handle.result() == "value"


# -- removed folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["the job", "its local part", "the home"])
def test_a_job_whose_folder_is_removed_ends_and_leaves_nothing(what, home, nothing_left):
    handle = start_on_both(home)
    folder = home / "jobs" / handle.job_id
    shutil.rmtree(
        {"the job": folder, "its local part": folder / "local", "the home": home}[what],
        ignore_errors=True,
    )
    # Before the supervisor has noticed, a caller finds no lock and takes the supervisor for dead.
    or_sooner = "|supervisor was killed" if what == "its local part" else ""
    with pytest.raises((errors.NotFound, errors.JobFailed), match=f"were removed{or_sooner}"):
        handle.result()
    nothing_left()
    assert not (folder / "local").exists() or what == "its local part"
