"""The attempt and the slices of a job, as its function sees them.

In: what the worker left in the environment. Out: the attempt, the index of this host's slice,
and how many there are.
"""

from __future__ import annotations

import os

from kinetic._compile import topologies
from kinetic._config import settings

INDEX = "KINETIC_SLICE_INDEX"
COUNT = "KINETIC_NUM_SLICES"
ATTEMPT = "KINETIC_ATTEMPT"
SLICES = "KINETIC_SLICES"
"""Those that take part, where a single controller of an elastic job has them all: "0,2"."""
LOST_AT = "KINETIC_LOST_AT"
"""When the slice was lost from whose loss this attempt recovers, on the host's monotonic clock."""


def slice_index() -> int:
    """Return the index of the slice that this host belongs to, from 0; 0 outside a job, and where
    one process has the devices of all slices."""
    return int(os.environ.get(INDEX, "0"))


def num_slices() -> int:
    """Return the number of slices of this job that take part, or of those that are compiled for; 1
    outside a job."""
    target = topologies.current.get()
    if target is not None:
        return target.slices
    return int(os.environ.get(COUNT, "1"))


def attempt() -> int:
    """Return which start of the function this is, from 1: retries of a job, and every new beginning
    of an elastic one, count; 1 outside a job."""
    return int(os.environ.get(ATTEMPT, "1"))


def job_id() -> str:
    """Return the job that this process is part of; "" outside of jobs."""
    return read_variable("KINETIC_JOB_ID") if settings.on_host() else ""


def is_shown() -> bool:
    """True on host 0, whose output the caller sees; JAX may number another one 0."""
    return read_variable("KINETIC_HOST_INDEX") == "0"


def read_variable(name: str) -> str:
    """Return what the worker told the function in this variable; "" if nothing."""
    return os.environ.get(name, "")
