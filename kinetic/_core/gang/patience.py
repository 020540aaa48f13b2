"""How long hosts that were not lost may take to be ready for the next attempt of an elastic job.

In: what becomes of survivors (`survivors=`). Out: limits for the host's agent, the gang and the
leader. Each of them ends what the one before has not ended; it leaves that the time to, also where
the machine is busy.
"""

from __future__ import annotations

from kinetic._core.checks import Survivors
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Patience:
    """Seconds.

    Attributes:
        free_s: that a function may take to end, once its collectives are broken (agent).
        leave_s: that a process may take to leave its world (agent).
        report_s: after the grace, that a host may take to say how its function ended (gang).
        ready_s: after that, that a host may take until it waits for its place (leader).
    """

    free_s: float
    leave_s: float
    report_s: float
    ready_s: float


_REPLACED = Patience(free_s=5.0, leave_s=10.0, report_s=10.0, ready_s=30.0)
_KEPT = Patience(free_s=12.0, leave_s=60.0, report_s=22.0, ready_s=90.0)


def patience_with(survivors: Survivors) -> Patience:
    """Return the limits: a process that must stay gets more time than one that is replaced when it
    is late."""
    return _KEPT if survivors == "keep" else _REPLACED
