"""Processes that only local jobs have, or several at once, are killed: the caller gets the right
error, nothing is left (`no_leftovers`), and the next job runs. test_deaths.py covers all places."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deaths import CALLER, assert_record_intact, hold_in
from gangs import (
    PATIENCE_S,
    assert_next_job_runs,
    kill,
    processes,
    start_script,
    stop,
    wait_until,
    worker_of,
    zygotes,
)
from on_hosts import clean_up_slowly, return_when_told, second_time
from places import Place

import kinetic
from kinetic import errors


def test_a_supervisor_killed_after_its_hosts_reported_costs_nothing(home, nothing_left):
    """The supervisor dies after its host's report, before it writes a verdict. No caller waited:
    the first command that reads the status gets SUCCEEDED from the report."""
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(return_when_told).run_async(str(marker))
    supervisor, _ = processes(handle)
    wait_until(marker.exists, "the function has not started")
    stop(supervisor)
    marker.unlink()
    wait_until(
        lambda: list(home.glob("jobs/*/attempts/*/hosts/0/report.json")),
        "the host has not reported",
    )
    kill(supervisor)
    listed = subprocess.run(
        [sys.executable, "-m", "kinetic", "jobs", "list", "--json"], capture_output=True, text=True
    )
    assert [job["state"] for job in json.loads(listed.stdout)] in (
        ["SUCCEEDED"],
        ["RUNNING"],
    )  # RUNNING while the agent still ends
    wait_until(lambda: handle.status().ended, "the job goes on")
    assert handle.status().value == "SUCCEEDED"
    assert handle.result() == "value"
    nothing_left()


def kill_group(caller, terminal):
    os.killpg(caller.pid, signal.SIGKILL)


def close_terminal(caller, terminal):
    os.close(terminal.pop())


@pytest.mark.parametrize("ending", [kill_group, close_terminal])
def test_what_ends_the_callers_whole_session_does_not_end_the_job(
    ending, home, monkeypatch, nothing_left
):
    """The caller's process group is killed, or its terminal is closed, which sends SIGHUP to all
    processes in it. The job goes on."""
    gate = home.parent / "gate"
    monkeypatch.setenv("GATE", str(gate))
    ours, theirs = os.openpty()
    own_terminal = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    terminal = [ours]
    with start_script(
        home,
        own_terminal + CALLER,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as caller:
        os.close(theirs)
        wait_until(lambda: b"running" in os.read(ours, 4096), "nothing was printed")
        ending(caller, terminal)
        caller.wait(PATIENCE_S)
    gate.touch()
    for fd in terminal:
        os.close(fd)
    assert caller.returncode in (-signal.SIGHUP, -signal.SIGKILL)
    (handle,) = kinetic.list_jobs()
    assert handle.result() == "value"
    nothing_left()
    assert_next_job_runs()


DYING_WITH = """
import os, sys, time
from kinetic._system import processes

if os.fork() == 0:
    parent = os.getppid()
    with processes.dying_with(parent):
        if sys.argv[1] == "during":
            print("there", flush=True)
            time.sleep(1000)
    print("there", flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    print("still there", flush=True)
else:
    time.sleep(1000)
"""


@pytest.mark.parametrize(("moment", "printed"), [("during", b""), ("afterwards", b"still there\n")])
def test_an_agent_that_prepares_dies_with_its_supervisor_and_later_lives_on_to_clean_up(
    moment, printed
):
    with subprocess.Popen(
        [sys.executable, "-c", DYING_WITH, moment], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == b"there\n"
        parent.kill()
        # read() returns once both processes have ended.
        assert parent.stdout.read() == printed


# -- the zygote ------------------------------------------------------------------------------------

KILLS_ITS_ZYGOTE = """
import os, signal, sys, threading
import kinetic

sys.path.insert(0, GANGS)
from gangs import zygotes, kill, wait_until

@kinetic.run(accelerator="cpu")
def job():
    return "value"

threading.Thread(target=lambda: kill(wait_until(zygotes, "no zygote")[0])).start()
print(job())
"""


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_killing_the_zygote_while_it_starts(accelerator, home):
    source = KILLS_ITS_ZYGOTE.replace("GANGS", repr(str(Path(__file__).parent)))
    with start_script(home, source.replace('"cpu"', repr(accelerator)), text=True) as caller:
        assert caller.stdout.read() == "value\n"


DECORATES_ONLY = """
import sys
import kinetic

sys.path.insert(0, GANGS)
from gangs import wait_until, zygotes

for accelerator in ("cpu", "tpu-v6e-8"):
    @kinetic.run(accelerator=accelerator)
    def job():
        return "value"
print(len(wait_until(zygotes, "no zygote")))
"""


def test_a_script_that_calls_nothing_leaves_no_zygote(home):
    source = DECORATES_ONLY.replace("GANGS", repr(str(Path(__file__).parent)))
    with start_script(home, source, text=True) as caller:
        assert caller.stdout.read() == "1\n", "for the first function only"


def test_killing_the_zygote_between_two_jobs_costs_one_restart():
    job = kinetic.run(accelerator="cpu")(os.getpid)
    job()
    assert zygotes()
    for pid in zygotes():
        kill(pid)
    assert job() > 0


def test_a_zygote_that_is_stopped_between_two_jobs_goes_on_for_the_next():
    job = kinetic.run(accelerator="cpu")(os.getpid)
    job()
    for pid in zygotes():
        stop(pid)
    assert job() > 0


def test_a_job_whose_zygote_dies_goes_on(home):
    marker = home.parent / "marker"

    @kinetic.run(accelerator="cpu")
    def short(path):
        Path(path).touch()
        time.sleep(0.5)
        return "value"

    handle = short.run_async(str(marker))
    wait_until(marker.exists, "not started")
    for pid in zygotes():
        kill(pid)
    assert handle.result() == "value"


# -- another attempt, and a job that is being cancelled --------------------------------------------


def in_the_second_attempt(home):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="tpu-v6e-8", retries=2)(second_time).run_async(str(marker))
    wait_until(marker.exists, "no second attempt")
    return handle


@pytest.mark.parametrize("which", ["agent", "worker"])
def test_a_death_in_the_second_attempt_is_followed_by_the_third(which, home):
    handle = in_the_second_attempt(home)
    _, agents = processes(handle)
    kill(agents[1] if which == "agent" else worker_of(agents[1]))
    assert handle.result() == 3
    assert handle.outcome().attempt == 3


def test_killing_the_supervisor_in_the_second_attempt(home, nothing_left):
    handle = in_the_second_attempt(home)
    supervisor, _ = processes(handle)
    kill(supervisor)
    with pytest.raises(errors.SupervisorLost):
        handle.result(timeout=PATIENCE_S)
    assert handle.outcome().attempt == 2
    assert_record_intact(handle)
    nothing_left()
    assert_next_job_runs()


def test_a_wish_to_cancel_between_two_attempts_is_not_lost(home):
    """A cancel request is obeyed even if it comes while the next attempt is being started."""

    def fail():
        raise ValueError("again")

    for nth in range(1, 5):
        handle = kinetic.run(accelerator="cpu", retries=1000)(fail).run_async()
        wait_until(lambda nth=nth, handle=handle: count_retries(handle) >= nth, "no retry")
        time.sleep(0.03 * nth)  # another moment in each turn of the loop
        handle.cancel(cleanup_timeout=PATIENCE_S)
        with pytest.raises(errors.JobCancelled):
            handle.result(timeout=0)
        assert count_retries(handle) < 1000


def count_retries(handle):
    return sum(event["kind"] == "retry" for event in handle.events())


@pytest.mark.parametrize("which", ["supervisor", "agent", "worker"])
def test_a_death_while_the_job_is_being_cancelled(which, home, nothing_left):
    marker = home.parent / "cleaning"
    handle = kinetic.run(accelerator="tpu-v6e-8")(clean_up_slowly).run_async(str(marker))
    wait_until(
        lambda: "running" in handle.logs(host=0) and "running" in handle.logs(host=1), "not running"
    )
    supervisor, agents = processes(handle)
    handle.cancel(cleanup_timeout=0)
    wait_until(marker.exists, "SIGTERM did not reach the function")
    kill({"supervisor": supervisor, "agent": agents[1], "worker": worker_of(agents[1])}[which])
    with pytest.raises(errors.JobCancelled):
        handle.result()
    nothing_left()
    assert_next_job_runs()


def test_two_deaths_at_once_leave_nothing(home, nothing_left):
    handle = hold_in("running", Place("local", home.parent))
    supervisor, agents = processes(handle)
    for pid in (supervisor, agents[0]):
        kill(pid)
    with pytest.raises(errors.JobFailed):
        handle.result(timeout=PATIENCE_S)
    nothing_left()
    assert_next_job_runs()


def test_events_tell_the_story(home):
    handle = hold_in("running", Place("local", home.parent))
    _, agents = processes(handle)
    kill(agents[1])
    with pytest.raises(errors.HostLost):
        handle.result()
    kinds = [
        json.loads(line)["kind"]
        for line in (home / "jobs" / handle.job_id / "events.jsonl").read_text().splitlines()
    ]
    assert kinds[:3] == ["joined", "joined", "ready"]
    assert "lost" in kinds
    assert kinds[-1] == "ended"
