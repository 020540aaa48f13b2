"""Where hosts wait for their place in the next attempt.

In: hosts that ask, places that the leader gives. Out: an answer to each. Of one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Protocol

from kinetic._core.gang.messages import HostAssignment

PATIENCE_S = 10.0
"""A host that has waited so long is told to ask again."""
AWAY_S = 10.0
"""A host whose question was answered or cut off may take so long to ask again."""


class Listener(Protocol):
    """Who is told what happens in a waiting room."""

    def on_enter(self, index: int) -> None:
        """A host waits."""
        ...

    def on_start(self, index: int) -> None:
        """A host was started again, which its leader did not do."""
        ...

    def on_leave(self, index: int) -> None:
        """A host that waited is not there any more."""
        ...

    def on_told(self, index: int) -> None:
        """A host was told that nothing follows."""
        ...


class WaitingRoom:
    """Who waits, and who was given which place.

    A host is known by its index, which stays the same in all attempts, and by the number of its
    start: a host that was started again takes the place of the one before. Where the leader starts
    hosts, it says which start counts; elsewhere (`announced`) a number that was never heard before
    is that of a new start.
    """

    def __init__(self, listener: Listener, *, announced: bool = False, leave: bool = False) -> None:
        """`leave`: a host whose connection breaks is gone, as nobody else may see."""
        self._listener = listener
        self._announced = announced
        self._leave = leave
        self._starts: dict[int, int] = {}
        self._past: defaultdict[int, set[int]] = defaultdict(set)
        self._asking: Counter[int] = Counter()
        self._waiting: set[int] = set()
        self._places: dict[int, HostAssignment] = {}
        self._changed = asyncio.Event()
        self._over = False

    def expect_next(self, index: int) -> None:
        """From now on only the next start of the host counts."""
        self._starts[index] = self.start_of(index) + 1
        self._waiting.discard(index)
        self._places.pop(index, None)

    def start_of(self, index: int) -> int:
        """Return the start of the host that counts."""
        return self._starts.get(index, 1)

    def is_complete(self, indices: Collection[int]) -> bool:
        """Whether all of these wait."""
        return self._waiting.issuperset(indices)

    def waits(self, index: int) -> bool:
        """Whether this host waits."""
        return index in self._waiting

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Answer these hosts; places that were given before, and not asked for, count no more."""
        self._places = dict(places)
        self._waiting -= places.keys()
        self._wake()

    def give_again(self, index: int, place: HostAssignment) -> None:
        """Answer a host that was started again before it took its place."""
        self._places[index] = place

    def close(self) -> None:
        """Answer all that nothing follows."""
        self._over = True
        self._wake()

    async def ask(self, index: int, start: int) -> HostAssignment | None:
        """Wait for a place; return one that says to ask again after a while, None when nothing
        follows."""
        if self._announced:
            self._announce(index, start)
        if not self._counts(index, start):
            return None
        self._asking[index] += 1
        try:
            place = await self._wait(index, start)
        finally:  # Also when the connection breaks, which cancels this.
            self._asking[index] -= 1
            if self._leave:
                self._look(index, start)
        if place is None and self._counts(index, start):
            self._listener.on_told(index)
        return place

    async def _wait(self, index: int, start: int) -> HostAssignment | None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PATIENCE_S
        if index not in self._waiting and index not in self._places:
            self._waiting.add(index)
            self._listener.on_enter(index)
        while self._counts(index, start):
            if (place := self._places.pop(index, None)) is not None:
                return place
            if self._over:
                return None
            if loop.time() >= due:
                return HostAssignment(is_postponed=True)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), max(due - loop.time(), 0.0))
            except TimeoutError:
                continue
        return None

    def _counts(self, index: int, start: int) -> bool:
        return start == self.start_of(index)

    def _announce(self, index: int, start: int) -> None:
        before = self._starts.get(index)
        if start == before or start in self._past[index]:
            return
        self._starts[index] = start
        if before is not None:
            self._past[index].add(before)
            self._waiting.discard(index)
            self._listener.on_start(index)

    def _look(self, index: int, start: int, looks: int = 2) -> None:
        """Take a host for gone unless it comes back. The first look may be too early: after a
        pause of this process, before what hosts have sent was read."""
        if self._asking[index] or index not in self._waiting or not self._counts(index, start):
            return
        if looks:
            asyncio.get_running_loop().call_later(AWAY_S / 2, self._look, index, start, looks - 1)
            return
        self._waiting.discard(index)
        self._listener.on_leave(index)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
