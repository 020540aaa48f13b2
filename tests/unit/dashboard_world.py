"""A dashboard over a store of jobs that run nothing.

In: jobs, requests. Out: answers. Used by the tests of the dashboard without a browser.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeBackend

from kinetic._client.access import JobAccess
from kinetic._client.handle import JobHandle
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._dashboard.server import DashboardServer
from kinetic._store import index
from kinetic._store.local import LocalStore

NOW = 1_700_000_000.0


class World:
    """A store of jobs, and a fake backend in which a test sets their phases."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self.backend: Any = FakeBackend()
        self.access = JobAccess(self.store, lambda _: self.backend, self.handle, lambda: NOW)

    def handle(self, ref: JobRef) -> JobHandle[Any]:
        return JobHandle(ref, self.backend, self.store)

    def add(self, number: int = 1, **changes: Any) -> JobRef:
        ref = JobRef(
            f"job-{number:08x}",
            Place("fake"),
            "tpu-v6e-8",
            "f",
            "train",
            NOW - 1000 + number,
            self.store.uri,
            hosts=2,
        )
        ref = replace(ref, **changes)
        index.add(self.store, ref)
        return ref

    def end(self, ref: JobRef, verdict: Verdict = Verdict.SUCCEEDED, reason: str = "") -> None:
        exit = Exit.RETURNED if verdict is Verdict.SUCCEEDED else Exit.RAISED
        reports = (HostReport(0, exit, started_at=NOW - 900),)
        outcome = Outcome(verdict, reports=reports, reason=reason, ended_at=NOW - 800)
        index.write_outcome(self.store, ref.job_id, outcome)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


@pytest.fixture
def server(world: World) -> Iterator[DashboardServer]:
    found = DashboardServer(world.access)
    found.start()
    yield found
    found.close()


def ask(
    server: DashboardServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Send a request with only these headers and Host; return the status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)
    given = {"Host": f"127.0.0.1:{server.port}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.putrequest(method, path, skip_host=True)
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def path_of(server: DashboardServer) -> str:
    return server.url.partition(str(server.port))[2]
