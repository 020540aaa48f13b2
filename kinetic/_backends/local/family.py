"""Ending what a job's function started, if supervisor and agents were killed at the same moment.

In: a job, the token of its attempt. Out: processes that are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from kinetic._core import kinship
from kinetic._system import processes

LIMIT_S = 2.0
_PAUSE_S = 0.005


def end(job_id: str, token: str, *, limit_s: float = LIMIT_S) -> None:
    """Kill them until none is left: others may fork during the search."""
    deadline = time.monotonic() + limit_s
    while (found := list(_members(job_id, token))) and time.monotonic() < deadline:
        for pid in found:
            _kill(pid, job_id, token)
        time.sleep(_PAUSE_S)


def _members(job_id: str, token: str) -> Iterator[int]:
    for pid in processes.all_pids():
        if pid != os.getpid() and _is_member(pid, job_id, token):
            yield pid


def _is_member(pid: int, job_id: str, token: str) -> bool:
    with contextlib.suppress(OSError):
        command, environ = processes.command_line(pid), processes.environ(pid)
        return kinship.belongs(job_id, token, command, environ)
    return False


def _kill(pid: int, job_id: str, token: str) -> None:
    """Through a descriptor: the id may be another process's by now."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if _is_member(pid, job_id, token):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
