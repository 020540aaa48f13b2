"""Two-host jobs held in a phase of their life, for tests that kill one of their processes in it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from gangs import kill, stop, wait_until

import kinetic

PHASES = ["starting", "joining", "running", "reporting"]

CALLER = """
import os, sys, time
import kinetic

@kinetic.run(accelerator="tpu-v6e-8")
def long(leader_returns, gate):
    print("running", flush=True)
    if leader_returns and os.environ["KINETIC_HOST_INDEX"] == "0":
        return "value"
    while not os.path.exists(gate):
        time.sleep(0.01)
    return "value"

long(os.environ.get("PHASE") == "reporting", os.environ["GATE"])
"""


def sleep_long(marker):
    print("running", flush=True)
    Path(marker).touch()
    time.sleep(1000)


def return_and_wait(marker):
    """Return at once on the leader, host 0, and run on host 1: the job stays in the phase
    "reporting", in which the leader's report is written."""
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        Path(marker).touch()
        return 1
    time.sleep(1000)
    return None


def hold_in(phase, place):
    """Start a job, wait until it is in the phase, and return it. For "joining", the agent of host 0
    is stopped: it cannot join, unless it already joined before SIGSTOP arrived."""
    marker = place.marker(phase)
    func = return_and_wait if phase == "reporting" else sleep_long
    handle = kinetic.run(accelerator="tpu-v6e-8")(func).run_async(str(marker))
    if phase == "starting":
        place.host(handle, 1)
    elif phase == "joining":
        stop(place.agent(handle, 0))
        place.worker(handle, 1)
    else:
        wait_until(marker.exists, "the function has not started")
    return handle


def kill_in_each_phase(place, process):
    """Start one job per phase, and kill its process `process(job)` in that phase; return the jobs.

    All jobs are killed before any result is awaited, so that their gangs end in parallel.
    """
    jobs = {}
    for phase in PHASES:
        jobs[phase] = handle = hold_in(phase, place)
        stopped = place.agent(handle, 0) if phase == "joining" else None
        kill(process(handle))
        if stopped is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
    return jobs


def assert_record_intact(handle):
    """Check that the killed job can be attached and listed, and that its verdict is FAILED."""
    attached = kinetic.attach(handle.job_id)
    assert attached.status().value == "FAILED"
    assert not attached.outcome().ok
    assert attached.job_id in [h.job_id for h in kinetic.list_jobs()]
