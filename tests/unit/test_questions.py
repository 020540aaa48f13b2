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
from kinetic._host import desk
from kinetic.errors import StoreError

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


def give(store, **order):
    store.put(layout.AttemptKeys(JOB, 1).order(order["id"]), json.dumps(order).encode())


def answer_to(order, told, *, hosts, slices=()):
    store, gang = MemoryStore(), SimpleNamespace(spec=GangSpec(hosts, slices=slices))
    give(store, id="order", **order)
    asked = store, JOB, None, told

    async def ask():
        answering = asyncio.create_task(desk.answer_questions(*asked, gang=lambda: gang, far_s=0.0))
        while not store.has(layout.AttemptKeys(JOB, 1).order_answer("order")):
            assert not answering.done(), answering
            await asyncio.sleep(0)
        answering.cancel()

    asyncio.run(ask())
    return json.loads(store.get(layout.AttemptKeys(JOB, 1).order_answer("order")))["refused"]


@pytest.mark.parametrize(
    ("hosts", "slices", "index"),
    [(4, (), 3), (4, (0, 1), 3), (4, (0, 2), 5), (4, (3,), 15), (8, (1, 2), 7)],
)
def test_a_port_is_that_of_the_host_with_this_place_in_the_attempt(hosts, slices, index):
    told = Told()
    assert answer_to({"host": 3, "port": 5678}, told, hosts=hosts, slices=slices) == ""
    assert told.told == [(index, 5678, layout.AttemptKeys(JOB, 1).tunnel("order"))]


def test_a_host_that_is_not_there_is_refused():
    told = Told()
    assert answer_to({"host": 4, "port": 5678}, told, hosts=4) == "there is no host 4"
    assert told.told == []


def answer_until(store, hosts, *answers):
    """Answer orders until these have their answers, and none is left."""
    gang = SimpleNamespace(spec=GangSpec(2))
    due = [layout.AttemptKeys(JOB, 1).order_answer(each) for each in answers]

    async def ask():
        answering = asyncio.create_task(
            desk.answer_questions(store, JOB, None, hosts, gang=lambda: gang, far_s=0.0)
        )
        while not all(map(store.has, due)) or list(store.list(layout.AttemptKeys(JOB, 1).orders)):
            await asyncio.sleep(0.01)
            assert not answering.done(), answering
        answering.cancel()

    asyncio.run(ask())
    return [json.loads(store.get(key)) for key in due]


def test_orders_that_are_damaged_are_removed_and_others_obeyed():
    store = MemoryStore()
    for name, order in enumerate(
        (b'{"id": "0"}', b'{"id": 1, "host": "x", "port": []}', b"[]", b"{")
    ):
        store.put(layout.AttemptKeys(JOB, 1).order(str(name)), order)
    give(store, id="other name", host=0, port=1)
    store.put(
        layout.AttemptKeys(JOB, 1).order("6"),
        store.get(layout.AttemptKeys(JOB, 1).order("other name")),
    )
    give(store, id="7", host=0, port=1)
    assert answer_until(store, Told(), "7") == [{"id": "7", "refused": ""}]
    assert not store.has(layout.AttemptKeys(JOB, 1).order_answer("6")), "it is another one's"


def test_orders_of_several_callers_at_once_are_all_obeyed():
    """The later one took the place of the earlier one, whose caller waited for 30 s in vain."""
    store, hosts = MemoryStore(), Told()
    give(store, id="1", host=0, port=5678)
    give(store, id="2", hosts=[1])
    give(store, id="3", host=1, port=5678)
    found = answer_until(store, hosts, "1", "2", "3")
    assert [answer.get("hosts", answer.get("refused")) for answer in found] == ["", [1], ""]
    assert [(host, port) for host, port, _ in hosts.told] == [(0, 5678), (1, 5678)]


def test_an_order_whose_answer_does_not_arrive_is_obeyed_once(monkeypatch):
    store, hosts = MemoryStore(), Told()
    put, fails = store.put, iter([True, True])

    def fail(key, data, **more):
        if "answer" in key and next(fails, False):
            raise StoreError("no")
        return put(key, data, **more)

    give(store, id="1", host=0, port=5678)
    monkeypatch.setattr(store, "put", fail)
    answer_until(store, hosts, "1")
    assert len(hosts.told) == 1


def test_a_host_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(desk, "DUMP_S", 0.1)
    found = answer_to({"host": 0, "port": 1}, Told(hangs=True), hosts=1)
    assert found == "host 0 did not answer within 0.1 s"
