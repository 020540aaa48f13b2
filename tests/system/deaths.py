"""Jobs of two hosts, held in a phase of their life.

In: a place. Out: handles. Called by system tests that kill something then.
"""

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
    """The leader returns at once; its report is in; the others keep the gang from ending."""
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        Path(marker).touch()
        return 1
    time.sleep(1000)
    return None


def held_in(phase, place):
    """A job that is in the phase. In "joining" the agent of host 0 is stopped: it cannot join,
    unless it was very quick."""
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


def killed_in_each_phase(place, process):
    """Jobs by phase, in each of which the process that `process` names was killed in that phase.
    The ends of all gangs are waited for at the same time."""
    jobs = {}
    for phase in PHASES:
        jobs[phase] = handle = held_in(phase, place)
        stopped = place.agent(handle, 0) if phase == "joining" else None
        kill(process(handle))
        if stopped is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
    return jobs


def assert_record_intact(handle):
    """The job is found, has a verdict, and tells it as often as it is asked."""
    again = kinetic.attach(handle.job_id)
    assert again.status().value == "FAILED"
    assert not again.outcome().ok
    assert again.job_id in [h.job_id for h in kinetic.list_jobs()]
