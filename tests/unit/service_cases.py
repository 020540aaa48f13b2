"""Running coordinators (a leader's gRPC servers), and agents that call them."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import replace

import pytest

from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang, GangSpec
from kinetic._core.outcome import HostReport
from kinetic._rpc import certificate
from kinetic._rpc.client import AgentClient
from kinetic._rpc.server import Coordinator

TOKEN = "s3cret"


JOB = "job-00c0ffee"


PATIENCE_S = 200.0


class Served:
    """A coordinator that serves in a thread, with a clock that only the test moves."""

    def __init__(self, address: str, hosts: int, *, restarts=None, **limits) -> None:
        self.key = ""
        self.restarts = restarts
        self.now = 0.0
        self.events: list = []
        self.gang = Gang(GangSpec(hosts=hosts, **limits), 0.0)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.coordinator = self.run(self._make(address))
        self.endpoint = self.run(self.coordinator.start())

    async def _make(self, address: str) -> Coordinator:
        endpoint = Endpoint(address, TOKEN, JOB, restarts=self.restarts)
        if not endpoint.is_unix:
            made = certificate.make(endpoint.tls_name)
            self.key = made.key
            endpoint = replace(endpoint, certificate=made.certificate)
        return self.coordinator_at(endpoint)

    def coordinator_at(self, endpoint: Endpoint) -> Coordinator:
        def clock() -> float:
            return self.now

        return Coordinator(
            self.gang, endpoint, key=self.key, clock=clock, on_event=self.events.append
        )

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def do(self, call, *args):
        async def inside():
            return call(*args)

        return self.run(inside())

    def finish(self) -> None:
        self.run(self.coordinator.wait_finished())

    def close(self) -> None:
        if self.thread.is_alive():
            self.run(self.coordinator.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


class Agent(AgentClient):
    """An agent that queues all views of the gang that its coordinator sends."""

    def __init__(self, endpoint: Endpoint, host: int, **options) -> None:
        super().__init__(endpoint, host, **options)
        self.heard: queue.Queue = queue.Queue()

    def listen(self) -> None:
        self.watch(self.heard.put, self.heard.put)

    def hear(self, wanted):
        while not wanted(view := self.heard.get(timeout=PATIENCE_S)):
            pass
        return view


def ended(host: int, how: Exit = Exit.RETURNED, **facts) -> HostReport:
    return HostReport(host, how, **facts)


@pytest.fixture
def opened():
    things: list = []
    yield lambda thing: things.append(thing) or thing
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def serve(opened, tmp_path):
    return lambda hosts, address=f"unix:{tmp_path}/s", **limits: opened(
        Served(address, hosts, **limits)
    )


@pytest.fixture
def agents(opened):
    return lambda served, **options: [
        opened(Agent(served.endpoint, h, **options)) for h in range(served.gang.spec.hosts)
    ]
