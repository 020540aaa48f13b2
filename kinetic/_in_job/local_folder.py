"""The folder in a host's memory: where its local checkpoints lie.

In: what the worker told the function. Out: a path.
"""

from __future__ import annotations

from pathlib import Path

from kinetic._in_job import slices
from kinetic._system import memory_folder

VARIABLE = "KINETIC_LOCAL_DIR"


def local_folder() -> Path | None:
    """Return the folder of this host, which stays between the attempts of its job; None outside of
    jobs, and where the machine has no file system in memory."""
    told = slices.told(VARIABLE)
    if told:
        return Path(told)
    job, host = slices.told("KINETIC_JOB_ID"), slices.told("KINETIC_HOST_INDEX")
    return memory_folder.make(job, f"host-{host or 0}") if job else None
