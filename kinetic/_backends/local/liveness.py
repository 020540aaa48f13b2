"""The processes of a job on this machine: locks and the kernel tell which of them are alive."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._system import locks, processes

if TYPE_CHECKING:
    from kinetic._backends.attempt_logs import Pause
    from kinetic._backends.base import GangProcesses, LogRequest
    from kinetic._core.ref import JobRef

POLL_S = 0.02
"""Seconds between two checks for new output."""
_WAKE_AFTER_S = 0.1
"""Longest sleep in seconds of a thread that follows a job: it must notice new attempts, too."""
_CHECKS_PER_S = 5000
"""Most checks of output files per second, for all hosts together."""


class JobWatch:
    """Wakes a thread that follows a job: when a host prints, when the verdict is written, and when
    the supervisor ends, which is a moment after the verdict.

    Args:
        folder: the folder with the supervisor's lock.
        printed: files that grow when a host prints; some may not exist yet.
        outcome: file of the verdict; by default that of the job in `folder`.
    """

    def __init__(
        self, folder: Path, printed: Iterable[Path] = (), *, outcome: Path | None = None
    ) -> None:
        self._folder = folder
        self._printed = [outcome or folder.parent / "outcome.json", *printed]
        self._longest_s = max(POLL_S, len(self._printed) / _CHECKS_PER_S)
        self._poll_s = self._longest_s / 16
        self._sizes = self._read_sizes()
        self._has_ended = False
        self._fd = -1

    def wait(self) -> None:
        """Sleep until something has changed, or for `_WAKE_AFTER_S` at most."""
        if self._fd < 0 and not self._has_ended:
            self._fd = ending_fd(self._folder)
        poll = select.poll()
        if self._fd >= 0:
            poll.register(self._fd, select.POLLIN)
        # After the supervisor's end, the reports of its hosts may take a moment.
        deadline = time.monotonic() + (POLL_S if self._has_ended else _WAKE_AFTER_S)
        while time.monotonic() < deadline:
            if poll.poll(math.ceil(1000 * self._poll_s)):
                self._has_ended = True
                self.close()
                return
            before, self._sizes = self._sizes, self._read_sizes()
            if self._sizes != before:
                self._poll_s = self._longest_s / 16
                return
            self._poll_s = min(1.2 * self._poll_s, self._longest_s)

    def _read_sizes(self) -> list[int]:
        sizes = []
        for path in self._printed:
            try:
                sizes.append(path.stat().st_size)
            except OSError:
                sizes.append(-1)
        return sizes

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # The program may have closed the descriptor.
                os.close(self._fd)
        self._fd = -1


@contextlib.contextmanager
def watch_output(
    root: Path,
    ref: JobRef,
    request: LogRequest,
    attempt: int,
    hosts: Sequence[int],
    *,
    session_id: str = "",
) -> Iterator[Pause]:
    """Watch the output of hosts in an attempt, and the verdict.

    Args:
        root: folder of the store.
        ref: the job.
        request: the output that is read.
        attempt: number of the attempt.
        hosts: indices of the hosts.
        session_id: the session whose supervisor runs the job; "" if the job has a supervisor of its
            own.
    """
    keys = [request.key(ref, attempt, host) for host in hosts]
    if not request.metrics:
        keys = list(map(layout.log_index, keys))
    folder = root / layout.JobKeys(session_id or ref.job_id).prefix / "local"
    outcome = root / layout.JobKeys(ref.job_id).outcome
    watch = JobWatch(folder, [root / key for key in keys], outcome=outcome)

    def pause(new_bytes: int) -> Iterator[None]:
        if not new_bytes:
            yield None
            watch.wait()

    try:
        yield pause
    finally:
        watch.close()


def ending_fd(folder: Path) -> int:
    """Open a descriptor that becomes readable when the job's supervisor ends; -1 if the supervisor
    does not run on this machine."""
    lock, fd = folder / "lock", -1
    with contextlib.suppress(OSError, AttributeError):
        if pid := supervisor(lock):
            fd = os.pidfd_open(pid)
            if locks.record_holder(lock) != pid:  # It ended; another process may have its id now.
                os.close(fd)
                fd = -1
    return fd


def bar_supervisor(folder: Path) -> None:
    """Remove the folder of a job whose start the caller has given up, unless the supervisor has
    begun. A supervisor that begins afterwards finds no folder and ends."""
    import shutil

    with contextlib.suppress(OSError), open(folder / "lock", "a") as lock:
        if locks.try_hold_record(lock.fileno()):
            shutil.rmtree(folder)


def supervisor(lock: Path) -> int:
    """Return the process id of the supervisor that holds the job's lock; 0 if the lock is free. The
    kernel knows the process before the supervisor has written any file."""
    pid = locks.record_holder(lock)
    with contextlib.suppress(OSError):
        # On a shared disk the lock's holder may be another machine's process.
        if pid and b"kinetic-supervisor" in processes.lasting_command_line(pid):
            return pid
    return 0


def is_agent(pid: int, job_id: str) -> bool:
    """True if the process is an agent of the job, and is neither dead nor suspended."""
    with contextlib.suppress(OSError):
        # Just after the fork, an agent still has the title of the supervisor, which contains the
        # job's id.
        can_end = processes.state(pid) not in ("", "T", "t", "Z", "X")
        return can_end and job_id.encode() in processes.command_line(pid)
    return False


def signal_hosts(
    gang: GangProcesses | None, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool
) -> tuple[int, ...]:
    """Send a signal to the hosts' workers, or to their agents; return the hosts that got it."""
    role, first = "agent" if agents else "worker", {} if gang is None else gang.agents
    # Find all processes first: when one dies, the leader ends the others of its slice.
    pids = {
        host: pid
        for host in hosts
        if host in first
        and (pid := _find_process(first[host], f"kinetic-{role} {ref.job_id} host {host}"))
    }
    for pid in pids.values():
        processes.kill(pid, signum)
    return tuple(pids)


def _find_process(first: int, title: str) -> int | None:
    """Return the id of the process with this title: the process `first` or one of its descendants.
    None if there is no such process."""
    for pid in (first, *processes.descendants(first)):
        with contextlib.suppress(OSError):
            if processes.command_line(pid).rstrip(b"\0 ") == title.encode():
                return pid
    return None
