"""Callers' orders to kill hosts, written to the store where the leader cannot be reached."""

from __future__ import annotations

import json

import pytest
from doubles.memory_store import MemoryStore

from kinetic._backends import stored
from kinetic._core import layout
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic.errors import BackendUnavailable

JOB = "job-00c0ffee"
REF = JobRef(JOB, Place("ray"), "cpu:1", "f", "f", 0.0, "memory://")


def ask(store, pause):
    clock = iter(range(1000)).__next__
    return stored.ask_to_kill(store, REF, [1, 3], clock=clock, pause=pause)


def test_a_leader_says_which_hosts_it_has_killed():
    store = MemoryStore()
    store.put(
        layout.AttemptKeys(JOB, 1).order_answer("another"), b'{"id": "another", "hosts": [2]}'
    )

    def answer(_):
        order = find_order(store)
        assert order["hosts"] == [1, 3]
        answer = {"id": order["id"], "hosts": [3]}
        store.put(layout.AttemptKeys(JOB, 1).order_answer(order["id"]), json.dumps(answer).encode())

    assert ask(store, answer) == (3,)
    assert list(store.list("")) == [layout.AttemptKeys(JOB, 1).order_answer("another")], (
        "nothing is left"
    )


def find_order(store):
    (key,) = store.list(layout.AttemptKeys(JOB, 1).orders)
    return json.loads(store.get(key))


def test_nothing_is_killed_of_a_job_that_ends_meanwhile():
    store = MemoryStore()
    assert ask(store, lambda _: store.put(layout.JobKeys(JOB).outcome, b"{}")) == ()


def test_a_leader_that_does_not_answer_is_said():
    store = MemoryStore()
    with pytest.raises(BackendUnavailable, match="has not answered within 30 s"):
        ask(store, lambda _: None)
    assert list(store.list("")) == [], "what nobody waits for happens later"
