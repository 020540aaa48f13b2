"""Which steps of the folder stay, where some of them are damaged. Pure but for one callback.

In: a policy of Orbax's, the damaged steps. Out: a policy; the steps that are about to be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any


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
        good = [each for each in checkpoints if each.step not in self._damaged]
        newest = max((each.step for each in good), default=-1)
        stays = self._policy.should_preserve(good, context=context)
        kept = {each.step for each, stay in zip(good, stays, strict=True) if stay}
        stays = [
            each.step in kept
            or (each.step in self._damaged and (each.step > newest or self._keeps_all))
            for each in checkpoints
        ]
        if gone := [c.step for c, stay in zip(checkpoints, stays, strict=True) if not stay]:
            self._note_removal(gone)
        return stays
