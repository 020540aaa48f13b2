"""What a leader does when it is ordered to, in the store, by whoever does not reach it.

In: an order, a gang. Out: which host it concerns, the answer in the store.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._core.gang.messages import GangSpec
from kinetic._host import questions

JOB = "job-00c0ffee"


class Told:
    """Hosts that note what they are told."""

    takes_orders = True

    def __init__(self, *, hangs=False):
        self.told, self.hangs = [], hangs

    def kill_programs(self, indices):
        return indices

    async def open_tunnel(self, index, port, tunnel):
        self.told.append((index, port, tunnel))
        if self.hangs:
            await asyncio.sleep(1000)
        return ""


def answer_to(order, told, *, hosts, slices=()):
    store, gang = MemoryStore(), SimpleNamespace(spec=GangSpec(hosts, slices=slices))
    store.put(layout.order(JOB, 1), json.dumps({"id": "order", **order}).encode())
    asked = store, JOB, None, told

    async def ask():
        answering = asyncio.create_task(questions.answer(*asked, gang=lambda: gang, far_s=0.0))
        while not store.has(layout.order_answer(JOB, 1)):
            assert not answering.done(), answering
            await asyncio.sleep(0)
        answering.cancel()

    asyncio.run(ask())
    return json.loads(store.get(layout.order_answer(JOB, 1)))["refused"]


@pytest.mark.parametrize(
    ("hosts", "slices", "index"),
    [(4, (), 3), (4, (0, 1), 3), (4, (0, 2), 5), (4, (3,), 15), (8, (1, 2), 7)],
)
def test_a_port_is_that_of_the_host_with_this_place_in_the_attempt(hosts, slices, index):
    told = Told()
    assert answer_to({"host": 3, "port": 5678}, told, hosts=hosts, slices=slices) == ""
    assert told.told == [(index, 5678, layout.tunnel(JOB, 1, "order"))]


def test_a_host_that_is_not_there_is_refused():
    told = Told()
    assert answer_to({"host": 4, "port": 5678}, told, hosts=4) == "there is no host 4"
    assert told.told == []


def test_the_next_order_is_obeyed_after_one_that_is_damaged():
    store, gang = MemoryStore(), SimpleNamespace(spec=GangSpec(1))
    asked = store, JOB, None, Told()

    async def ask():
        answering = asyncio.create_task(questions.answer(*asked, gang=lambda: gang, far_s=0.0))
        for order in (b'{"id": "1"}', b'{"id": 2, "host": "x", "port": []}', b"[]", b"no JSON"):
            store.put(layout.order(JOB, 1), order)
            await asyncio.sleep(0.05)
        store.put(layout.order(JOB, 1), b'{"id": "3", "host": 0, "port": 1}')
        answer = layout.order_answer(JOB, 1)
        while not store.has(answer) or b'"3"' not in store.get(answer):
            await asyncio.sleep(0.01)
            assert not answering.done(), answering
        answering.cancel()

    asyncio.run(ask())


def test_a_host_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(questions, "DUMP_S", 0.1)
    found = answer_to({"host": 0, "port": 1}, Told(hangs=True), hosts=1)
    assert found == "host 0 did not answer within 0.1 s"
