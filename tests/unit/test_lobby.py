"""Where hosts of an elastic job wait: who is answered, with what, and who is not."""

from __future__ import annotations

import asyncio

from kinetic._core.gang.messages import Place
from kinetic._rpc import lobby
from kinetic._rpc.lobby import Lobby

PLACE = Place(2, 1, (0, 2), 5)


async def started(*waiting):
    """Let these begin to wait."""
    tasks = [asyncio.create_task(each) for each in waiting]
    await asyncio.sleep(0)
    return tasks


def test_those_who_wait_are_given_their_places():
    async def story():
        seen = []
        room = Lobby(lambda: seen.append(room.is_complete([0, 1])))
        tasks = await started(room.ask(0, 1), room.ask(1, 1), room.ask(2, 1))
        assert seen == [False, True, True]
        room.give({0: PLACE, 1: PLACE})
        assert await asyncio.gather(*tasks[:2]) == [PLACE, PLACE]
        assert (room.waits(0), room.waits(2)) == (False, True)
        room.close()
        assert await tasks[2] is None
        assert await room.ask(0, 1) is None, "nothing follows any more"

    asyncio.run(story())


def test_one_that_asks_between_two_calls_finds_its_place():
    async def story():
        room = Lobby()
        room.give({3: PLACE})
        assert await room.ask(3, 1) == PLACE
        assert not room.waits(3)

    asyncio.run(story())


def test_a_host_that_was_started_again_takes_the_place_of_the_one_before():
    async def story():
        room = Lobby()
        (old,) = await started(room.ask(0, 1))
        room.expect(0, 2)
        assert not room.waits(0)
        room.give({0: PLACE})
        assert await old is None
        assert await room.ask(0, 1) is None
        assert await room.ask(0, 2) == PLACE

    asyncio.run(story())


def test_one_that_has_waited_long_asks_again_and_waits_on(monkeypatch):
    monkeypatch.setattr(lobby, "PATIENCE_S", 0.0)

    async def story():
        room = Lobby()
        again = await room.ask(0, 1)
        assert again is not None
        assert again.again
        assert room.waits(0)

    asyncio.run(story())
