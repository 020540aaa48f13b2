"""What a leader is asked in the store, by whoever does not reach it."""

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
    store.put(layout.kill_answer(JOB, 1), b'{"id": "of another request", "hosts": [2]}')

    def answer(_):
        asked = json.loads(store.get(layout.kill_wanted(JOB, 1)))
        assert asked["hosts"] == [1, 3]
        store.put(
            layout.kill_answer(JOB, 1), json.dumps({"id": asked["id"], "hosts": [3]}).encode()
        )

    assert ask(store, answer) == (3,)


def test_nothing_is_killed_of_a_job_that_ends_meanwhile():
    store = MemoryStore()
    assert ask(store, lambda _: store.put(layout.outcome(JOB), b"{}")) == ()


def test_a_leader_that_does_not_answer_is_said():
    with pytest.raises(BackendUnavailable, match="has not answered within 30 s"):
        ask(MemoryStore(), lambda _: None)
