"""What the leader of an elastic job makes of hosts that ask for a place, and of those gone since.

In: a leader over agents that are no processes. Out: which slices it counts on.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from manifest_cases import planned

from kinetic._core.events import EventKind, GangEvent
from kinetic._core.gang.elastic import Loss, Standing
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.place import Place
from kinetic._host.elastic_leader import JOIN_S, ElasticLeader
from kinetic._host.leader import Attempt
from kinetic._store.memory import MemoryStore


class FakeAgents:
    """Remembers what became of the agents of two slices of one host."""

    def __init__(self):
        self.pids = {100: 0, 101: 1}
        self.started = []

    def end(self, seats):
        self.pids = {pid: seat for pid, seat in self.pids.items() if seat not in seats}

    def serve_world(self, processes):
        return ""

    def fork_again(self, seat, start):
        self.started.append((seat, start))
        self.pids[200 + start] = seat


def leading(agents):
    plan = planned("cpu:2", place=Place("local"), slices=(1, 2))
    return ElasticLeader(
        plan,
        plan.options.elastic,
        MemoryStore(),
        agents,
        heartbeat_timeout_s=10.0,
        has_records=lambda: True,
        on_ready=lambda: None,
        on_agents=lambda attempt: None,
        make_room=lambda: None,
    )


def test_what_the_agent_of_a_lost_slice_has_asked_for_counts_no_more():
    """Its worker dies; it reports, asks for its next place, and is ended with its slice."""

    async def story():
        agents = FakeAgents()
        leader = leading(agents)
        first = asyncio.create_task(leader._lobby.ask(1, 1))
        await asyncio.sleep(0)
        leader._fail(Loss((1,), "its worker was killed"))
        assert agents.pids == {100: 0}
        leader._look()
        assert leader._policy.stands(1) is Standing.AWAY
        assert await first is None
        ((seat, start),) = agents.started
        again = asyncio.create_task(leader._lobby.ask(seat, start))
        await asyncio.sleep(0)
        leader._look()
        assert leader._policy.stands(1) is Standing.THERE
        again.cancel()

    asyncio.run(story())


def test_a_host_that_was_ready_and_does_not_join_is_given_up():
    async def story():
        leader, lost = leading(FakeAgents()), []
        leader._coordinator = SimpleNamespace(
            serve_next=lambda gang: None, lost=lambda rank, why: lost.append((rank, why))
        )
        ended = Attempt(Outcome(Verdict.FAILED))
        leader._begin(ended)
        leader._on_event(GangEvent(EventKind.JOINED, 0))
        leader._miss_absent(time.monotonic() + JOIN_S / 2)
        assert lost == []
        leader._miss_absent(time.monotonic() + JOIN_S)
        leader._miss_absent(time.monotonic() + JOIN_S)
        assert lost == [(1, "It was ready, and did not join within 60 s.")]
        leader._begin(ended)
        leader._on_event(GangEvent(EventKind.READY))
        leader._miss_absent(time.monotonic() + JOIN_S)
        assert len(lost) == 1

    asyncio.run(story())


def test_a_slice_that_dies_while_it_waits_is_not_counted_on():
    async def story():
        agents = FakeAgents()
        leader = leading(agents)
        leader._fail(Loss((1,), "its worker was killed"))
        leader._look()
        ((seat, start),) = agents.started
        waiting = asyncio.create_task(leader._lobby.ask(seat, start))
        await asyncio.sleep(0)
        leader._look()
        leader._lose(1, "its agent was killed")
        assert leader._policy.stands(1) is Standing.AWAY
        leader._look()
        assert leader._policy.stands(1) is Standing.AWAY
        assert await waiting is None
        assert [failure.slices for failure in leader._policy.failures] == [(1,), (1,)]

    asyncio.run(story())
