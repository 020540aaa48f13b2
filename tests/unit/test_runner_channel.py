"""The conversation of agent and worker, also where somebody else of the process meddles with its
descriptor."""

from __future__ import annotations

import os
import socket

import pytest

from kinetic._host.channel import Channel


@pytest.fixture
def ends():
    channels = [Channel(each) for each in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    for message in ({"a": 1}, {"b": "x\ny"}, {"c": "€"}):
        assert here.send(message)
    assert [there.receive() for _ in range(3)] == [{"a": 1}, {"b": "x\ny"}, {"c": "€"}]


def test_nothing_is_waited_for_where_there_is_nothing(ends):
    here, there = ends
    assert there.available() == ([], True)
    here.send({"a": 1})
    here.send({"b": 2})
    assert there.available() == ([{"a": 1}, {"b": 2}], True)


def test_an_end_that_a_fork_holds_open_is_no_reason_to_wait(ends):
    here, there = ends
    held = os.dup(here.fileno())
    here.send({"a": 1})
    here.close()
    assert there.available() == ([{"a": 1}], True)
    assert there.available() == ([], True)
    os.close(held)
    assert there.available() == ([], False)
    assert there.receive() is None
    assert not there.send({"c": 3})


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff\xfe", b"[1]\n7\n", b'{"half": ', b"\n\n"])
def test_what_others_write_into_it_is_passed_over(ends, garbage):
    here, there = ends
    os.write(here.fileno(), garbage)
    here.send({"a": 1})
    assert there.receive() == {"a": 1}
