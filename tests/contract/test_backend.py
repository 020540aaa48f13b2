"""The contract of backends (see kinetic._backends.base), tested with every backend.

Each test is marked with the promise that it checks: its number in `Backend`, or the name of an
optional protocol. Tests of protocols that a backend lacks are skipped.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import select
import signal
import time
from dataclasses import replace

import pytest
from backend_cases import BACKENDS, planned, read, speak, submitted, text, wait_for_ever

from kinetic._backends import base
from kinetic._backends.base import (
    Backend,
    BuildsImages,
    Capacity,
    Controls,
    Explains,
    Kills,
    LogRequest,
    Processes,
    Signals,
    Tunnels,
    WarmUp,
    phase_of,
)
from kinetic._core import layout
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.log_format import STDERR
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic.errors import PreflightError, StoreError

UNSUCCESSFUL = (JobStatus.FAILED, JobStatus.CANCELLED)
"""States that a cancelled job may have: some backends do not know why a job has ended."""


@pytest.fixture(params=BACKENDS)
def case(request):
    return request.param


@pytest.fixture
def store(case, home):
    _, opened = case
    with opened(home) as store:
        yield store


@pytest.fixture
def backend(case, store):
    make, _ = case
    return make(store)


@pytest.fixture
def spoken(backend, store):
    """The reference of an ended job, and all chunks of output that a follower got."""
    ref = submitted(backend, store, speak)
    return ref, read(backend, ref)


@pytest.fixture
def begun(backend, store):
    """The reference of a job just submitted, which will print a line and then wait forever."""
    ref = submitted(backend, store, wait_for_ever)
    yield ref
    ended(backend, ref)


@pytest.fixture
def talking(backend, begun):
    """The reference of a running job that has printed a line."""
    await_output(backend, begun)
    return begun


def needs(backend, protocol):
    if not isinstance(backend, protocol):
        pytest.skip(f"{backend.name} has no {protocol.__name__}")


def running(backend, store, func=wait_for_ever, **more):
    """Submit a job and wait for its first output; return the job's reference and the output."""
    ref = submitted(backend, store, func, **more)
    return ref, await_output(backend, ref)


def await_output(backend, ref):
    follower = backend.logs(ref, LogRequest())
    while (chunk := next(follower)) is None:
        pass
    follower.close()
    return chunk.data


def ended(backend, ref):
    """Stop a job, and read its output until it ends."""
    backend.cancel(ref)
    read(backend, ref)


def test_every_promise_has_a_test():
    numbers = set(map(int, re.findall(r"^    (\d+)\. ", inspect.getdoc(Backend), re.MULTILINE)))
    optional = {
        value.__name__
        for value in vars(base).values()
        if (value.__doc__ or "").startswith("Optional: ") and value.__module__ == base.__name__
    }
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    held = {mark.args[0] for mark in marks if mark.name == "promise"}
    assert held == numbers | optional


@pytest.mark.promise(1)
def test_what_cannot_run_here_is_refused_and_leaves_nothing(backend, store):
    largest = max(catalog_rows(), key=lambda row: row.hosts)
    plan = planned(store, speak, largest.name)
    before = sorted(store.list(""))
    with pytest.raises(PreflightError, match=r"\d+ hosts"):
        backend.preflight(plan)
    assert sorted(store.list("")) == before
    backend.preflight(planned(store, speak))


@pytest.mark.promise(3)
def test_a_job_that_was_submitted_is_known_at_once_to_another_backend_object(store, case, begun):
    other = case[0](store)
    assert phase_of(other, begun) is not JobStatus.NOT_FOUND
    assert await_output(other, begun) == b"waiting\n"


@pytest.mark.promise(4)
def test_many_jobs_are_asked_for_at_once(backend, store, spoken, talking):
    over, going_on = spoken[0], talking
    unknown = JobRef("job-0000000f", Place(backend.name, "gke"), "cpu", "f", "f", 0.0, store.uri)
    statuses = backend.status([over, unknown, going_on])
    assert {job_id: status.phase for job_id, status in statuses.items()} == {
        over.job_id: JobStatus.SUCCEEDED,
        going_on.job_id: JobStatus.RUNNING,
        unknown.job_id: JobStatus.NOT_FOUND,
    }
    assert all(isinstance(status.reason, str) for status in statuses.values())
    assert not backend.status([])


def fail_once():
    attempt = os.environ["KINETIC_ATTEMPT"]
    print(f"begin {attempt}", flush=True)
    print(f"end {attempt}", flush=True)
    if attempt == "1":
        os._exit(7)


@pytest.mark.promise(5)
def test_the_output_of_attempts_comes_in_order_and_goes_on_after_any_chunk(backend, store):
    ref = submitted(backend, store, fail_once, retries=1)
    whole = read(backend, ref, failures=False)
    assert text(whole) == b"begin 1\nend 1\nbegin 2\nend 2\n"
    assert [c.end for c in whole] == sorted({c.end for c in whole})
    for number, chunk in enumerate(whole):
        rest = read(backend, ref, follow=False, failures=False, after={0: chunk.end})
        assert rest == whole[number + 1 :]


@pytest.mark.promise(2)
def test_rendering_is_pure_and_plain(backend, store):
    plan = planned(store, speak)
    before = sorted(store.list("jobs")), sorted(store.list("blobs"))
    documents = backend.render(plan)
    assert documents == backend.render(plan)
    assert json.loads(json.dumps(documents)) == documents
    assert (sorted(store.list("jobs")), sorted(store.list("blobs"))) == before


@pytest.mark.promise(5)
def test_output_comes_in_order_and_following_ends(backend, spoken):
    ref, chunks = spoken
    assert text(chunks) == b"one\nthree\n"
    assert text(chunks, STDERR) == b"two\n"
    assert phase_of(backend, ref) is JobStatus.SUCCEEDED


@pytest.mark.promise(5)
def test_output_goes_on_after_any_chunk(backend, spoken):
    ref, whole = spoken
    for number, chunk in enumerate(whole):
        for follow in (False, True):
            rest = read(backend, ref, follow=follow, after={0: chunk.end})
            assert rest == whole[number + 1 :]
            assert [c.end for c in rest] == [c.end for c in whole[number + 1 :]]


@pytest.mark.promise(5)
def test_a_tail_begins_where_its_first_chunk_says(backend, spoken):
    ref, whole = spoken
    lines = b"".join(chunk.data for chunk in whole).splitlines(keepends=True)
    begins, *rest = read(backend, ref, tail=2)
    assert begins.data == b""
    for chunks in (rest, read(backend, ref, after={0: begins.end})):
        assert b"".join(chunk.data for chunk in chunks) == b"".join(lines[1:])


@pytest.mark.promise(5)
def test_an_ended_job_can_be_read_again(backend, spoken):
    ref, first = spoken
    assert text(read(backend, ref, follow=False)) == text(read(backend, ref)) == text(first)
    assert text(read(backend, ref, tail=1)) == b"three\n"


@pytest.mark.promise(5)
def test_a_follower_is_never_kept_waiting_for_long(backend, begun):
    follower = backend.logs(begun, LogRequest())
    silent = 0
    while silent < 20:
        silent = silent + 1 if next(follower) is None else 0
    follower.close()


@pytest.mark.promise(6)
def test_cancel_stops_the_job_and_is_harmless_afterwards(backend, store):
    ref = submitted(backend, store, wait_for_ever)
    backend.cancel(ref)
    read(backend, ref)
    assert phase_of(backend, ref) in UNSUCCESSFUL
    backend.cancel(ref)
    backend.cleanup(ref)
    backend.cleanup(ref)
    assert phase_of(backend, ref) in UNSUCCESSFUL


@pytest.mark.promise(4)
def test_an_unknown_job_is_not_found(backend, store):
    ref = JobRef("job-00000000", Place(backend.name, "gke"), "cpu", "f", "f", 0.0, store.uri)
    assert phase_of(backend, ref) is JobStatus.NOT_FOUND
    assert read(backend, ref) == []
    backend.cancel(ref)
    backend.cleanup(ref)


@pytest.mark.promise(4)
def test_phases_follow_the_job(backend, begun):
    follower = backend.logs(begun, LogRequest())
    while next(follower) is None:
        assert phase_of(backend, begun) in (JobStatus.PENDING, JobStatus.RUNNING)
    while phase_of(backend, begun) is JobStatus.PENDING:  # A cluster's status is up to 2 s old.
        next(follower)
    assert phase_of(backend, begun) is JobStatus.RUNNING
    follower.close()


@pytest.mark.promise("Signals")
def test_a_signal_of_the_end_comes_with_the_end(backend, store):
    needs(backend, Signals)
    ref = submitted(backend, store, wait_for_ever)
    follower = backend.logs(ref, LogRequest())
    while next(follower) is None:
        pass
    follower.close()
    ends = backend.ending_fd(ref)
    if ends is None and backend.name == "session":
        ended(backend, ref)
        pytest.skip("callers on this machine watch the files of a call")
    assert select.select([ends], [], [], 0)[0] == []
    backend.cancel(ref)
    assert select.select([ends], [], [], 30)[0] == [ends]
    assert phase_of(backend, ref) in UNSUCCESSFUL, "what was signalled can be seen"
    os.close(ends)
    assert backend.ending_fd(ref) is None


@pytest.mark.promise(7)
def test_cleaning_up_leaves_the_records(backend, store, spoken):
    ref, _ = spoken
    before = {key for key in store.list(layout.JobKeys(ref.job_id).prefix) if "/local/" not in key}
    for _ in range(2):
        backend.cleanup(ref)
    assert before <= set(store.list(layout.JobKeys(ref.job_id).prefix))
    assert text(read(backend, ref)) == b"one\nthree\n"


@pytest.mark.promise("WarmUp")
def test_nothing_depends_on_warming_up(backend, store):
    needs(backend, WarmUp)
    backend.warm_up(needs_jax=False, variables={"SEED": "1"})
    assert text(read(backend, submitted(backend, store, speak))) == b"one\nthree\n"


@pytest.mark.promise("Processes")
def test_the_processes_of_a_running_job_are_known(backend, store):
    needs(backend, Processes)
    ref, _ = running(backend, store)
    while (processes := backend.processes(ref)) is None:  # They are recorded once they run.
        time.sleep(0.01)
    assert list(processes.agents) == [0]
    for pid in (processes.supervisor, *processes.agents.values()):
        assert pid is None or os.kill(pid, 0) is None
    ended(backend, ref)
    while backend.processes(ref) is not None:  # They end after the verdict.
        time.sleep(0.01)


def answer_one_call():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        with server.accept()[0] as caller:
            while data := caller.recv(100):
                caller.sendall(data.upper())
            caller.sendall(b"!")


@pytest.mark.promise("Tunnels")
def test_a_tunnel_reaches_a_port_of_a_host(backend, store):
    needs(backend, Tunnels)
    ref, port = running(backend, store, answer_one_call)
    connection = backend.connect(ref, 0, int(port))
    connection.write(b"hello")
    assert connection.read() == b"HELLO"
    connection.finish()
    if backend.name != "gke":  # Kubernetes' port-forward cannot end one direction alone.
        assert connection.read() == b"!"
    assert connection.read() == b""
    for _ in range(2):
        connection.end()
        connection.close()
    read(backend, ref)
    assert phase_of(backend, ref) is JobStatus.SUCCEEDED
    if backend.name != "gke":  # Kubernetes fails only at the first write.
        with pytest.raises(OSError, match="refused"):
            backend.connect(ref, 0, int(port))


@pytest.mark.promise("Controls")
def test_only_a_running_job_can_be_called(backend, store):
    needs(backend, Controls)
    ref, _ = running(backend, store)
    while backend.control(ref) is None:  # Output may come before the record of the leader.
        time.sleep(0.01)
    ended(backend, ref)
    assert backend.control(ref) is None


@pytest.mark.promise("Capacity")
def test_there_is_always_room_for_one(backend, store):
    needs(backend, Capacity)
    assert backend.room(None) >= 1
    assert backend.room(planned(store, speak)) >= 1


@pytest.mark.promise(4)
def test_a_store_that_does_not_answer_is_no_verdict(backend, store, talking, monkeypatch):
    """`status` raises if the store does not answer; it does not call the running job ended."""
    ref = talking
    while phase_of(backend, ref) is JobStatus.PENDING:  # The status may be slightly old.
        time.sleep(0.01)

    def unreachable(key):
        raise StoreError("The store is out of reach.")

    with monkeypatch.context() as patched:
        patched.setattr(store, "get", unreachable)
        with pytest.raises(StoreError, match="out of reach"):
            backend.status([ref])
    assert phase_of(backend, ref) is JobStatus.RUNNING


@pytest.mark.promise("BuildsImages")
def test_a_job_that_names_its_image_runs_that_one(backend, store):
    needs(backend, BuildsImages)
    plan, notices = planned(store, speak), []
    named = replace(plan, place=replace(plan.place, image="registry.example/mine:1"))
    before = sorted(store.list(""))
    assert backend.choose_image(named, {}, notices.append) == named
    assert sorted(store.list("")) == before
    assert notices == []


@pytest.mark.promise("Explains")
def test_a_job_that_runs_or_has_ended_waits_for_nothing(backend, spoken, talking):
    needs(backend, Explains)
    until = time.monotonic() + 200.0
    # The status may be slightly old.
    while backend.why_waiting(talking) is not None:
        assert time.monotonic() < until, "a job that runs waits for something"
        time.sleep(0.01)
    over, _ = spoken
    assert backend.why_waiting(over) is None
    assert backend.why_lost(over, 0) == ""


@pytest.mark.promise("Kills")
@pytest.mark.parametrize("agents", [False, True])
def test_a_host_can_be_killed_and_the_job_fails(backend, talking, agents):
    needs(backend, Kills)
    ref = talking
    assert backend.kill(ref, (1,), signal.SIGKILL, agents=agents) == (), "there is no host 1"
    while not backend.kill(ref, (0,), signal.SIGKILL, agents=agents):
        time.sleep(0.01)  # The status of its pod may be slightly old.
    read(backend, ref)
    while not (phase := phase_of(backend, ref)).ended:
        time.sleep(0.01)
    assert phase is JobStatus.FAILED
    assert backend.kill(ref, (0,), signal.SIGKILL, agents=agents) == ()
