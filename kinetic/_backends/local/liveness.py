"""Whether the processes of a job on this machine are alive, from locks and from the kernel.

In: a job's folder, process ids. Out: answers; watches that notice an end, or a halt, when it
happens.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic._system import locks, processes
from kinetic._system.changes import Changes

if TYPE_CHECKING:
    from kinetic._backends.base import GangProcesses
    from kinetic._core.ref import JobRef

LOOK_EVERY_S = 1.0
QUICK_POLL_S = 0.004
SLOW_POLL_S = 0.02
QUICK_FOR_S = 1.0
TOLD_AFTER_S = 0.5
"""Following of shorter jobs only looks: to stop being told takes the kernel 10 ms, which their
caller would wait for."""
TOLD_POLL_S = 0.1
"""How often to look even with notifications, for another attempt or a verdict."""


class StuckWatch:
    """Counts how long something has stood still, without time in which this process did not
    look."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._counted_s = 0.0
        self._looked_at = time.monotonic()

    def is_over(self, stands: Callable[[], bool]) -> bool:
        """Look, at most once a second; return whether it has stood still for too long."""
        passed_s = time.monotonic() - self._looked_at
        if passed_s < LOOK_EVERY_S:
            return False
        self._looked_at += passed_s
        self._counted_s = self._counted_s + min(passed_s, 2 * LOOK_EVERY_S) if stands() else 0.0
        return self._counted_s > self._limit_s


class JobWatch:
    """Wakes the follower of a job when the supervisor has ended, and when a host has printed.

    `printed` are files that grow when a host prints; some may not exist yet. Without notifications
    (the job runs on another machine, or too many files are watched) it looks more often.
    """

    def __init__(
        self,
        folder: Path,
        printed: Iterable[Path] = (),
        *,
        told_after_s: float = TOLD_AFTER_S,
        told_poll_s: float = TOLD_POLL_S,
    ) -> None:
        self._folder = folder
        self._unwatched = list(printed)
        self._told_after_s = told_after_s
        self._told_poll_s = told_poll_s
        self._changes = Changes()
        self._begun = time.monotonic()
        self._is_over = False
        self._fd = -1

    @property
    def is_told(self) -> bool:
        """Whether every output, and the end, wakes `wait`."""
        return self._fd >= 0 and not self._unwatched

    def wait(self) -> None:
        """Sleep until something may have changed, or for a moment."""
        if self._fd < 0 and not self._is_over:
            self._fd = ending_fd(self._folder)
        if self._watches_more():
            return  # What was written before causes no notification.
        poll = select.poll()
        for fd in (self._fd, self._changes.fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(math.ceil(self._pause_s() * 1000))]
        self._changes.take()
        if self._fd in ready:  # It stays readable, and the hosts may take a moment to end.
            self._is_over = True
            self._close_fd()

    def _watches_more(self) -> bool:
        """Watch the files that exist by now; return whether there were new ones."""
        if time.monotonic() - self._begun < self._told_after_s:
            return False
        left = [path for path in self._unwatched if not self._changes.watch(path)]
        found, self._unwatched = len(left) < len(self._unwatched), left
        return found

    def _pause_s(self) -> float:
        if self.is_told:
            return self._told_poll_s
        is_young = time.monotonic() - self._begun < QUICK_FOR_S
        return QUICK_POLL_S if is_young else SLOW_POLL_S

    def close(self) -> None:
        """Stop watching."""
        self._changes.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def ending_fd(folder: Path) -> int:
    """Open a descriptor that is readable once the supervisor has ended; -1 if it does not run on
    this machine."""
    lock, fd = folder / "lock", -1
    with contextlib.suppress(OSError, AttributeError):
        if pid := supervisor(lock):
            fd = os.pidfd_open(pid)
            if locks.record_holder(lock) != pid:  # It has ended, and the id may be another's.
                os.close(fd)
                fd = -1
    return fd


def bar_supervisor(folder: Path) -> None:
    """Remove the folder of a job whose start was given up, unless its supervisor has begun: one
    that comes later finds no folder, and ends."""
    import shutil

    with contextlib.suppress(OSError), open(folder / "lock", "a") as lock:
        if locks.try_hold_record(lock.fileno()):
            shutil.rmtree(folder)


def supervisor(lock: Path) -> int:
    """The supervisor that holds the job's lock; 0 if it is free. The kernel knows it before the
    supervisor has written anything."""
    pid = locks.record_holder(lock)
    return pid if pid and _is_supervisor(pid) else 0


def _is_supervisor(pid: int) -> bool:
    """Whether the process is a supervisor: on a shared disk the lock's holder may be another
    machine's process."""
    with contextlib.suppress(OSError):
        return b"kinetic-supervisor" in processes.lasting_command_line(pid)
    return False


def is_agent(pid: int, job_id: str) -> bool:
    """Whether this is an agent of the job that can end its host: neither dead nor stopped."""
    with contextlib.suppress(OSError):
        # For a moment after the fork an agent still has the supervisor's title; it has the job's id
        # as well.
        can_end = processes.state(pid) not in ("", "T", "t", "Z", "X")
        return can_end and job_id.encode() in processes.command_line(pid)
    return False


def signal_hosts(
    gang: GangProcesses | None, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool
) -> tuple[int, ...]:
    """Send a signal to the workers of hosts, or to their agents; return which were there."""
    role, first = "agent" if agents else "worker", {} if gang is None else gang.agents
    # All are found first: their leader ends the others of a slice as soon as one has died.
    found = {
        host: pid
        for host in hosts
        if host in first
        and (pid := _find_process(first[host], f"kinetic-{role} {ref.job_id} host {host}"))
    }
    for pid in found.values():
        processes.kill(pid, signum)
    return tuple(found)


def _find_process(first: int, title: str) -> int | None:
    """Return the process with this title, which is `first` or below it."""
    for pid in (first, *processes.descendants(first)):
        with contextlib.suppress(OSError):
            if processes.command_line(pid).rstrip(b"\0 ") == title.encode():
                return pid
    return None
