"""Where the hosts of an elastic job wait for their place in the next attempt.

In: hosts that ask, places that the leader gives. Out: an answer to each. Of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from kinetic._core.gang.messages import Place

PATIENCE_S = 10.0
"""A host that has waited so long is told to ask again."""


class Lobby:
    """Who waits, and who was given which place.

    A host is known by its seat, which stays the same in all attempts, and by the number of its
    start: a host that was started again takes the place of the one before.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._starts: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._places: dict[int, Place] = {}
        self._changed = asyncio.Event()
        self._over = False

    def expect(self, seat: int, start: int) -> None:
        """From now on only this start of the host counts."""
        self._starts[seat] = start
        self._waiting.discard(seat)
        self._places.pop(seat, None)

    def is_complete(self, seats: Collection[int]) -> bool:
        """Whether all of these wait."""
        return self._waiting.issuperset(seats)

    def waits(self, seat: int) -> bool:
        """Whether this host waits."""
        return seat in self._waiting

    def give(self, places: Mapping[int, Place]) -> None:
        """Answer these hosts."""
        self._places = dict(places)
        self._waiting -= places.keys()
        self._wake()

    def close(self) -> None:
        """Answer all that nothing follows."""
        self._over = True
        self._wake()

    async def ask(self, seat: int, start: int) -> Place | None:
        """Wait for a place; return one that says to ask again after a while, None when nothing
        follows."""
        if start != self._starts.get(seat, 1):
            return None
        loop = asyncio.get_running_loop()
        due = loop.time() + PATIENCE_S
        self._enter(seat)
        while True:
            if start != self._starts.get(seat, 1):
                return None
            if (place := self._places.pop(seat, None)) is not None:
                return place
            if self._over:
                return None
            if loop.time() >= due:
                return Place(again=True)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), max(due - loop.time(), 0.0))
            except TimeoutError:
                continue

    def _enter(self, seat: int) -> None:
        if seat not in self._waiting and seat not in self._places:
            self._waiting.add(seat)
            self._on_change()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
