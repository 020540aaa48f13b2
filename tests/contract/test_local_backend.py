"""The local backend: plans that it refuses, and how it decides if a job is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from backend_cases import local, planned, read, speak, submitted, wait_for_ever

from kinetic._backends.base import phase_of
from kinetic._backends.local import liveness
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic._system import locks
from kinetic.errors import InsufficientMemory, PreflightError


@pytest.fixture
def store(home):
    return LocalStore(home)


def test_a_job_that_is_being_submitted_has_not_failed(store):
    """The status, read after each step of a submission, is FAILED only once a supervisor began."""
    backend = local(store)
    ref = JobRef(
        "job-00000001", Place("local", "gke"), "cpu", "train", "train", 0.0, store.uri, hosts=1
    )
    folder = store.path("jobs/job-00000001/local")
    assert phase_of(backend, ref) is JobStatus.NOT_FOUND
    folder.mkdir(parents=True)
    assert phase_of(backend, ref) is JobStatus.NOT_FOUND
    (folder / "lock").touch()
    assert phase_of(backend, ref) is JobStatus.NOT_FOUND
    (folder / "lock").write_text("held\n")
    assert phase_of(backend, ref) is JobStatus.FAILED, "a supervisor began, and is gone"


def test_a_job_that_begins_while_it_is_looked_at_has_not_failed(store, monkeypatch):
    ref = JobRef(
        "job-00000002", Place("local", "gke"), "cpu", "train", "train", 0.0, store.uri, hosts=1
    )
    folder = store.path("jobs/job-00000002/local")
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    answers = []

    def is_held_a_moment_later(path):
        answers.append(locks.is_record_held(path))
        path.write_text("held\n")  # The supervisor starts at this moment.
        return answers[-1]

    fake_locks = SimpleNamespace(is_record_held=is_held_a_moment_later)
    monkeypatch.setattr("kinetic._backends.local.backend.locks", fake_locks)
    assert phase_of(local(store), ref) is JobStatus.NOT_FOUND
    assert answers == [False]


def test_a_slice_that_memory_cannot_hold_is_refused_with_what_fits(store):
    small = local(store, available_memory_bytes=lambda: 1 << 30)
    with pytest.raises(InsufficientMemory, match="enough for 7 hosts") as caught:
        small.preflight(planned(store, speak, "tpu-v6e-256"))
    assert isinstance(caught.value, PreflightError)
    assert (caught.value.hosts, caught.value.hosts_that_fit) == (64, 7)
    small.preflight(planned(store, speak, "tpu-v6e-16"))


def test_a_machine_that_does_not_tell_its_memory_is_trusted(store):
    local(store, available_memory_bytes=lambda: None).preflight(
        planned(store, speak, "tpu-v6e-256")
    )


def test_a_machine_without_linux_is_refused(store):
    with pytest.raises(PreflightError, match="on Linux only; this is macOS"):
        local(store, system="darwin").preflight(planned(store, speak, "cpu"))


def test_the_lock_is_free_when_the_supervisor_is_gone(store):
    backend = local(store)
    ref = submitted(backend, store, wait_for_ever)
    processes = backend.processes(ref)
    while not processes:
        processes = backend.processes(ref)
    os.kill(processes.supervisor, 9)
    read(backend, ref)
    assert phase_of(backend, ref) is JobStatus.FAILED
    assert backend.processes(ref) is None


STARTS_OVER = """
import fcntl, os, pathlib, sys
_, path, done, left = sys.argv[1:]
if left == "30":
    lock = os.open(path, os.O_RDWR)
    fcntl.lockf(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    print("held", flush=True)
if left != "0":
    os.execv(sys.executable, [*sys.orig_argv[:-1], str(int(left) - 1)])
pathlib.Path(done).touch()
sys.stdin.read()
"""


def test_a_supervisor_that_becomes_that_of_the_next_attempt_is_found(home):
    """A supervisor starts the next attempt by an exec, during which its command line is empty for a
    moment. It must be found even then, so that a cancellation is not lost."""
    home.mkdir(parents=True)
    lock, done = home / "lock", home / "done"
    lock.touch()
    command = [sys.executable, "-S", "-c", STARTS_OVER, "kinetic-supervisor", lock, done, "30"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout.readline() == b"held\n"
        supervisors = set()
        while not done.exists():
            supervisors.add(liveness.supervisor(lock))
    assert supervisors == {supervisor.pid}


HOLDS_THE_LOCK = """
import fcntl, os, sys
fcntl.lockf(os.open(sys.argv[2], os.O_RDWR), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
NEVER_S = 200.0
PATIENCE_S = 100.0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no pidfds")
def test_a_follower_is_woken_by_output_by_the_verdict_and_by_the_end(home, monkeypatch):
    monkeypatch.setattr(liveness, "_WAKE_AFTER_S", NEVER_S)
    home.mkdir(parents=True)
    lock, index = home / "lock", home / "log.idx"
    lock.touch()
    command = [sys.executable, "-S", "-c", HOLDS_THE_LOCK, "kinetic-supervisor", lock]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor,
        ThreadPoolExecutor(1) as pool,
    ):
        assert supervisor.stdout.readline() == b"held\n"
        watch = liveness.JobWatch(home, [index])
        for _ in range(3):
            waiting = pool.submit(watch.wait)
            with index.open("ab") as log:
                log.write(b"record")
            waiting.result(PATIENCE_S)
        with index.open("ab") as log:
            log.write(b"written between a read and the next wait")
        watch.wait()
        waiting = pool.submit(watch.wait)
        (home.parent / "outcome.json").write_text("{}")  # The supervisor has not ended yet.
        waiting.result(PATIENCE_S)
        waiting = pool.submit(watch.wait)
        supervisor.stdin.close()
        waiting.result(PATIENCE_S)
        watch.close()


def test_a_follower_bears_that_the_program_closes_its_descriptors(home, monkeypatch):
    home.mkdir(parents=True)
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    monkeypatch.setattr(liveness, "ending_fd", lambda _: closed)
    watch = liveness.JobWatch(home)
    for _ in range(2):
        watch.wait()
    watch.close()


def test_a_follower_of_a_job_of_another_machine_is_woken_now_and_then(home):
    """No process of the job runs on this machine, so the follower is woken by a time limit."""
    home.mkdir(parents=True)
    index = home / "log.idx"
    index.touch()
    watch = liveness.JobWatch(home, [index])
    for _ in range(2):
        watch.wait()
    watch.close()
