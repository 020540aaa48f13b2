"""The folder of a job in this machine's memory. Its files outlive the processes of the job's hosts,
until the job is cleaned up."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
_TRIES = 100
"""Number of tries to create a folder: when another job ends, it may remove the empty parent folder
between any two steps."""
JAX_INIT_INFO = "jax-init-info.txt"
"""File in a host's folder with the index of its process and the address of process 0, one line
each. The name and the format are those of GKE's multi-tier checkpointing."""


def of_job(job_id: str) -> Path:
    """Return the folder of all hosts of a job on this machine, whether it exists or not."""
    return MEMORY / f"kinetic-{os.getuid()}" / job_id


def jobs() -> list[str]:
    """Return the ids of this user's jobs that have a folder in memory."""
    try:
        return sorted(os.listdir(MEMORY / f"kinetic-{os.getuid()}"))
    except OSError:
        return []


def make(job_id: str, name: str) -> Path | None:
    """Create a folder in the job's folder, for its owner only. Return None if the machine has no
    file system in memory, or another user owns a folder of this name."""
    with contextlib.suppress(OSError):
        return _make(job_id, name)
    return None


def fault_of(job_id: str, name: str) -> str:
    """Return why `make` fails with these arguments; "" if it succeeds."""
    try:
        _make(job_id, name)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def _make(job_id: str, name: str) -> Path:
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return _make_once(job_id, name)
    return _make_once(job_id, name)


def _make_once(job_id: str, name: str) -> Path:
    folder = of_job(job_id) / name
    for part in (folder.parent.parent, folder.parent, folder):
        part.mkdir(mode=0o700, exist_ok=True)
        about = part.lstat()
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "another user owns it or may write to it", str(part))
    return folder


def remove_unused(job_id: str) -> None:
    """Remove the folders of a job's hosts that contain nothing from its function."""
    folder = of_job(job_id)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.listdir(folder / name) == [JAX_INIT_INFO]:
                    (folder / name / JAX_INIT_INFO).unlink()
                (folder / name).rmdir()
        folder.rmdir()
        folder.parent.rmdir()


def remove(job_id: str) -> None:
    """Remove the folder of a job. Idempotent."""
    folder = of_job(job_id)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # Fails if another job has a folder.
