"""How a function of an elastic job makes room for a slice that is back.

In: what the worker left in the environment, a file that the agent makes. Out: the same answer on
all hosts; the end of this attempt.

A job that has lost slices goes on with those left. When a slice is back, it can take part only in
another attempt: the function saves its state at a step and leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from kinetic._core.exits import Leaving
from kinetic._in_job import slices

FILE = "KINETIC_MAKES_ROOM"
MOST = "KINETIC_MOST_SLICES"


def could_grow() -> bool:
    """Return whether slices are missing that may come back; the same on all hosts."""
    return slices.num_slices() < int(slices.told(MOST) or "0")


def is_asked() -> bool:
    """Return whether this host has been told that a slice is back. Others may hear of it later: see
    `should_reform`."""
    file = slices.told(FILE)
    return bool(file) and could_grow() and Path(file).exists()


def should_reform() -> bool:
    """Return whether a slice of this elastic job is back: the function should save its state and
    call `reform`.

    Call it on all hosts at the same step: all get the same answer. While no slice is missing, and
    outside of elastic jobs, it costs nothing; else it is a small collective.
    """
    if not could_grow():
        return False
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return is_asked()
    return bool(np.max(multihost_utils.process_allgather(np.array([is_asked()]))))


def reform() -> NoReturn:
    """Leave, so that the function is called again on all slices that are there.

    Call it on all hosts, after `should_reform` and once the state is saved. It does not return, and
    does not count as a failure.
    """
    raise Leaving
