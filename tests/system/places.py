"""The places where jobs run, for tests whose promise holds in every place.

Slices are the same everywhere: a job of one host, and gangs of two and four. Pods are processes of
this machine, both on the double of a cluster and on a real cluster with such nodes.
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
    """A place where the jobs of a test run.

    Attributes:
        name: "local" or "kubernetes" (one host: a Job, several: a JobSet).
        folder: a folder that callers and hosts share.
        cluster: the cluster; None for "local".
    """

    name: str
    folder: Path
    cluster: object = None

    def marker(self, name="marker"):
        """Return the path of a file by which function and test can signal to each other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def leader(self, handle):
        """Return the pid of the process that leads the job: the supervisor on this machine, the
        program of host 0 on a cluster."""
        if self.name == "local":
            return wait_until(handle.processes, "the supervisor has not started")["supervisor"]
        return self.host(handle, 0)

    def host(self, handle, index):
        """Return the pid of a host's first process: its agent on this machine, its pod's program on
        a cluster."""
        if self.name == "local":
            return self.agent(handle, index)
        return find_titled("host", handle, index)

    def agent(self, handle, index, unless=lambda: False):
        """Wait for a host's agent and return its pid, or None if `unless` becomes true before."""
        return find_titled("agent", handle, index, unless)

    def worker(self, handle, index):
        """Wait for a host's worker, the process that runs the function, and return its pid."""
        return find_titled("worker", handle, index)


def find_titled(role, handle, index, unless=lambda: False):
    """Wait for a host's process with this role (host, agent or worker); return its pid."""
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
