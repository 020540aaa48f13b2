"""Which persistent checkpoints stay. Pure but for one callback.

In: options, Orbax's policies, the damaged steps. Out: policies as Orbax asks for them; the steps
that are about to be removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Keep:
    """Which persistent checkpoints stay.

    Attributes:
        newest: so many of the newest; None for all.
        every: and those of steps that this divides.
        best: and the best ones by the metric of this name; "" for none.
        best_is: "min" or "max".
        best_count: so many of the best.
    """

    newest: int | None = 3
    every: int | None = None
    best: str = ""
    best_is: str = "min"
    best_count: int = 1


def metric_of(keep: Keep) -> Callable[[Any], float]:
    """What the best checkpoint is chosen by; one that was saved without it is the worst."""
    worst = math.inf if keep.best_is == "min" else -math.inf

    def of(metrics: Mapping[str, float] | None) -> float:
        number = float((metrics or {}).get(keep.best, worst))
        return worst if math.isnan(number) else number

    return of


def policy_of(keep: Keep, of_others: list[int], policies: Any) -> Any:
    """Return a policy for Orbax.

    Args:
        keep: which steps stay.
        of_others: steps that another program has saved, which stay as well.
        policies: Orbax's.
    """
    newest = policies.LatestN(keep.newest)
    chosen: list[Any] = [newest]
    if keep.newest is not None and of_others:
        chosen.append(policies.CustomSteps(of_others))
    if keep.newest is not None and keep.every is not None:
        chosen.append(policies.EveryNSteps(keep.every))
    if keep.newest is not None and keep.best:
        chosen.append(
            policies.BestN(
                get_metric_fn=metric_of(keep),
                reverse=keep.best_is == "min",
                n=keep.best_count,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(chosen)


class Undamaged:
    """A policy for steps that are not damaged. Those that are stay until there is a newer one."""

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
        """Decide as Orbax asks for it."""
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
