"""Loopback connections are accepted only from processes of the same user."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from kinetic._system import peers

NOBODY = 65534


def connect_as(uid, address):
    """Connect to the address as another user, in a child process; return the child's pid. Its exit
    code is 0 if it received nothing until the connection was closed."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            with socket.create_connection(address) as connection:
                os._exit(int(connection.recv(1) != b""))
        finally:
            os._exit(2)
    return pid


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listening = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening:
        yield listening


def test_a_connection_from_the_same_user_is_accepted(listener):
    with socket.create_connection(listener.getsockname()[:2]) as near:
        far, _ = peers.accept_own_only(listener)
        with far:
            assert peers.uid_of(far) == os.geteuid()
            assert peers.uid_of(near) == os.geteuid()
            assert peers.is_own(far)


@pytest.mark.starts_processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_connection_from_another_user_is_closed(listener):
    stranger = connect_as(NOBODY, listener.getsockname()[:2])
    accepted = []
    waiting = threading.Thread(target=lambda: accepted.append(peers.accept_own_only(listener)[0]))
    waiting.start()
    _, status = os.waitpid(stranger, 0)
    assert (status, accepted) == (0, [])
    with socket.create_connection(listener.getsockname()[:2]):
        waiting.join()
        accepted[0].close()


def test_a_connection_that_was_closed_at_once_is_refused(listener):
    """A closed connection is refused: the kernel reports its user as root, whoever opened it."""
    socket.create_connection(listener.getsockname()[:2]).close()
    far, _ = listener.accept()
    with far:
        assert not peers.is_own(far)
