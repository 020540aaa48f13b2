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
from kinetic._core.outcome import name_hosts
from kinetic._in_job import peers, slices
from kinetic.errors import UsageError

_LIMIT_S = 60.0
FILE = "KINETIC_REFORM_FILE"
LEAST, MOST = "KINETIC_LEAST_SLICES", "KINETIC_MOST_SLICES"


def could_grow() -> bool:
    """Return whether slices are missing that may come back; the same on all hosts."""
    return slices.num_slices() < int(slices.read_variable(MOST) or "0")


def could_shrink() -> bool:
    """Return whether the job may go on with fewer slices; the same on all hosts."""
    return int(slices.read_variable(LEAST) or "0") < int(slices.read_variable(MOST) or "0")


def is_asked() -> bool:
    """Return whether this host has been told that a slice is back. Others may hear of it later: see
    `should_reform`."""
    file = slices.read_variable(FILE)
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
    does not count as a failure. Hosts wait here for each other, up to a minute.

    Raises:
        UsageError: no slice is missing; or other hosts have not called it within a minute.
    """
    _meet()
    if not could_grow():
        raise UsageError(
            "kinetic.reform() was called while no slice of this job was missing: the function "
            "would begin again, and leave again, without end. Call it where "
            "kinetic.should_reform() has returned True."
        )
    raise Leaving


def _meet() -> None:
    """Wait for all hosts: those that do not leave would wait for those that did in their next
    collective."""
    world = peers.find_world(f"kinetic/leaving/{slices.attempt()}")
    if world is None:
        return
    world.set(f"here/{world.index}", "")
    try:
        world.wait_at_barrier("all", _LIMIT_S)
    except TimeoutError:
        try:
            hosts = world.get_all("here")
        except Exception:  # noqa: BLE001 - the leader is lost, and the gang knows
            return
        if missing := [host for host in range(world.count) if str(host) not in hosts]:
            have = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"kinetic.reform() was called on host {world.index}, and {name_hosts(missing)} "
                f"{have} not called it within {_LIMIT_S:g} s. Call it on all hosts at the same "
                "step: kinetic.should_reform() gives all of them the same answer. If some of them "
                "still save, let all hosts wait for them first."
            ) from None
