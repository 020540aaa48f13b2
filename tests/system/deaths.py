"""Jobs of two hosts that are held in a phase of their life, for tests that kill a process in it."""

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
    """Return on the leader at once, so that its report is written while host 1 keeps the gang
    alive."""
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        Path(marker).touch()
        return 1
    time.sleep(1000)
    return None


def hold_in(phase, place):
    """Return a job in the given phase. For "joining" the agent of host 0 is stopped so that it
    cannot join, unless it joined before SIGSTOP arrived."""
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
    """Return one job per phase, whose process `process(job)` was killed in that phase.

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
    """Check that the job can be attached and listed, and that its verdict is FAILED."""
    attached = kinetic.attach(handle.job_id)
    assert attached.status().value == "FAILED"
    assert not attached.outcome().ok
    assert attached.job_id in [h.job_id for h in kinetic.list_jobs()]
