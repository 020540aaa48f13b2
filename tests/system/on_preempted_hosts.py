"""Functions of hosts that are preempted. Hosts import this module instead of the tests: importing
pytest would take longer than the job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import kinetic


def mine(marker, what=""):
    """Return the path of this host's file in this attempt, with `what` at its end."""
    environ = os.environ
    return Path(f"{marker}-{environ['KINETIC_ATTEMPT']}-{environ['KINETIC_HOST_INDEX']}{what}")


def save_when_preempted(marker):
    """Wait for a preemption, then save and end. The third attempt returns the names of all saved
    files."""
    from kinetic._in_job.preemption import Preempted

    mine(marker).touch()
    while os.environ["KINETIC_ATTEMPT"] != "3":
        time.sleep(0.02)
        if kinetic.preempted():
            # Longer than the leader needs to determine which host was preempted first.
            time.sleep(1.5)
            mine(marker, "-saved").touch()
            raise Preempted
    return sorted(path.name for path in marker.parent.glob(f"{marker.name}-*-saved"))


def return_when_preempted(marker):
    mine(marker).touch()
    while not kinetic.preempted():
        time.sleep(0.02)
    return "unfinished"


def fail_when_preempted(marker):
    return_when_preempted(marker)
    raise OSError("the disk is full")


def look_once(marker):
    kinetic.preempted()
    mine(marker).touch()
    while True:
        time.sleep(0.05)


def keep_others_waiting(marker):
    """Raise on host 1 in attempt 1. Host 0 does not end before the file "enough" exists."""
    mine(marker).touch()
    if os.environ["KINETIC_ATTEMPT"] > "1":
        return os.environ["KINETIC_ATTEMPT"]
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        # Wait for host 0: after the failure it would no longer start the function.
        while not Path(f"{marker}-1-0").exists():
            time.sleep(0.02)
        raise ValueError("on purpose")
    try:
        signal.pause()
    finally:
        while not Path(f"{marker}-enough").exists():
            time.sleep(0.02)


def wait_at_first(marker):
    mine(marker).touch()
    while os.environ["KINETIC_ATTEMPT"] == "1":
        time.sleep(0.05)
    return os.environ["KINETIC_ATTEMPT"]


def save_when_jax_says_so(marker):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    multihost_utils.process_allgather(np.ones(1))
    mine(marker).touch()
    for step in range(1_000_000):
        time.sleep(0.02)
        multihost_utils.process_allgather(np.ones(1))
        if multihost_utils.reached_preemption_sync_point(step):
            time.sleep(1 + jax.process_index())
            multihost_utils.process_allgather(np.ones(1))
            mine(marker, f"-saved-{step}").touch()
            return "unfinished"
    return "never"
