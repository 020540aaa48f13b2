"""`kinetic.preempted`: tells the function that a host is being taken away, with time to save.

The host's agent and the function talk through files in a folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from kinetic._core.preemption import NOTICE, NOTICED, POLLING, VARIABLE


class Preempted(SystemExit):
    """Ends the function after it has saved its state because a host is being taken away."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


_marked: set[str] = set()


def preempted() -> bool:
    """True if a host of this job is being taken away: its machine is preempted or drained.

    Becomes True on all hosts, but not at the same step: let the hosts agree on a step to save at,
    as `kinetic.Checkpointer` does. After the first call, a preemption no longer sends SIGTERM to
    the function: it has the whole grace period to save, and should then return or raise on all
    hosts. The attempt ends as preempted; with `retries=`, another one follows.

    Returns:
        True once a preemption was announced; always False outside a job.

    Example:
        ```python
        if kinetic.preempted():  # in a job with one host
            save(step, state)
            return
        ```
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return False
    _mark(folder, POLLING)
    if not os.path.exists(f"{folder}/{NOTICE}"):  # noqa: PTH110 - called at every step
        return False
    _mark(folder, NOTICED)
    return True


def end_function() -> NoReturn:
    """End the function after all hosts have saved.

    A file tells this host's agent that the function knows of the preemption: another host may have
    told the function before this host's agent did.

    Raises:
        Preempted: Always.
    """
    if (folder := os.environ.get(VARIABLE)) is not None:
        _mark(folder, NOTICED)
    raise Preempted


def _mark(folder: str, name: str) -> None:
    """Create a file for the agent, at most once per process."""
    path = f"{folder}/{name}"
    if path not in _marked:
        with contextlib.suppress(OSError):
            Path(path).touch()
        _marked.add(path)
