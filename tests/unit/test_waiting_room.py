"""The waiting room: hosts that have started wait in it until the leader assigns them a place in an
attempt, or dismisses them."""

from __future__ import annotations

import asyncio

from kinetic._core.gang.messages import HostAssignment
from kinetic._rpc import waiting_room
from kinetic._rpc.waiting_room import WaitingRoom

PLACE = HostAssignment(2, 1, (0, 2), 5)


class EventRecorder:
    """A listener that records, in order, hosts that enter, restart, leave and are dismissed."""

    def __init__(self):
        self.events = []

    def on_enter(self, index):
        self.events.append(("enter", index))

    def on_start(self, index):
        self.events.append(("start", index))

    def on_leave(self, index):
        self.events.append(("leave", index))

    def on_dismissed(self, index):
        self.events.append(("told", index))


async def started(*waiting):
    """Start a task for each coroutine that waits; return the tasks."""
    tasks = [asyncio.create_task(coroutine) for coroutine in waiting]
    await asyncio.sleep(0)
    return tasks


def test_waiting_hosts_get_their_places_and_unplaced_ones_keep_waiting():
    async def story():
        recorder = EventRecorder()
        room = WaitingRoom(recorder)
        tasks = await started(room.ask(0, 1))
        assert not room.is_complete([0, 1])
        tasks += await started(room.ask(1, 1), room.ask(2, 1))
        assert room.is_complete([0, 1])
        room.assign({0: PLACE, 1: PLACE})
        assert await asyncio.gather(*tasks[:2]) == [PLACE, PLACE]
        assert (room.waits(0), room.waits(2)) == (False, True)
        room.close()
        assert await tasks[2] is None
        assert await room.ask(0, 1) is None, "nothing follows any more"
        entered = [("enter", index) for index in range(3)]
        assert recorder.events == [*entered, ("told", 2), ("enter", 0), ("told", 0)]

    asyncio.run(story())


def test_a_host_that_asks_after_the_assignment_gets_its_place():
    async def story():
        room = WaitingRoom(EventRecorder())
        room.assign({3: PLACE})
        assert await room.ask(3, 1) == PLACE
        assert not room.waits(3)

    asyncio.run(story())


def test_a_host_that_was_started_again_takes_the_place_of_the_one_before():
    async def story():
        room = WaitingRoom(EventRecorder())
        (old,) = await started(room.ask(0, 1))
        room.expect_next(0)
        assert not room.waits(0)
        room.assign({0: PLACE})
        assert await old is None
        assert await room.ask(0, 1) is None
        assert await room.ask(0, 2) == PLACE

    asyncio.run(story())


def test_a_host_that_has_waited_long_is_told_to_ask_again(monkeypatch):
    monkeypatch.setattr(waiting_room, "PATIENCE_S", 0.0)

    async def story():
        room = WaitingRoom(EventRecorder())
        second_answer = await room.ask(0, 1)
        assert second_answer is not None
        assert second_answer.is_postponed
        assert room.waits(0)

    asyncio.run(story())


def test_places_that_were_not_asked_for_in_time_count_no_more():
    async def story():
        room = WaitingRoom(EventRecorder())
        room.assign({0: PLACE})
        room.assign({})
        (asking,) = await started(room.ask(0, 1))
        assert room.waits(0)
        asking.cancel()

    asyncio.run(story())


# -- hosts that announce their starts --------------------------------------------------------------


def test_a_start_that_was_never_heard_of_takes_the_place_of_the_one_before():
    async def story():
        recorder = EventRecorder()
        room = WaitingRoom(recorder, announced=True)
        (first,) = await started(room.ask(0, 700))
        (second,) = await started(room.ask(0, 30))
        assert recorder.events == [("enter", 0), ("start", 0), ("enter", 0)]
        room.assign({0: PLACE})
        assert (await first, await second) == (None, PLACE)
        assert await room.ask(0, 700) is None, "one that comes back late counts no more"

    asyncio.run(story())


def test_a_host_that_was_started_again_before_it_took_its_place_is_given_it():
    async def story():
        room = WaitingRoom(EventRecorder(), announced=True)
        room.assign({0: PLACE})
        assert await room.ask(0, 5) == PLACE
        room.reassign(0, PLACE)
        assert await room.ask(0, 6) == PLACE

    asyncio.run(story())


def test_a_host_that_does_not_come_back_has_left(monkeypatch):
    monkeypatch.setattr(waiting_room, "AWAY_S", 0.0)

    async def story():
        recorder = EventRecorder()
        room = WaitingRoom(recorder, announced=True, leave=True)
        (asking,) = await started(room.ask(0, 5))
        asking.cancel()
        while ("leave", 0) not in recorder.events:
            await asyncio.sleep(0)
        assert not room.waits(0)

    asyncio.run(story())


def test_a_host_that_asks_again_has_not_left(monkeypatch):
    monkeypatch.setattr(waiting_room, "AWAY_S", 0.0)

    async def story():
        recorder = EventRecorder()
        room = WaitingRoom(recorder, announced=True, leave=True)
        (asking,) = await started(room.ask(0, 5))
        asking.cancel()
        (second_answer,) = await started(room.ask(0, 5))
        for _ in range(10):
            await asyncio.sleep(0)
        assert recorder.events == [("enter", 0)]
        assert room.waits(0)
        second_answer.cancel()

    asyncio.run(story())
