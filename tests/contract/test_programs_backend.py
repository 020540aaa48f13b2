"""What only the double of a backend without a cluster promises.

In: submissions that were killed half way. Out: phases, and jobs that end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backend_cases import read, submitted, wait_for_ever
from doubles import programs
from doubles.programs import ProgramsBackend

from kinetic._backends.base import phase_of
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic._system import processes

PATIENCE_S = 200.0


@pytest.fixture
def store(home):
    return LocalStore(home)


@pytest.mark.parametrize("files", [(), ("alive",)])
def test_a_job_that_is_being_submitted_has_not_failed(store, files):
    """Its folder is made before the lock in it is held."""
    ref = JobRef("job-00000000", Place("ray"), "cpu", "f", "f", 0.0, store.uri)
    folder = programs.root() / ref.job_id
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    assert phase_of(ProgramsBackend(store), ref) is JobStatus.NOT_FOUND


def _submit_and_die(store_path):
    """Be a caller that is killed when its first program runs."""

    def die(folder, endpoint, started):
        os.kill(os.getpid(), signal.SIGKILL)

    programs._keep = die
    store = LocalStore(Path(store_path))
    submitted(ProgramsBackend(store, forks=False), store, wait_for_ever)


@pytest.mark.parametrize("named", [False, True], ids=["at once", "later"])
def test_a_job_whose_caller_was_killed_while_it_submitted_can_be_cancelled(store, home, named):
    """Later: its leader has a title by then, which overwrites the environment in /proc."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_programs_backend as t; "
    killed = subprocess.run([sys.executable, "-c", f"{code}t._submit_and_die({str(home)!r})"])
    assert killed.returncode == -signal.SIGKILL
    (name,) = programs.root().iterdir()
    ref = JobRef(name.name, Place("ray"), "cpu", "f", "f", 0.0, store.uri)
    backend = ProgramsBackend(store)
    assert phase_of(backend, ref) is JobStatus.RUNNING
    deadline = time.monotonic() + PATIENCE_S
    while named and not _has_titled_leader(ref.job_id):
        assert time.monotonic() < deadline, "its leader never gave itself a title"
        time.sleep(0.01)
    backend.cancel(ref)
    read(backend, ref)
    assert phase_of(backend, ref) is JobStatus.CANCELLED


def _has_titled_leader(job_id):
    title = f"kinetic-host {job_id} host 0".encode()
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if processes.command_line(pid).rstrip(b"\0") == title:
                return True
    return False
