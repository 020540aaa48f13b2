"""Which connections of a process are shut for those who wait for them.

In: connections to this machine. Out: readers that are told of the end, and some that are not.
"""

from __future__ import annotations

import os
import socket
import threading

import pytest

from kinetic._system import sockets

ELSEWHERE = ("127.0.0.1", "127.0.0.2")
"""Addresses of this machine: a connection between two looks like one that leaves it."""


@pytest.fixture
def connect():
    made = []

    def connect(from_, to):
        listener = socket.create_server((to, 0))
        ours = socket.create_connection(listener.getsockname(), source_address=(from_, 0))
        theirs, _ = listener.accept()
        made.extend((listener, ours, theirs))
        return ours, theirs

    yield connect
    for each in made:
        each.close()


def in_child(act):
    """Run it in a fork, which has copies of all connections; return what it returns."""
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write_end, str(act()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with open(read_end) as answer:
        return answer.read()


def test_who_reads_from_this_machine_is_told_of_the_end(connect):
    ours, theirs = connect("127.0.0.1", "127.0.0.1")
    got = []
    reader = threading.Thread(target=lambda: got.append(ours.recv(1)))
    reader.start()
    assert int(in_child(lambda: sockets.shut_between(set()))) >= 2
    reader.join()
    assert got == [b""]
    assert ours.fileno() >= 0
    assert theirs.recv(1) == b""


def test_connections_to_others_stay_unless_they_are_named(connect):
    ours, theirs = connect(*ELSEWHERE)
    in_child(lambda: sockets.shut_between(set()))
    theirs.sendall(b"x")
    assert ours.recv(1) == b"x"
    in_child(lambda: sockets.shut_between({"127.0.0.2"}))
    assert ours.recv(1) == b""


def test_other_sockets_stay(connect):
    one, other = socket.socketpair()
    with one, other, socket.create_server(("127.0.0.1", 0)) as listener:
        assert in_child(lambda: sockets.shut_between(set())) == "0"
        other.sendall(b"x")
        assert one.recv(1) == b"x"
        assert listener.fileno() >= 0


def test_what_is_no_socket_is_left_alone(tmp_path):
    def descriptors_after(times):
        for _ in range(times):
            sockets.shut_between(set())
        return len(os.listdir("/proc/self/fd"))

    with open(tmp_path / "file", "w"):
        once, often = (int(in_child(lambda n=n: descriptors_after(n))) for n in (0, 3))
    assert once == often
