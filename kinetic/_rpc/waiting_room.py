"""The hosts that have no part in an attempt yet, and wait for their assignment in the next one.

All calls must come from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Protocol

from kinetic._core.gang.messages import HostAssignment

PATIENCE_S = 10.0
"""Seconds of waiting after which a host must repeat its request."""
AWAY_S = 10.0
"""Seconds in which a host must repeat a request that was answered or cut off."""


class Listener(Protocol):
    """Gets the events of a waiting room."""

    def on_enter(self, index: int) -> None:
        """Handle a host that begins to wait."""
        ...

    def on_start(self, index: int) -> None:
        """Handle a restart of a host that the leader did not cause."""
        ...

    def on_leave(self, index: int) -> None:
        """Handle a host that has stopped waiting without an answer."""
        ...

    def on_dismissed(self, index: int) -> None:
        """Handle a host that has received the answer that no attempt follows."""
        ...


class WaitingRoom:
    """The hosts that wait, and their assignments.

    A host has an index, the same in all attempts, and a number for each start of its agent.
    Requests of earlier starts are ignored. If the leader starts the hosts, it counts the starts
    (`expect_next`). Otherwise (`announced`) a new number means that the host was restarted.
    """

    def __init__(self, listener: Listener, *, announced: bool = False, leave: bool = False) -> None:
        """Make an empty room. With `leave`, a host counts as lost if its connection breaks and it
        does not ask again, because nothing else may notice its loss."""
        self._listener = listener
        self._announced = announced
        self._leave = leave
        self._starts: dict[int, int] = {}
        self._past: defaultdict[int, set[int]] = defaultdict(set)
        self._asking: Counter[int] = Counter()
        self._waiting: dict[int, int] = {}
        """Hosts that wait, each with the number of the JAX world that it keeps; 0 for none."""
        self._assignments: dict[int, HostAssignment] = {}
        self._changed = asyncio.Event()
        self._over = False

    def expect_next(self, index: int) -> None:
        """Ignore requests of the host's current start: the leader is restarting the host."""
        self._starts[index] = self.start_of(index) + 1
        self._waiting.pop(index, None)
        self._assignments.pop(index, None)

    def start_of(self, index: int) -> int:
        """Return the number of the host's start that counts."""
        return self._starts.get(index, 1)

    def is_complete(self, indices: Collection[int]) -> bool:
        """True if all of these hosts wait."""
        return self._waiting.keys() >= {*indices}

    def waits(self, index: int) -> bool:
        """True if the host waits."""
        return index in self._waiting

    def find_common_world(self, indices: Collection[int]) -> int:
        """Return the number of the JAX world that all of these hosts keep; 0 if there is none."""
        worlds = {self._waiting.get(index, 0) for index in indices}
        return worlds.pop() if len(worlds) == 1 else 0

    def assign(self, assignments: Mapping[int, HostAssignment]) -> None:
        """Give these hosts their assignments; drop earlier ones that no host has fetched."""
        self._assignments = dict(assignments)
        for index in assignments:
            self._waiting.pop(index, None)
        self._wake()

    def reassign(self, index: int, assignment: HostAssignment) -> None:
        """Give an assignment to a host that was restarted before it fetched the previous one."""
        self._assignments[index] = assignment

    def close(self) -> None:
        """Tell all waiting hosts that no attempt follows."""
        self._over = True
        self._wake()

    async def ask(self, index: int, start: int, world: int = 0) -> HostAssignment | None:
        """Wait for a host's assignment. After `PATIENCE_S`, return a postponed one: the host must
        ask again. Return None if no attempt follows."""
        if self._announced:
            self._announce(index, start)
        if not self._counts(index, start):
            return None
        self._asking[index] += 1
        try:
            assignment = await self._wait(index, start, world)
        finally:  # A broken connection cancels this task.
            self._asking[index] -= 1
            if self._leave:
                self._check_presence(index, start)
        if assignment is None and self._counts(index, start):
            self._listener.on_dismissed(index)
        return assignment

    async def _wait(self, index: int, start: int, world: int) -> HostAssignment | None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PATIENCE_S
        if index not in self._waiting and index not in self._assignments:
            self._waiting[index] = world
            self._listener.on_enter(index)
        while self._counts(index, start):
            if (assignment := self._assignments.pop(index, None)) is not None:
                return assignment
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
            self._waiting.pop(index, None)
            self._listener.on_start(index)

    def _check_presence(self, index: int, start: int, repeats: int = 2) -> None:
        """Count a host as lost if it has not asked again after `AWAY_S`. Check several times:
        after a pause of this process, the first check may run before requests are read."""
        if self._asking[index] or index not in self._waiting or not self._counts(index, start):
            return
        if repeats:
            loop = asyncio.get_running_loop()
            loop.call_later(AWAY_S / 2, self._check_presence, index, start, repeats - 1)
            return
        self._waiting.pop(index, None)
        self._listener.on_leave(index)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
