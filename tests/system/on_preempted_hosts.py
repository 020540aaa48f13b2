"""Functions that a host runs which is taken away.

In: a marker. Out: marks of each host and attempt, values. Hosts import this module and not those of
the tests: pytest would cost each of them more than its whole job.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import kinetic


def mine(marker, what=""):
    """A file of this host in this attempt."""
    told = os.environ
    return Path(f"{marker}-{told['KINETIC_ATTEMPT']}-{told['KINETIC_HOST_INDEX']}{what}")


def save_when_preempted(marker):
    """Wait for it, save, and end; in the third attempt at once."""
    from kinetic._in_job.preemption import Preempted

    mine(marker).touch()
    while os.environ["KINETIC_ATTEMPT"] != "3":
        time.sleep(0.02)
        if kinetic.preempted():
            time.sleep(1.5)  # Longer than it takes to find out who is to blame.
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
    """In the first attempt host 1 fails, and the other one takes its time to end."""
    mine(marker).touch()
    if os.environ["KINETIC_ATTEMPT"] > "1":
        return os.environ["KINETIC_ATTEMPT"]
    if os.environ["KINETIC_HOST_INDEX"] == "1":
        while not Path(f"{marker}-1-0").exists():  # A host that has not begun would not begin.
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
