"""What only slices simulated on this machine promise: what they refuse, and how they tell whether a
job is alive."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from backend_cases import local, planned, read, speak, submitted, wait_for_ever

from kinetic._backends.base import phase_of
from kinetic._backends.local import liveness
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic.errors import InsufficientMemory, PreflightError


@pytest.fixture
def store(home):
    return LocalStore(home)


def test_a_job_that_is_being_submitted_has_not_failed(store):
    """Another process may look at it between any two of the steps."""
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
    told = backend.processes(ref)
    while not told:
        told = backend.processes(ref)
    os.kill(told.supervisor, 9)
    read(backend, ref)
    assert phase_of(backend, ref) is JobStatus.FAILED
    assert backend.processes(ref) is None


TAKEN_BYTES = 400 << 20


def take_much():
    return len(b"x" * TAKEN_BYTES)


def test_what_a_function_took_is_expected_of_its_next_run(store, caplog):
    backend = local(store)
    read(backend, submitted(backend, store, take_much))
    busy = local(store, available_memory_bytes=lambda: 800 << 20)
    for _ in range(2):
        busy.preflight(planned(store, take_much, "tpu-v6e-16"))
    (warning,) = caplog.messages
    assert re.fullmatch(
        r"kinetic: take_much took 0\.\d GiB on a host when it ran last: 4 hosts may need about .* "
        r"GiB.*",
        warning,
    )
    caplog.clear()
    local(store, available_memory_bytes=lambda: 8 << 30).preflight(
        planned(store, take_much, "tpu-v6e-16")
    )
    busy.preflight(planned(store, speak, "tpu-v6e-16"))
    assert caplog.messages == []


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
    """While a process becomes another program, its command line is empty for a moment; a wish to
    cancel must not be lost in it."""
    home.mkdir(parents=True)
    lock, done = home / "lock", home / "done"
    lock.touch()
    command = [sys.executable, "-S", "-c", STARTS_OVER, "kinetic-supervisor", lock, done, "30"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout.readline() == b"held\n"
        found = set()
        while not done.exists():
            found.add(liveness.supervisor(lock))
    assert found == {supervisor.pid}
