"""Whether the processes of a job on this machine live: from locks and from what the kernel says.

In: a job's folder, process ids. Out: answers; and watches that notice an end, or a halt, as it
comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from kinetic._core import record
from kinetic._store import files
from kinetic.errors import CorruptRecord

LOOK_EVERY_S = 1.0
_EXEC_POLL_S, _EXEC_POLLS = 0.002, 2000
_FLOCK = "hhqqi4x"
"""`struct flock`: kind, origin, start, length, process."""


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
        return is_locked(self._folder / "lock")

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


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(fd)
    return False


def lock_holder(path: Path) -> int:
    """The supervisor that holds the lock; 0 when it is free. The kernel knows it before it has
    written anything."""
    import struct

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        # Asking with F_RDLCK ignores the shared lock that `is_locked` holds for a moment.
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return 0 if kind == fcntl.F_UNLCK or not _is_supervisor(pid) else int(pid)


def _is_supervisor(pid: object) -> bool:
    """Whether the number means a supervisor here: on a shared disk the holder may be another
    machine's process."""
    with contextlib.suppress(OSError):
        command = _command_line(Path(f"/proc/{pid}"))
        return b"kinetic-supervisor" in command or b"kinetic._host.local.supervisor" in command
    return False


def _command_line(process: Path) -> bytes:
    """Empty for good only if the process has none: it is empty as well while the process becomes
    another program (exec), as a supervisor does between two attempts."""
    for _ in range(_EXEC_POLLS):
        command = (process / "cmdline").read_bytes()
        if command:
            return command
        (process / "exe").readlink()  # raises for what runs no program: a zombie, the kernel's
        time.sleep(_EXEC_POLL_S)
    return b""


def is_agent(pid: object, job_id: str) -> bool:
    """Whether this is an agent of the job, and one that can end: it is not over, and nobody has
    stopped it."""
    with contextlib.suppress(OSError):
        # For a moment after the fork an agent still has the supervisor's title; it has the job's id
        # as well.
        return (
            state_of(pid) not in "TtZX"
            and job_id.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    return False


def state_of(pid: object) -> str:
    """The letter by which the kernel calls the state of a process; "X" when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"
