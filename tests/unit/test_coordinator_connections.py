"""A gang gives up hosts that fall silent or lose their connection only when they must be dead."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import service_cases
from gang_cases import ended, gang_of, let_pass, raised
from service_cases import PATIENCE_S, Agent

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import GangPhase, Heartbeat
from kinetic._rpc.client import open_channel

opened, serve = service_cases.opened, service_cases.serve


def test_a_host_whose_connection_breaks_has_as_much_time_as_one_that_falls_silent():
    """Regression: a gang was ended 1.5 s after a connection broke, although all hosts lived."""
    gang = gang_of(3)
    now = let_pass(gang, 0.0, 1.0, beating=(0, 1, 2))
    gang.mark_disconnected(1, now)
    now = let_pass(gang, now, 9.8, beating=(0, 2))
    assert gang.phase is GangPhase.RUNNING
    let_pass(gang, now, 0.4)
    assert gang.first_failure == (1,)
    assert gang.stop_reason == "host 1 of 3: fell silent: no sign of life for 10 s"
    assert gang.reports[0].exit is Exit.AGENT_LOST


@pytest.mark.parametrize("sign", ["connected", "heartbeat"])
def test_a_host_that_is_heard_from_again_is_not_lost(sign):
    gang = gang_of(2)
    gang.mark_disconnected(1, 1.0)
    now = let_pass(gang, 1.0, 8.0, beating=(0,))
    if sign == "connected":
        gang.mark_connected(1, now)
    else:
        gang.heartbeat(Heartbeat(1), now)
    let_pass(gang, now, 9.0, beating=(0,))
    assert gang.phase is GangPhase.RUNNING


def test_a_host_that_has_said_how_it_ended_may_hang_up():
    gang = gang_of(2)
    gang.report(ended(1, Exit.REFORMED), 1.0)
    gang.mark_disconnected(1, 1.0)
    let_pass(gang, 1.0, 15.0, beating=(0,))
    assert gang.phase is GangPhase.RUNNING


def test_a_host_that_has_returned_must_stay_until_all_have():
    gang = gang_of(2)
    gang.report(ended(1), 1.0)
    gang.mark_disconnected(1, 1.0)
    let_pass(gang, 1.0, 11.0, beating=(0,))
    assert gang.first_failure == (1,)
    assert "its function had returned" in gang.stop_reason


def test_a_host_that_has_not_joined_may_be_replaced():
    gang = gang_of(2, joined=False)
    gang.mark_disconnected(1, 1.0)
    let_pass(gang, 1.0, 15.0)
    assert gang.phase is GangPhase.JOINING


def test_a_host_that_is_gone_is_blamed_before_those_whose_collective_broke():
    gang = gang_of(3)
    gang.report(ended(0, Exit.EVICTED, announced=True), 1.0)
    gang.mark_disconnected(2, 1.1)
    let_pass(gang, 1.1, 4.0, beating=(0, 1))
    assert gang.first_failure == (2,)


# -- a connection for several calls ----------------------------------------------------------------


def test_a_client_leaves_the_channel_open_that_it_was_given(serve, opened):
    """An agent joins for one call after the other on one channel. The end of a client ends its
    stream at once, and nothing else."""
    served = serve(1)
    channel = opened(open_channel(served.endpoint))
    for _ in range(2):
        agent = Agent(served.endpoint, 0, channel=channel)
        agent.listen()
        agent.join("the same agent", "")
        agent.hear(lambda view: view.ready)
        agent.close()
        assert not agent._watcher.is_alive()


# -- where the death of a process is seen ----------------------------------------------------------


SILENT = (
    "host 1 of 3: no sign of life for 10 s: all processors are busy, or its process is stopped."
)


def notices(gang, now):
    return [event.detail for event in gang.sweep(now) if event.kind == "waiting"]


def test_a_silent_host_whose_agent_lives_is_told_of_once_and_not_lost():
    gang = gang_of(3, sees_deaths=True)
    now = let_pass(gang, 0.0, 9.5, beating=(0, 2))
    assert notices(gang, now) == []
    gang.heartbeat(Heartbeat(0), now)
    gang.heartbeat(Heartbeat(2), now)
    assert notices(gang, now + 1.0) == [SILENT]
    assert gang.view(0).notice == SILENT
    now = let_pass(gang, now + 1.0, 3600.0, beating=(0, 2))
    assert notices(gang, now) == []
    assert gang.phase is GangPhase.RUNNING
    gang.mark_lost(1, "its agent was killed", now)
    assert gang.stop_reason == "host 1 of 3: its agent was killed"


def test_a_host_that_falls_silent_again_is_told_of_again():
    gang, reports = gang_of(3, sees_deaths=True), []
    for now in range(1, 40):
        for host in (0, 1, 2) if now == 20 else (0, 2):
            gang.heartbeat(Heartbeat(host), float(now))
        reports += notices(gang, float(now))
    assert reports == [SILENT, SILENT]


def test_hosts_that_were_never_heard_from_have_until_the_start_timeout_where_they_live():
    gang = gang_of(2, joined=False, sees_deaths=True, first_sign_s=60.0, start_timeout_s=600.0)
    gang.join(0, "agent-0", "", 0.0)
    let_pass(gang, 0.0, 599.0, beating=(0,))
    assert gang.phase is GangPhase.JOINING
    let_pass(gang, 599.0, 2.0, beating=(0,))
    assert gang.stop_reason == "host 1 of 2 did not join within 600 s"


def test_a_held_host_that_does_not_take_its_assignment_is_lost():
    """The hosts of a session wait for calls: one that does not answer in time stands still."""
    gang = gang_of(2, joined=False, sees_deaths=True, first_sign_s=10.0, turn=3)
    gang.join(0, "agent-0", "", 0.0)
    let_pass(gang, 0.0, 9.0, beating=(0,))
    assert gang.phase is GangPhase.JOINING
    let_pass(gang, 9.0, 2.0, beating=(0,))
    (lost,) = gang.reports
    assert (lost.exit, lost.detail) == (Exit.AGENT_LOST, "nothing was heard from it within 10 s")


def test_a_silent_host_ends_a_job_that_has_a_hang_timeout():
    gang = gang_of(2, sees_deaths=True, hang_timeout_s=30.0)
    now = let_pass(gang, 0.0, 29.0, beating=(0,))
    assert gang.phase is GangPhase.RUNNING
    let_pass(gang, now, 2.0, beating=(0,))
    assert gang.stop_reason == "host 1 of 2: fell silent: no sign of life for 30 s"


def test_a_short_hang_timeout_makes_no_host_dead_that_misses_a_few_heartbeats():
    gang = gang_of(2, sees_deaths=True, hang_timeout_s=1.5)
    let_pass(gang, 0.0, 9.0, beating=(0,))
    assert gang.phase is GangPhase.RUNNING


def test_a_host_that_lives_is_not_blamed_for_a_collective_that_broke():
    gang = gang_of(3, sees_deaths=True)
    gang.report(raised(0, consequence=True), 1.0)
    let_pass(gang, 1.0, 1.8, beating=(2,))
    assert gang.phase is GangPhase.RUNNING, "the cause may be on host 1"
    let_pass(gang, 2.8, 2.0, beating=(2,))
    assert gang.first_failure == (0,)
    gang.report(raised(1), 6.0)
    assert gang.first_failure == (1,)


# -- over the wire ---------------------------------------------------------------------------------


def test_what_breaks_a_connection_is_told(serve, opened, caplog):
    served = serve(1, "127.0.0.1:0")
    network = opened(Network(served.endpoint.target))
    agent = opened(Agent(replace(served.endpoint, target=network.target), 0))
    agent.listen()
    agent.join("a", "x")
    agent.hear(lambda v: v.ready)
    is_connected, connected = threading.Event(), served.gang.mark_connected
    served.gang.mark_connected = lambda host, now: (connected(host, now), is_connected.set())
    network.cut()
    assert is_connected.wait(PATIENCE_S)
    (message,) = [r.getMessage() for r in caplog.records if "opens a new one" in r.getMessage()]
    before, why = message.split(": ", 1)
    assert before == "host 0 has lost its connection to the leader and opens a new one"
    assert why


KILLED = """
import sys, threading, time
from kinetic._core.endpoint import Endpoint
from kinetic._rpc.client import AgentClient
agent = AgentClient(Endpoint(*sys.argv[1:4], 1, sys.argv[4]), 1)
heard = threading.Event()
agent.watch(lambda view: heard.set(), print)
agent.join("b", "y")
heard.wait()
print("watches", flush=True)
time.sleep(1000)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("address", ["unix", "127.0.0.1:0"])
def test_the_end_of_a_killed_agents_connection_is_seen_and_ends_no_job(
    serve, opened, address, tmp_path
):
    served = serve(2, f"unix:{tmp_path}/k" if address == "unix" else address)
    first = opened(Agent(served.endpoint, 0))
    first.listen()
    first.join("a", "x")
    end = served.endpoint
    argv = [end.target, end.token, end.job_id, end.certificate]
    broken, disconnected = threading.Event(), served.gang.mark_disconnected

    def note(host, now):
        disconnected(host, now)
        if host == 1:
            broken.set()

    served.gang.mark_disconnected = note
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *argv], stdout=subprocess.PIPE, text=True
    ) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "watches\n"
        os.kill(second.pid, signal.SIGKILL)
    assert broken.wait(PATIENCE_S)
    for _ in range(40):
        served.now += 0.2
        served.do(served.coordinator.sweep)
    assert served.gang.phase is GangPhase.RUNNING


def test_the_old_stream_of_a_host_that_has_opened_another_one_ends_unnoticed(serve, opened):
    served = serve(1)
    agent, successor = (opened(Agent(served.endpoint, 0)) for _ in range(2))
    for client in (agent, successor):
        client.listen()
        client.join("a", "x")
        client.hear(lambda v: v.ready)
    losses, closed = [], threading.Event()

    def disconnected(host, now):
        losses.append(host)
        if not served.coordinator._watchers[0]:
            closed.set()

    served.gang.mark_disconnected = disconnected
    agent.close()
    successor.close()
    assert closed.wait(PATIENCE_S)
    assert losses == [0]


def test_a_connection_that_is_cut_and_comes_back_is_no_loss(serve, opened):
    served = serve(1, "127.0.0.1:0")
    network = opened(Network(served.endpoint.target))
    agent = opened(Agent(replace(served.endpoint, target=network.target), 0))
    agent.listen()
    agent.join("a", "x")
    agent.hear(lambda v: v.ready)
    is_connected, connected = threading.Event(), served.gang.mark_connected
    served.gang.mark_connected = lambda host, now: (connected(host, now), is_connected.set())
    network.cut()
    assert is_connected.wait(PATIENCE_S)
    served.now += 10.0
    served.do(served.coordinator.sweep)
    served.do(served.coordinator.cancel, "over")
    assert agent.hear(lambda v: v.stop).stop_exit is Exit.CANCELLED


def test_a_connection_that_takes_a_second_is_waited_for(serve, opened):
    """An agent waits for a slow connection: TLS with a distant or busy leader may take a second."""
    served = serve(1, "127.0.0.1:0")
    network = opened(Network(served.endpoint.target, delay_s=1.0))
    agent = opened(Agent(replace(served.endpoint, target=network.target), 0))
    assert agent.join("a", "x").ready
    assert network.connections == 1


class Network:
    """A relay to an address, which a test can cut. Each new connection takes `delay_s` seconds."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self.connections = 0
        host, _, port = target.rpartition(":")
        self._to = host, int(port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                self.connections += 1
                time.sleep(self._delay_s)
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                pairs = ((near, far), (far, near))
                carriers = [threading.Thread(target=carry, args=pair) for pair in pairs]
                self._threads += carriers
                for sock in carriers:
                    sock.start()

    def cut(self) -> None:
        """Break all open connections; later connections work."""
        for end in self._ends:
            hang_up(end)

    def close(self) -> None:
        hang_up(self._door)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (self._door, *self._ends):
            sock.close()


def carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    hang_up(source)
    hang_up(sink)


def hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


# --- before hosts have joined


def test_a_host_that_falls_silent_before_it_joins_is_lost_as_any_other():
    gang = gang_of(2, joined=False)
    gang.join(0, "agent-0", "", 0.0)
    gang.mark_connected(1, 1.0)
    now = let_pass(gang, 1.0, 20.0, beating=(0, 1), state="preparing")
    assert gang.phase is GangPhase.JOINING, "it unpacks something large"
    now = let_pass(gang, now, 9.5, beating=(0,))
    assert gang.phase is GangPhase.JOINING
    let_pass(gang, now, 1.5, beating=(0,))
    assert gang.first_failure == (1,)
    assert gang.stop_reason == "host 1 of 2: fell silent: no sign of life for 10 s"


def test_a_host_whose_connection_breaks_before_it_joins_may_come_back_any_time():
    gang = gang_of(2, joined=False)
    gang.join(0, "agent-0", "", 0.0)
    gang.mark_connected(1, 1.0)
    gang.mark_disconnected(1, 2.0)
    let_pass(gang, 2.0, 100.0, beating=(0,))
    assert gang.phase is GangPhase.JOINING


@pytest.mark.parametrize("first_sign_s", [60.0, None])
def test_a_host_that_is_there_must_be_heard_from(first_sign_s):
    gang = gang_of(2, joined=False, first_sign_s=first_sign_s)
    gang.join(0, "agent-0", "", 0.0)
    let_pass(gang, 0.0, 59.0, beating=(0,))
    assert gang.phase is GangPhase.JOINING
    let_pass(gang, 59.0, 2.0, beating=(0,))
    if first_sign_s is None:
        assert gang.phase is GangPhase.JOINING
    else:
        assert gang.stop_reason == "host 1 of 2: nothing was heard from it within 60 s"
