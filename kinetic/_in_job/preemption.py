"""Preemption, as the function sees it: a machine of the job is taken away, and there is time to
save.

In: what the agent of the host leaves in a folder. Out: whether a host is taken away.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from kinetic._core.preemption import NOTICE, NOTICED, POLLING, VARIABLE


class Preempted(SystemExit):
    """The function ends because a host is taken away, and has saved what it wanted to."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


_marked: set[str] = set()


def preempted() -> bool:
    """Whether a host of this job is being taken away: a spot machine is preempted, a node drained.

    Becomes True on all hosts, not on all in the same step: let them agree on the step to save at.
    The first call says that the function looks for preemption itself: it is not sent SIGTERM then,
    and has the whole grace to save, and to return or raise on all hosts. The attempt ends as
    preempted, and with `retries=` another one follows. Always False outside a job.
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
    """End the function, which has saved as the hosts have agreed: it may know from another host
    what its own agent has not told it yet.

    Raises:
        Preempted: always.
    """
    if (folder := os.environ.get(VARIABLE)) is not None:
        _mark(folder, NOTICED)
    raise Preempted


def _mark(folder: str, name: str) -> None:
    """Leave a file for the agent, once."""
    path = f"{folder}/{name}"
    if path not in _marked:
        with contextlib.suppress(OSError):
            Path(path).touch()
        _marked.add(path)
