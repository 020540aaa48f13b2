"""Which processes belong to a job without a supervisor: pure.

In: a process's command line and environment. Out: whether the job's function started it.

Supervisor and agents end all that the function started, unless they are killed at the same moment:
then daemons live on. Forks keep the worker's title, and programs inherit the mark in its
environment, which is derived from a secret of the attempt so that it cannot be there by chance.
"""

from __future__ import annotations

import hashlib

VARIABLE = "KINETIC_FAMILY"


def mark(token: str) -> str:
    """The value of `VARIABLE` in the environment of every process that the function starts."""
    return hashlib.sha256(f"family of {token}".encode()).hexdigest()[:32]


def belongs(job_id: str, token: str, command: bytes, environ: bytes) -> bool:
    """Whether a process is the job's worker, a fork of it, or a program that one of these started.

    Args:
        job_id: the job.
        token: of its attempt.
        command: its command line as in /proc, with zero bytes between the words.
        environ: its environment, likewise.
    """
    title = f"kinetic-worker {job_id} host ".encode()
    return command.startswith(title) or f"{VARIABLE}={mark(token)}".encode() in environ.split(b"\0")


def job_of(environ: bytes) -> str:
    """The id of the job whose function started the program with this environment, or ""."""
    values = dict(each.split(b"=", 1) for each in environ.split(b"\0") if b"=" in each)
    return (
        values.get(b"KINETIC_JOB_ID", b"").decode(errors="replace")
        if VARIABLE.encode() in values
        else ""
    )
