"""The folder of a job in this machine's memory: what its hosts keep there outlives their
processes, and goes when the job is cleaned up.

In: a job's id. Out: a path; nothing, once it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
_TRIES = 100
"""A job that ends removes the folder of all jobs where it is empty, between any two steps."""
JAX_INIT_INFO = "jax-init-info.txt"
"""In a host's folder: the index of its process and the address of process 0, a line each. The name
and the format are those of GKE's multi-tier checkpointing."""


def of_job(job_id: str) -> Path:
    """Return the folder of all hosts of the job on this machine, whether it exists or not."""
    return MEMORY / f"kinetic-{os.getuid()}" / job_id


def jobs() -> list[str]:
    """Return the ids of the jobs of this user that have something there."""
    try:
        return sorted(os.listdir(MEMORY / f"kinetic-{os.getuid()}"))
    except OSError:
        return []


def make(job_id: str, name: str) -> Path | None:
    """Make a folder of this name in the job's, for its owner alone, and return it; None where the
    machine has no file system in memory, or somebody else has taken the name."""
    with contextlib.suppress(OSError):
        return _make(job_id, name)
    return None


def fault_of(job_id: str, name: str) -> str:
    """Return why such a folder cannot be made; "" where it can."""
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
            raise PermissionError(errno.EPERM, "other users own it, or may write to it", str(part))
    return folder


def remove_unused(job_id: str) -> None:
    """Remove what the job has there if the function has written nothing."""
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
    """Remove what the job has there. Idempotent."""
    folder = of_job(job_id)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # unless another job has something there
