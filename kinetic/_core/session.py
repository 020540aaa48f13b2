"""The session: slices that are held, so that one call after the other runs on them.

A session is a job of its own that runs no function. Its leader takes the calls from a queue in the
store; each call is a job with an id, records and a verdict of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic._core.values import dataclass

if TYPE_CHECKING:
    from kinetic._core.accelerators.topology import Topology
    from kinetic._core.options import Options

DEFAULT_NAME = "default"
"""Name of a session that was started without one."""
IDLE_S, LIFETIME_S = 1800.0, 12 * 3600.0
"""Default limits of a session: time without a call, and time in all."""
KEPT_IS_GONE = "What the session kept between calls is gone."
CANCELLED_WAITING = "The call was cancelled before it began."
ENDED_WAITING = "The call did not begin: its session has ended."


@dataclass(frozen=True)
class Session:
    """The terms on which a job holds its slices.

    Attributes:
        name: name of the session, with which users find it.
        idle_timeout_s: time without a call after which the session ends, in seconds.
        max_lifetime_s: time after which the session ends even while a call runs, in seconds.
    """

    name: str
    idle_timeout_s: float = IDLE_S
    max_lifetime_s: float = LIFETIME_S

    def ends_at(self, held_since: float, idle_since: float | None, budget_s: float | None) -> float:
        """Return the time at which the session ends if no other call comes.

        Args:
            held_since: time since which all of its hosts are held.
            idle_since: time since which no call runs or waits; None while a call runs or waits.
            budget_s: time for which its budget pays; None if it has no budget.
        """
        latest = held_since + min(self.max_lifetime_s, budget_s or self.max_lifetime_s)
        return latest if idle_since is None else min(latest, idle_since + self.idle_timeout_s)


def are_alike(one: Topology, other: Topology) -> bool:
    """True if two slices differ in nothing but whether their machines are preemptible."""
    return replace(one, name="", spot=False) == replace(other, name="", spot=False)


def keeps_processes(call: Options, session: Options) -> bool:
    """True if a call on a session runs in the processes that the session keeps: the option of the
    call counts, and without one that of the session."""
    return bool(session.keep if call.keep is None else call.keep)
