"""Whether the processes of a job on this machine live: from locks and from what the kernel says.

In: a job's folder, process ids. Out: answers; and watches that notice an end, or a halt, as it
comes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from kinetic._core import record
from kinetic._store import files
from kinetic._system import locks, processes
from kinetic.errors import CorruptRecord

LOOK_EVERY_S = 1.0


class StuckWatch:
    """Counts for how long something stands; time in which this process itself did not look does not
    count."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._counted_s = 0.0
        self._looked_at = time.monotonic()

    def is_over(self, stands: Callable[[], bool]) -> bool:
        """Look, once a second at most; return whether it has stood for too long."""
        passed_s = time.monotonic() - self._looked_at
        if passed_s < LOOK_EVERY_S:
            return False
        self._looked_at += passed_s
        self._counted_s = self._counted_s + min(passed_s, 2 * LOOK_EVERY_S) if stands() else 0.0
        return self._counted_s > self._limit_s


class SupervisorWatch:
    """Notices at once when the supervisor is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fd = -1

    def is_alive(self) -> bool:
        return locks.is_record_held(self._folder / "lock")

    def wait(self, timeout_s: float) -> None:
        """Sleep, but not past the supervisor's end."""
        import select

        if self.fd < 0:
            self.open()
        if self.fd < 0:
            time.sleep(timeout_s)
        else:
            select.select([self.fd], [], [], timeout_s)

    def open(self) -> None:
        with contextlib.suppress(OSError, CorruptRecord, ValueError, KeyError, AttributeError):
            pid = int(record.parse(files.content(self._folder / "supervisor.json"))["pid"])
            if self.is_alive():
                self.fd = os.pidfd_open(pid)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def supervisor(lock: Path) -> int:
    """The supervisor that holds the job's lock; 0 when it is free. The kernel knows it before it
    has written anything."""
    pid = locks.record_holder(lock)
    return pid if pid and _is_supervisor(pid) else 0


def _is_supervisor(pid: int) -> bool:
    """Whether the number means a supervisor here: on a shared disk the holder may be another
    machine's process."""
    with contextlib.suppress(OSError):
        command = processes.lasting_command_line(pid)
        return b"kinetic-supervisor" in command or b"kinetic._host.local.supervisor" in command
    return False


def is_agent(pid: int, job_id: str) -> bool:
    """Whether this is an agent of the job, and one that can end: it is not over, and nobody has
    stopped it."""
    with contextlib.suppress(OSError):
        # For a moment after the fork an agent still has the supervisor's title; it has the job's id
        # as well.
        can_end = processes.state(pid) not in ("", "T", "t", "Z", "X")
        return can_end and job_id.encode() in processes.command_line(pid)
    return False


def signal_host(first: int, role: str, job_id: str, host: int, signum: int) -> bool:
    """Send a signal to the process of a host that is its "agent" or "worker", which is `first` or
    below it; return whether there is one."""
    title = f"kinetic-{role} {job_id} host {host}".encode()
    for pid in (first, *processes.descendants(first)):
        with contextlib.suppress(OSError):
            if processes.command_line(pid).rstrip(b"\0 ") == title:
                return processes.kill(pid, signum)
    return False
