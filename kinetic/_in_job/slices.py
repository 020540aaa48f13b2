"""The attempt and the slices of a job, as its function sees them.

The only module that reads the variables which the worker sets for the function.
"""

from __future__ import annotations

import os

from kinetic._compile import topologies
from kinetic._config import settings

INDEX = "KINETIC_SLICE_INDEX"
COUNT = "KINETIC_NUM_SLICES"
ATTEMPT = "KINETIC_ATTEMPT"
SLICES = "KINETIC_SLICES"
"""Variable with the slices that take part, such as "0,2"; set for an elastic single controller."""
LOST_AT = "KINETIC_LOST_AT"
"""Variable with the time of the slice loss before this attempt, on the host's monotonic clock."""


def slice_index() -> int:
    """Return the index of this host's slice.

    Returns:
        The index, from 0. 0 outside a job, and in a process that has the devices of all slices.

    Example:
        ```python
        if kinetic.slice_index() == 0:
            print("on the first slice")
        ```
    """
    return int(os.environ.get(INDEX, "0"))


def num_slices() -> int:
    """Return the number of slices that take part in this attempt.

    Returns:
        The number of slices, without those that an elastic job has lost. Under
            `kinetic.compile_for`, the number compiled for; outside a job 1.

    Example:
        ```python
        batch_size = 256 * kinetic.num_slices()
        ```
    """
    target = topologies.current.get()
    if target is not None:
        return target.slices
    return int(os.environ.get(COUNT, "1"))


def attempt() -> int:
    """Return the number of this attempt.

    Returns:
        The number, from 1: every retry, and every re-forming of an elastic job, adds one. 1 outside
            a job.

    Example:
        ```python
        if kinetic.attempt() > 1:
            print("restarted")
        ```
    """
    return int(os.environ.get(ATTEMPT, "1"))


def job_id() -> str:
    """Return the id of the job that this process is part of; "" outside jobs."""
    return read_variable("KINETIC_JOB_ID") if settings.on_host() else ""


def is_shown() -> bool:
    """True on host 0, whose output the caller sees. JAX's process 0 may be another host."""
    return read_variable("KINETIC_HOST_INDEX") == "0"


def read_variable(name: str) -> str:
    """Return a variable that the worker has set for the function; "" if it is not set."""
    return os.environ.get(name, "")
