"""The folder in a host's memory: where its local checkpoints lie.

In: what the worker told the function. Out: a path.
"""

from __future__ import annotations

from pathlib import Path

from kinetic._in_job import slices

VARIABLE = "KINETIC_LOCAL_DIR"


def local_folder() -> Path | None:
    """Return the folder of this host, which stays between the attempts of its job; None where there
    is none: outside of jobs, and for the only process of a single controller on a cluster."""
    told = slices.read_variable(VARIABLE)
    return Path(told) if told else None
