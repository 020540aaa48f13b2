"""`kinetic.should_reform` and `kinetic.reform`: how an elastic job takes a slice back.

A job that has lost slices goes on with the remaining ones. A slice that comes back can only join a
new attempt: the agent creates a file, all hosts agree on a step, save, and end the attempt.
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
    """True if slices are missing that may come back. The answer is the same on all hosts."""
    return slices.num_slices() < int(slices.read_variable(MOST) or "0")


def could_shrink() -> bool:
    """True if the job may go on with fewer slices. The answer is the same on all hosts."""
    return int(slices.read_variable(LEAST) or "0") < int(slices.read_variable(MOST) or "0")


def is_slice_back() -> bool:
    """True if this host's agent has reported that a slice is back. Other hosts may get the report
    at another time, whereas `should_reform` returns the same on all hosts."""
    file = slices.read_variable(FILE)
    return bool(file) and could_grow() and Path(file).exists()


def should_reform() -> bool:
    """True if a lost slice of this elastic job is back: save the state and call `reform`.

    Call it on all hosts at the same step; all get the same answer. While a slice is missing, each
    call is a small collective; otherwise a call costs nothing. Always False outside elastic jobs.

    Returns:
        True on all hosts, or False on all hosts.

    Example:
        ```python
        if kinetic.should_reform():
            save(step, state)
            kinetic.reform()
        ```
    """
    if not could_grow():
        return False
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return is_slice_back()
    return bool(np.max(multihost_utils.process_allgather(np.array([is_slice_back()]))))


def reform() -> NoReturn:
    """End this attempt, so that the next one runs on all available slices.

    Call it on all hosts once the state is saved. It waits up to 60 s for all hosts to call it, and
    does not return. The attempt does not count as a failure.

    Raises:
        UsageError: No slice is missing, or another host has not called `reform` within 60 s.

    Example:
        ```python
        if kinetic.should_reform():
            save(step, state)
            kinetic.reform()
        ```
    """
    _wait_for_all_hosts()
    if not could_grow():
        raise UsageError(
            "kinetic.reform() was called while no slice of this job was missing: the job would "
            "restart without end. Call it only after kinetic.should_reform() has returned True."
        )
    raise Leaving


def _wait_for_all_hosts() -> None:
    """Wait until all hosts call `reform`: a host that did not would hang at its next collective."""
    world = peers.find_world(f"kinetic/leaving/{slices.attempt()}")
    if world is None:
        return
    world.set(f"here/{world.index}", "")
    try:
        world.wait_at_barrier("all", _LIMIT_S)
    except TimeoutError:
        try:
            hosts = world.get_all("here")
        except Exception:  # noqa: BLE001 - the leader is lost: the gang ends for that reason
            return
        if missing := [host for host in range(world.count) if str(host) not in hosts]:
            have = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"kinetic.reform() was called on host {world.index}, and {name_hosts(missing)} "
                f"{have} not called it within {_LIMIT_S:g} s. Call it on all hosts at the same "
                "step: kinetic.should_reform() gives all of them the same answer. If hosts are "
                "still saving, let all hosts wait for them first."
            ) from None
