"""The places where jobs run, for tests that hold for each of them.

Slices are the same everywhere: a job of one host, and gangs of two and four. Pods are processes of
this machine, on the double of a cluster and on a real cluster whose nodes run them so.
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
    """The place where the jobs of a test run.

    Attributes:
        name: "local" or "kubernetes" (one host: a Job, several: a JobSet).
        folder: a folder that callers and hosts share.
        cluster: the cluster; None for "local".
    """

    name: str
    folder: Path
    cluster: object = None

    def marker(self, name="marker"):
        """Return a path that functions can touch and the test can see."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def leader(self, handle):
        """Return the pid of the process that leads the gang: the supervisor, or the program of host
        0."""
        if self.name == "local":
            return wait_until(handle.processes, "the supervisor has not started")["supervisor"]
        return self.host(handle, 0)

    def host(self, handle, index):
        """Return the pid of a host's first process: its program, or its agent where a supervisor
        forked it."""
        if self.name == "local":
            return self.agent(handle, index)
        return find_titled("host", handle, index)

    def agent(self, handle, index, unless=lambda: False):
        """Return the pid of a host's agent; None if `unless` is true before it exists."""
        return find_titled("agent", handle, index, unless)

    def worker(self, handle, index):
        """Return the pid of the process that runs the function."""
        return find_titled("worker", handle, index)


def find_titled(role, handle, index, unless=lambda: False):
    """Wait for the process of a host that has this role; return its pid."""
    title = f"kinetic-{role} {handle.job_id} host {index}"
    pid = wait_until(lambda: find_process(title) or unless(), f"there is no {title}")
    return None if pid is True else pid


def find_process(title):
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if os.fsdecode(command).rstrip("\0 ") == title:
                return int(entry.name)
    return None
