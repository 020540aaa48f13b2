"""The places where jobs run, for tests that hold for each of them.

In: settings of the test's process, a handle. Out: jobs that go to the place; process ids of their
hosts, agents and workers where they run on this machine.

Slices are the same everywhere: a job of one host, and gangs of two and four. Pods are processes of
this machine on the double of a cluster, and on a real one whose nodes run them so.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from gangs import wait_until

EVERYWHERE = [
    pytest.param("local"),
    pytest.param("kubernetes", marks=pytest.mark.kubernetes),
]


@dataclass(frozen=True)
class Place:
    """Where the jobs of a test run.

    Attributes:
        name: "local" or "kubernetes" (one host: a Job, several: a JobSet).
        folder: one that callers and hosts share.
        cluster: the cluster; None where there is none.
    """

    name: str
    folder: Path
    cluster: object = None

    def marker(self, name="marker"):
        """A path that functions may touch, for the test to see."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def leader(self, handle):
        """The process that leads the gang: the supervisor, or the program of host 0."""
        if self.name == "local":
            return wait_until(handle.processes, "the supervisor has not started")["supervisor"]
        return self.host(handle, 0)

    def host(self, handle, index):
        """The first process of a host: its program, or its agent where a supervisor forked it."""
        if self.name == "local":
            return self.agent(handle, index)
        return titled("host", handle, index)

    def agent(self, handle, index, unless=lambda: False):
        """The agent of a host; None if something has come true before it is there."""
        return titled("agent", handle, index, unless)

    def worker(self, handle, index):
        """The process that runs the function."""
        return titled("worker", handle, index)


def titled(role, handle, index, unless=lambda: False):
    """The process of a host that has this role, once there is one."""
    title = f"kinetic-{role} {handle.job_id} host {index}"
    found = wait_until(lambda: find_process(title) or unless(), f"there is no {title}")
    return None if found is True else found


def find_process(title):
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if os.fsdecode(command).rstrip("\0 ") == title:
                return int(entry.name)
    return None
