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
CUT_OFF_S = 1.5
"""A host whose question was cut off may take so long to ask again."""


class Listener(Protocol):
    """Who is told what happens in a waiting room."""

    def on_enter(self, seat: int) -> None:
        """A host waits."""
        ...

    def on_start(self, seat: int) -> None:
        """A host was started again, which its leader did not do."""
        ...

    def on_leave(self, seat: int) -> None:
        """A host that waited is not there any more."""
        ...

    def on_told(self, seat: int) -> None:
        """A host was told that nothing follows."""
        ...


class WaitingRoom:
    """Who waits, and who was given which place.

    A host is known by its seat, which stays the same in all attempts, and by the number of its
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
        self._kept: set[int] = set()
        self._places: dict[int, HostAssignment] = {}
        self._changed = asyncio.Event()
        self._over = False

    def expect_next(self, seat: int) -> None:
        """From now on only the next start of the host counts."""
        self._starts[seat] = self.start_of(seat) + 1
        self._waiting.discard(seat)
        self._places.pop(seat, None)

    def start_of(self, seat: int) -> int:
        """Return the start of the host that counts."""
        return self._starts.get(seat, 1)

    def is_complete(self, seats: Collection[int]) -> bool:
        """Whether all of these wait."""
        return self._waiting.issuperset(seats)

    def count_kept(self, seats: Collection[int]) -> int:
        """How many of these wait with the worker that they had."""
        return len(self._kept.intersection(seats))

    def waits(self, seat: int) -> bool:
        """Whether this host waits."""
        return seat in self._waiting

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Answer these hosts; places that were given before, and not asked for, count no more."""
        self._places = dict(places)
        self._waiting -= places.keys()
        self._wake()

    def give_again(self, seat: int, place: HostAssignment) -> None:
        """Answer a host that was started again before it took its place."""
        self._places[seat] = place

    def close(self) -> None:
        """Answer all that nothing follows."""
        self._over = True
        self._wake()

    async def ask(self, seat: int, start: int, *, kept: bool = False) -> HostAssignment | None:
        """Wait for a place; return one that says to ask again after a while, None when nothing
        follows. `kept`: the host has the worker of its last attempt."""
        if self._announced:
            self._announce(seat, start)
        if not self._counts(seat, start):
            return None
        self._asking[seat] += 1
        absent_s = CUT_OFF_S
        try:
            place = await self._wait(seat, start, kept=kept)
            absent_s = PATIENCE_S
        finally:  # Also when the connection breaks, which cancels this.
            self._asking[seat] -= 1
            if self._leave and seat in self._waiting:
                self._look_later(seat, start, absent_s / 2, looks=2)
        if place is None and self._counts(seat, start):
            self._listener.on_told(seat)
        return place

    async def _wait(self, seat: int, start: int, *, kept: bool) -> HostAssignment | None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PATIENCE_S
        (self._kept.add if kept else self._kept.discard)(seat)
        self._enter(seat)
        while self._counts(seat, start):
            if (place := self._places.pop(seat, None)) is not None:
                return place
            if self._over:
                return None
            if loop.time() >= due:
                return HostAssignment(again=True)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), max(due - loop.time(), 0.0))
            except TimeoutError:
                continue
        return None

    def _counts(self, seat: int, start: int) -> bool:
        return start == self.start_of(seat)

    def _announce(self, seat: int, start: int) -> None:
        before = self._starts.get(seat)
        if start == before or start in self._past[seat]:
            return
        self._starts[seat] = start
        if before is not None:
            self._past[seat].add(before)
            self._waiting.discard(seat)
            self._listener.on_start(seat)

    def _enter(self, seat: int) -> None:
        if seat not in self._waiting and seat not in self._places:
            self._waiting.add(seat)
            self._listener.on_enter(seat)

    def _look_later(self, seat: int, start: int, delay_s: float, *, looks: int) -> None:
        """See whether the host has come back. Two looks, because the first one may come too early:
        after a pause of this process, before what hosts have sent was read."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._look, seat, start, delay_s, looks - 1)

    def _look(self, seat: int, start: int, delay_s: float, looks: int) -> None:
        if self._asking[seat] or seat not in self._waiting or not self._counts(seat, start):
            return
        if looks:
            self._look_later(seat, start, delay_s, looks=looks)
            return
        self._waiting.discard(seat)
        self._listener.on_leave(seat)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
