"""What the jobs of a batch have cost together.

In: jobs, where they stand. Out: `Spending`s. Jobs of a batch that are alike have one plan, which is
read once; of a job that can have one attempt only, its times tell what it has cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic._client.board import text
from kinetic._client.board.reader import JobBoard
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStanding
from kinetic._store.many import at_once

if TYPE_CHECKING:
    from kinetic._core.plan import Cost, Plan


class Spending(NamedTuple):
    """What jobs have cost so far, in US dollars.

    Attributes:
        so_far_usd: of all of them.
        usd_per_hour: of those that run.
        origins: where the prices are from, each once.
        simulated: how many jobs are simulated, and cost nothing.
        unknown: of how many jobs no price is known.
        jobs: how many there are.
        is_over: whether none of them runs or waits.
    """

    so_far_usd: float
    usd_per_hour: float
    origins: tuple[str, ...]
    simulated: int
    unknown: int
    jobs: int
    is_over: bool

    def describe(self) -> str:
        """Return it for people: "about $12.40 so far ($86.40 an hour, list price, us-east5)"; "" if
        no price is known."""
        from kinetic._core.accelerators.prices import in_usd

        if self.simulated and self.simulated + self.unknown == self.jobs:
            return "nothing: its jobs are simulated"
        if self.unknown == self.jobs:
            return ""
        rate = () if self.is_over else (f"{in_usd(self.usd_per_hour)} an hour now",)
        left_out = f"; not counted: {text.count(self.unknown, 'job')} without a known price"
        return (
            f"about {in_usd(self.so_far_usd)}{'' if self.is_over else ' so far'} "
            f"({', '.join((*rate, *self.origins))}){left_out if self.unknown else ''}"
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return it as a JSON object; None if no price is known."""
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
    """Adds up what jobs cost, again and again. What has ended is looked at once.

    Args:
        board: of their store.
        calls_at_once: that the store takes.
        now: seconds since the epoch.
    """

    def __init__(self, board: JobBoard, calls_at_once: int, now: Callable[[], float]) -> None:
        self._board = board
        self._calls_at_once = calls_at_once
        self._now = now
        self._plans: dict[tuple[object, ...], Plan | None] = {}
        self._ended: dict[str, float] = {}

    def look(self, jobs: Sequence[tuple[JobRef, JobStanding]]) -> Spending:
        """Return what these jobs have cost; of those that run, `started_at` has to be known."""
        self._read_plans([ref for ref, _ in jobs])
        costs = [cost for ref, _ in jobs if (cost := self._cost_of(ref)) is not None]
        amounts = at_once(lambda job: self._amount_of(*job), jobs, self._calls_at_once)
        rates = [
            cost.usd_per_hour
            for ref, standing in jobs
            if standing.ended_at is None
            and standing.started_at is not None
            and (cost := self._cost_of(ref)) is not None
            and not cost.is_simulated
        ]
        return Spending(
            sum(amounts),
            sum(rates),
            tuple(dict.fromkeys(cost.origin for cost in costs if not cost.is_simulated)),
            sum(cost.is_simulated for cost in costs),
            len(jobs) - len(costs),
            len(jobs),
            all(standing.ended_at is not None for _, standing in jobs),
        )

    def _read_plans(self, refs: Sequence[JobRef]) -> None:
        new = {key: ref for ref in refs if (key := _kind_of(ref)) not in self._plans}
        plans = at_once(self._board.plan, [*new.values()], self._calls_at_once)
        self._plans |= zip(new, plans, strict=True)

    def _cost_of(self, ref: JobRef) -> Cost | None:
        plan = self._plans[_kind_of(ref)]
        return None if plan is None else plan.cost

    def _amount_of(self, ref: JobRef, standing: JobStanding) -> float:
        plan = self._plans[_kind_of(ref)]
        if plan is None or plan.cost is None or plan.cost.is_simulated:
            return 0.0
        if ref.job_id in self._ended:
            return self._ended[ref.job_id]
        until = standing.ended_at or self._now()
        if plan.most_attempts == 1:
            paid_s = max(until - (standing.started_at or until), 0.0)
        else:
            paid_s = self._board.gang(ref).paid_s(plan.options.most_slices, until)
        amount = plan.cost.for_seconds(paid_s)
        if standing.ended_at is not None:
            self._ended[ref.job_id] = amount
        return amount


def _kind_of(ref: JobRef) -> tuple[object, ...]:
    """Jobs of which this is equal have the same plan, but for their inputs."""
    own = None if ref.group_id else ref.job_id
    return own, ref.group_id, ref.func_name, ref.accelerator, ref.hosts, ref.place
