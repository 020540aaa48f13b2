"""Retention of persistent checkpoints, as preservation policies for Orbax.

Pure, except that `Undamaged` reports the steps about to be removed to a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Keep:
    """Rules for the persistent checkpoints to keep. A step stays if any rule keeps it.

    Attributes:
        newest: Number of newest steps; None for all.
        every: Steps divisible by this; None for no such rule.
        best: Name of the metric that ranks steps; "" for none.
        best_is: "min" or "max".
        best_count: Number of best steps.
    """

    newest: int | None = 3
    every: int | None = None
    best: str = ""
    best_is: str = "min"
    best_count: int = 1


def make_rank(keep: Keep) -> Callable[[Any], float]:
    """Return the function that ranks a checkpoint by its metrics. Checkpoints without the metric,
    or with NaN, rank last."""
    worst = math.inf if keep.best_is == "min" else -math.inf

    def rank(metrics: Mapping[str, float] | None) -> float:
        number = float((metrics or {}).get(keep.best, worst))
        return worst if math.isnan(number) else number

    return rank


def make_policy(keep: Keep, foreign_steps: list[int], policies: Any) -> Any:
    """Return the preservation policy for Orbax.

    Args:
        keep: The rules.
        foreign_steps: Steps saved by another program, which are always kept.
        policies: Orbax's module of checkpoint managers.
    """
    newest = policies.LatestN(keep.newest)
    chosen: list[Any] = [newest]
    if keep.newest is not None and foreign_steps:
        chosen.append(policies.CustomSteps(foreign_steps))
    if keep.newest is not None and keep.every is not None:
        chosen.append(policies.EveryNSteps(keep.every))
    if keep.newest is not None and keep.best:
        chosen.append(
            policies.BestN(
                get_metric_fn=make_rank(keep),
                reverse=keep.best_is == "min",
                n=keep.best_count,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(chosen)


class Undamaged:
    """Orbax policy that applies `policy` to undamaged steps. A damaged step is removed once a newer
    undamaged one exists, unless all steps are kept."""

    def __init__(
        self,
        policy: Any,
        keeps_all: bool,
        damaged: Collection[int],
        note_removal: Callable[[list[int]], None],
    ) -> None:
        self._policy = policy
        self._note_removal = note_removal
        self._keeps_all = keeps_all
        self._damaged = damaged

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return a flag for each checkpoint: True to keep it. Orbax calls this."""
        good = [checkpoint for checkpoint in checkpoints if checkpoint.step not in self._damaged]
        newest = max((checkpoint.step for checkpoint in good), default=-1)
        stays = self._policy.should_preserve(good, context=context)
        staying = {checkpoint.step for checkpoint, stay in zip(good, stays, strict=True) if stay}
        stays = [
            checkpoint.step in staying
            or (checkpoint.step in self._damaged and (checkpoint.step > newest or self._keeps_all))
            for checkpoint in checkpoints
        ]
        if removed := [c.step for c, stay in zip(checkpoints, stays, strict=True) if not stay]:
            self._note_removal(removed)
        return stays
