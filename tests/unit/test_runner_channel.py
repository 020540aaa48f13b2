"""Messages between agent and worker arrive whole, even if the user's code writes to their pipe."""

from __future__ import annotations

import os
import socket

import pytest

from kinetic._host.channel import Channel


@pytest.fixture
def ends():
    channels = [Channel(end) for end in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order(ends):
    agent_end, worker_end = ends
    for message in ({"a": 1}, {"b": "x\ny"}, {"c": "€"}):
        assert agent_end.send(message)
    assert [worker_end.receive() for _ in range(3)] == [{"a": 1}, {"b": "x\ny"}, {"c": "€"}]


def test_nothing_is_waited_for_where_there_is_nothing(ends):
    agent_end, worker_end = ends
    assert worker_end.available() == ([], True)
    agent_end.send({"a": 1})
    agent_end.send({"b": 2})
    assert worker_end.available() == ([{"a": 1}, {"b": 2}], True)


def test_an_end_that_a_fork_holds_open_is_no_reason_to_wait(ends):
    agent_end, worker_end = ends
    held = os.dup(agent_end.fileno())
    agent_end.send({"a": 1})
    agent_end.close()
    assert worker_end.available() == ([{"a": 1}], True)
    assert worker_end.available() == ([], True)
    os.close(held)
    assert worker_end.available() == ([], False)
    assert worker_end.receive() is None
    assert not worker_end.send({"c": 3})


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff\xfe", b"[1]\n7\n", b'{"half": ', b"\n\n"])
def test_what_others_write_into_it_is_passed_over(ends, garbage):
    agent_end, worker_end = ends
    os.write(agent_end.fileno(), garbage)
    agent_end.send({"a": 1})
    assert worker_end.receive() == {"a": 1}
