"""What a leader is asked in the store, by whoever does not reach it; whether it is given up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore

from kinetic._backends import stored
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.tunnel import Side, StoreConnection
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
        asked = find_order(store)
        assert asked["hosts"] == [1, 3]
        told = {"id": asked["id"], "hosts": [3]}
        store.put(layout.AttemptKeys(JOB, 1).order_answer(asked["id"]), json.dumps(told).encode())

    assert ask(store, answer) == (3,)
    assert list(store.list("")) == [layout.AttemptKeys(JOB, 1).order_answer("another")], (
        "nothing is left"
    )


JOINED = [GangEvent(EventKind.JOINED, host) for host in (0, 1)]
READY, STOP = GangEvent(EventKind.READY), GangEvent(EventKind.STOP)
AGAIN = [GangEvent(EventKind.JOINED, 0, attempt=2), GangEvent(EventKind.READY, attempt=2)]


@pytest.mark.parametrize(
    ("told", "attempt", "exits", "is_so"),
    [
        ([*JOINED, READY], 1, [Exit.STOPPED, Exit.STOPPED], True),
        ([*JOINED, READY], 1, [Exit.STOPPED], False),
        ([*JOINED, READY], 1, [Exit.STOPPED, Exit.RETURNED], False),
        ([*JOINED, READY, STOP], 1, [Exit.STOPPED, Exit.STOPPED], False),  # until it goes on
        (JOINED, 1, [], False),
        ([*JOINED, READY, STOP, *AGAIN], 2, [Exit.STOPPED], True),  # on fewer slices
        ([*JOINED, READY, STOP], 2, [Exit.STOPPED], False),
    ],
)
def test_a_leader_is_given_up_that_knows_nothing_of_the_end_of_all_hosts(
    told, attempt, exits, is_so
):
    store = MemoryStore()
    lines = [json.dumps(event.to_json()) for event in told]
    store.put(layout.JobKeys(JOB).events, "\n".join(lines).encode())
    for before in range(1, attempt):
        store.put(layout.AttemptKeys(JOB, before).outcome, b"{}")
    for host, how in enumerate(exits):
        report = HostReport(host, how)
        store.put(layout.HostKeys(JOB, attempt, host).report, json.dumps(report.to_json()).encode())
    assert stored.is_given_up(store, replace(REF, hosts=2)) is is_so


def find_order(store):
    (key,) = store.list(layout.AttemptKeys(JOB, 1).orders)
    return json.loads(store.get(key))


def answer_order(store, **answer):
    asked = find_order(store)
    assert (asked["host"], asked["port"]) == (2, 5678)
    told = {"id": asked["id"], **answer}
    store.put(layout.AttemptKeys(JOB, 1).order_answer(asked["id"]), json.dumps(told).encode())
    return layout.AttemptKeys(JOB, 1).tunnel(asked["id"])


def test_a_leader_brings_a_port_to_a_tunnel():
    store, tunnels = MemoryStore(), []
    pause = lambda _: tunnels.append(answer_order(store, refused=""))  # noqa: E731
    near = stored.open_tunnel(store, REF, 2, 5678, pause=pause)
    near.write(b"hello")
    (tunnel,) = tunnels
    far = StoreConnection(store, tunnel, Side.HOST)
    assert far.read() == b"hello"
    near.finish()
    far.finish()
    assert near.read() == far.read() == b""
    near.close()
    far.close()


def test_a_port_that_cannot_be_reached_is_an_error_that_says_why():
    store = MemoryStore()
    pause = lambda _: answer_order(store, refused="Connection refused")  # noqa: E731
    with pytest.raises(ConnectionRefusedError, match=r"port 5678 of host 2 .*Connection refused"):
        stored.open_tunnel(store, REF, 2, 5678, pause=pause)
    store.put(layout.JobKeys(JOB).outcome, b"{}")
    with pytest.raises(ConnectionRefusedError, match=f"{JOB} has ended"):
        stored.open_tunnel(store, REF, 2, 5678)


def test_nothing_is_killed_of_a_job_that_ends_meanwhile():
    store = MemoryStore()
    assert ask(store, lambda _: store.put(layout.JobKeys(JOB).outcome, b"{}")) == ()


def test_a_leader_that_does_not_answer_is_said():
    store = MemoryStore()
    with pytest.raises(BackendUnavailable, match="has not answered within 30 s"):
        ask(store, lambda _: None)
    assert list(store.list("")) == [], "what nobody waits for happens later"
