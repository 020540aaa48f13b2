"""The bells of sessions: what they tell, and what happens when they are lost or refused."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import socket
import threading
import time
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import FakeBackend, put_ref, ref

from kinetic._backends import bell
from kinetic._backends.bell import Bell, PipeBell, PortBell, open_bell
from kinetic._core import layout
from kinetic._host.leader_runtime import LeaderRuntime
from kinetic._store.local import LocalStore
from kinetic._system import pipes
from kinetic._system.connection import SocketConnection
from kinetic.errors import NotFound, PreflightError

SESSION = replace(ref(), session_name="dev")
ANSWER, PATIENCE_S = b"\n", 100


def wait_until(is_so, what):
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.002)


class Leader:
    """The leader's end of each connection that a bell opens."""

    def __init__(self):
        self.now = 1000.0
        self.opened = queue.SimpleQueue()
        self.fault = None
        self.bell = PortBell(lambda: SESSION, self.connect, clock=lambda: self.now)
        self.sockets = []

    def connect(self, session):
        assert session is SESSION
        if self.fault is not None:
            raise self.fault
        near, far = socket.socketpair()
        far.settimeout(PATIENCE_S)
        self.sockets.append(far)
        self.opened.put(far)
        return SocketConnection(near)

    def accept(self):
        """Return the leader's end of a new connection, after the first ring was answered."""
        far = self.opened.get(timeout=PATIENCE_S)
        assert far.recv(100)
        far.sendall(ANSWER)
        wait_until(lambda: self.bell._unanswered_since is None, "the answer was not read")
        return far


@pytest.fixture
def leader():
    made = Leader()
    yield made
    for far in made.sockets:
        far.close()
    wait_until(
        lambda: all(thread.name != "kinetic-bell" for thread in threading.enumerate()),
        "the bell's thread has not ended",
    )


def is_readable(fd, timeout_s=0):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def test_the_end_of_a_call_is_told_to_those_who_watch_it(leader):
    """The first ring opens the connection. Watchers of the call that ends are woken, also those
    that come after its end; watchers of another call are not."""
    assert leader.bell.ending_fd("job-1") is None
    leader.bell.ring()
    far = leader.accept()
    first, second, other = (leader.bell.ending_fd(job) for job in ("job-1", "job-1", "job-2"))
    far.sendall(b"job-")
    far.sendall(b"1\n")
    assert is_readable(first, PATIENCE_S)
    assert is_readable(second, PATIENCE_S)
    assert not is_readable(other)
    late = leader.bell.ending_fd("job-1")
    assert is_readable(late)
    leader.bell.ring()
    assert far.recv(100)
    assert leader.opened.empty()
    for fd in (first, second, other, late):
        os.close(fd)


def test_a_lost_connection_wakes_all_and_is_opened_again_at_the_next_ring(leader):
    """Nobody waits for a connection that is gone: watchers poll the store. The next call has a
    new connection."""
    leader.bell.ring()
    far = leader.accept()
    fd = leader.bell.ending_fd("job-1")
    far.close()
    assert is_readable(fd, PATIENCE_S)
    os.close(fd)
    wait_until(lambda: leader.bell.ending_fd("job-1") is None, "the connection is in use")
    leader.bell.ring()
    leader.accept().sendall(b"job-2\n")


def test_a_connection_without_an_answer_is_replaced_at_the_next_ring(leader):
    """The laptop slept: what is written to the connection arrives nowhere, and no error comes."""
    leader.bell.ring()
    silent = leader.accept()
    leader.bell.ring()
    assert silent.recv(100)
    leader.bell.ring()  # Its answer may still come.
    assert leader.opened.empty()
    fd = leader.bell.ending_fd("job-1")
    leader.now += 3600
    leader.bell.ring()
    leader.accept()
    assert is_readable(fd, PATIENCE_S)
    os.close(fd)


def test_a_refused_port_forward_is_reported_once(leader, caplog):
    """Without the right, the message names it, once. After a minute, the right may be there."""
    leader.fault = PreflightError("You (eve) may not create pods/portforward.")
    for _ in range(3):
        leader.bell.ring()
        wait_until(lambda: not leader.bell._is_opening, "the bell still opens a connection")
        assert leader.bell.ending_fd("job-1") is None
        leader.now += 61
    leader.bell.ring()
    wait_until(lambda: not leader.bell._is_opening, "the bell still opens a connection")
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= 30]
    assert "calls on the session dev go through the store" in message
    assert "may not create pods/portforward" in message
    leader.fault = None
    leader.bell.ring()
    assert leader.opened.empty()
    leader.now += 61
    leader.bell.ring()
    leader.accept()


def test_a_leader_that_does_not_run_yet_is_no_fault(leader, caplog):
    """The first call may come before the session's pods: nothing is printed, and the next call
    tries again at once."""
    for fault in (NotFound("bell.json"), ConnectionRefusedError("no pod"), KeyError("port")):
        leader.fault = fault
        leader.bell.ring()
        wait_until(lambda: not leader.bell._is_opening, "the bell still opens a connection")
    leader.fault = None
    leader.bell.ring()
    leader.accept()
    assert not [record for record in caplog.records if record.levelno >= 30]


def test_each_backend_has_its_bell(tmp_path, monkeypatch):
    """On this machine, a pipe; on Kubernetes, one port-forward for all calls of a process; on Ray,
    whose leader cannot be reached, none."""
    local, distant = LocalStore(tmp_path), MemoryStore()

    class Reachable(FakeBackend):
        def connect(self, ref, host, port):
            raise AssertionError

    holder = Reachable(distant)
    pipe = open_bell(local, "job-1", Reachable(local))
    assert isinstance(pipe, PipeBell)
    (tmp_path / layout.JobKeys("job-1").bell).parent.mkdir(parents=True)
    fd = pipes.listen(tmp_path / layout.JobKeys("job-1").bell)
    pipe.ring()
    assert is_readable(fd)
    os.close(fd)
    port = open_bell(distant, "job-1", holder)
    assert isinstance(port, PortBell)
    assert open_bell(distant, "job-1", holder) is port
    assert open_bell(distant, "job-2", holder) is not port
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert open_bell(distant, "job-1", holder) is not port
    no_bell = open_bell(distant, "job-1", FakeBackend(distant))
    assert type(no_bell) is Bell
    no_bell.ring()
    assert no_bell.ending_fd("job-1") is None


def test_a_leader_in_a_pod_is_woken_and_tells_of_the_end():
    """The leader stores its port. A ring ends its pause and is answered, and connected callers
    hear of the end of a call, until the leader closes the connections."""
    store, rung, pauses = MemoryStore(), threading.Event(), queue.SimpleQueue()
    put_ref(store, SESSION)

    class Reachable(FakeBackend):
        def connect(self, ref, host, port):
            assert (ref.job_id, host) == (SESSION.job_id, None)
            return SocketConnection(socket.create_connection(("127.0.0.1", port)))

    class Coordinator:
        async def stop(self):
            pass

    async def lead():
        runtime = LeaderRuntime(store, SESSION.job_id, Coordinator())
        await runtime.listen_on_port(SESSION.job_id)
        rung.set()
        await runtime.pause(None)
        pauses.put("the ring has ended the pause")
        while not runtime._callers:
            await asyncio.sleep(0.01)
        watched.wait(PATIENCE_S)
        runtime.tell_callers("job-1")
        await runtime.close()

    watched = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(lead()))
    thread.start()
    assert rung.wait(PATIENCE_S)
    assert json.loads(store.get(layout.JobKeys(SESSION.job_id).bell_port))["port"] > 0
    opened = open_bell(store, SESSION.job_id, Reachable(store))
    opened.ring()
    assert pauses.get(timeout=PATIENCE_S)
    wait_until(lambda: opened._line is not None, "no connection")
    fd, other = (opened.ending_fd(job) for job in ("job-1", "job-2"))
    watched.set()
    for descriptor in (fd, other):  # The second one when the leader ends.
        assert is_readable(descriptor, PATIENCE_S)
        os.close(descriptor)
    thread.join(PATIENCE_S)
    wait_until(lambda: opened._line is None, "the connection is in use")
    bell._shared.clear()
