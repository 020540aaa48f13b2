"""Orders to kill hosts: a caller who cannot reach the leader writes an order to the store, and the
leader obeys and answers it there."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._core.gang.messages import GangSpec
from kinetic._host import leader_runtime
from kinetic.errors import StoreError

JOB = "job-00c0ffee"


class Hosts:
    """The hosts of a job; they record in `killed` which of them were to be killed."""

    takes_orders = True

    def __init__(self):
        self.killed = []

    def kill_programs(self, indices):
        self.killed.append([*indices])
        return indices


def give(store, **order):
    store.put(layout.AttemptKeys(JOB, 1).order(order["id"]), json.dumps(order).encode())


def answer_until(store, hosts, *answers):
    """Run the leader until it has answered the orders with these ids; return its answers."""
    gang = SimpleNamespace(spec=GangSpec(2))
    due = [layout.AttemptKeys(JOB, 1).order_answer(each) for each in answers]

    async def ask():
        answering = asyncio.create_task(
            leader_runtime.answer_questions(store, JOB, None, hosts, gang=lambda: gang, far_s=0.0)
        )
        while not all(map(store.has, due)) or list(store.list(layout.AttemptKeys(JOB, 1).orders)):
            await asyncio.sleep(0.01)
            assert not answering.done(), answering
        answering.cancel()

    asyncio.run(ask())
    return [json.loads(store.get(key)) for key in due]


def test_orders_that_are_damaged_are_removed_and_others_obeyed():
    store = MemoryStore()
    for name, order in enumerate((b'{"id": "0"}', b'{"id": "1", "hosts": 3}', b"[]", b"{")):
        store.put(layout.AttemptKeys(JOB, 1).order(str(name)), order)
    give(store, id="other name", hosts=[0])
    keys = layout.AttemptKeys(JOB, 1)
    store.put(keys.order("6"), store.get(keys.order("other name")))
    give(store, id="7", hosts=[1, 0])
    assert answer_until(store, Hosts(), "7") == [{"id": "7", "hosts": [0, 1]}]
    assert not store.has(layout.AttemptKeys(JOB, 1).order_answer("6")), "it is another one's"


def test_orders_of_several_callers_at_once_are_all_obeyed():
    """Three callers write orders at once: the leader obeys and answers each, and loses none."""
    store, hosts = MemoryStore(), Hosts()
    for order in ("1", "2", "3"):
        give(store, id=order, hosts=[int(order)])
    answers = answer_until(store, hosts, "1", "2", "3")
    assert [answer["hosts"] for answer in answers] == [[1], [2], [3]]
    assert hosts.killed == [[1], [2], [3]]


def test_an_order_whose_answer_does_not_arrive_is_obeyed_once(monkeypatch):
    store, hosts = MemoryStore(), Hosts()
    put, fails = store.put, iter([True, True])

    def fail(key, data, **more):
        if "answer" in key and next(fails, False):
            raise StoreError("no")
        return put(key, data, **more)

    give(store, id="1", hosts=[0])
    monkeypatch.setattr(store, "put", fail)
    answer_until(store, hosts, "1")
    assert hosts.killed == [[0]]
