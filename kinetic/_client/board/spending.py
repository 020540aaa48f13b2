"""The cost of a batch: the sum over its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic._client.board import text
from kinetic._client.board.reader import JobBoard
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStanding
from kinetic._store.many import at_once

if TYPE_CHECKING:
    from kinetic._core.plan import Cost


class Spending(NamedTuple):
    """The cost of several jobs, in US dollars.

    Attributes:
        so_far_usd: the cost so far.
        usd_per_hour: the current rate of the running jobs.
        origins: the sources of the prices, without duplicates.
        simulated: the number of simulated jobs, which cost nothing.
        unknown: the number of jobs without a known price.
        jobs: the number of all jobs.
        is_over: True if no job runs or waits.
    """

    so_far_usd: float
    usd_per_hour: float
    origins: tuple[str, ...]
    simulated: int
    unknown: int
    jobs: int
    is_over: bool

    def describe(self) -> str:
        """Return the cost for people: "about $12.40 so far ($86.40 an hour now, list price,
        us-east5)"; "" if no price is known."""
        from kinetic._core.accelerators.prices import in_usd

        if self.simulated and self.simulated + self.unknown == self.jobs:
            return "nothing: the jobs are simulated"
        if self.unknown == self.jobs:
            return ""
        rate = () if self.is_over else (f"{in_usd(self.usd_per_hour)} an hour now",)
        left_out = f"; not counted: {text.count(self.unknown, 'job')} without a known price"
        return (
            f"about {in_usd(self.so_far_usd)}{'' if self.is_over else ' so far'} "
            f"({', '.join((*rate, *self.origins))}){left_out if self.unknown else ''}"
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return the cost as a JSON object; None if no price is known."""
        if self.unknown == self.jobs:
            return None
        return {
            "so_far_usd": round(self.so_far_usd, 6),
            "usd_per_hour": self.usd_per_hour,
            "origin": "; ".join(self.origins),
            "is_simulated": self.simulated > 0,
            "jobs_without_price": self.unknown,
        }


class SpendingWatch:
    """Adds up the cost of jobs. An ended job is read only once."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board
        self._ended: dict[str, tuple[Cost, float] | None] = {}

    def read(self, jobs: Sequence[tuple[JobRef, JobStanding]]) -> Spending:
        """Return the cost of these jobs. The standings of running jobs must have `started_at`,
        which `JobBoard.add_starts` sets."""
        amounts = at_once(self._read_job, jobs, self._board.store.calls_at_once)
        costs = [(job[1], *amount) for job, amount in zip(jobs, amounts, strict=True) if amount]
        paid = [cost for cost in costs if not cost[1].is_simulated]
        return Spending(
            sum(so_far_usd for _, _, so_far_usd in paid),
            sum(
                cost.usd_per_hour
                for standing, cost, _ in paid
                if standing.ended_at is None and standing.started_at is not None
            ),
            tuple(dict.fromkeys(cost.origin for _, cost, _ in paid)),
            len(costs) - len(paid),
            len(jobs) - len(costs),
            len(jobs),
            all(standing.ended_at is not None for _, standing in jobs),
        )

    def _read_job(self, job: tuple[JobRef, JobStanding]) -> tuple[Cost, float] | None:
        ref, standing = job
        if ref.job_id in self._ended:
            return self._ended[ref.job_id]
        outcome = self._board.verdict(ref) if standing.ended_at is not None else None
        cost = self._board.cost(ref, self._board.gang(ref, outcome))
        if standing.ended_at is not None:
            self._ended[ref.job_id] = cost
        return cost
