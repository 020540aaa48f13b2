"""What every backend promises (see kinetic._backends.base.Backend), run over each one that there
is.

In: a backend over a fresh store. Out: its promises, kept. Called by pytest. A new backend is added
to `BACKENDS`.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time

import pytest

from kinetic._backends.base import LogRequest, Phase, Signals, phase_of
from kinetic._backends.local.backend import LocalBackend
from kinetic._config.settings import worker_environ
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.log_format import STDERR, STDOUT
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._core.ref import JobRef, new_job_id
from kinetic._pickling import call
from kinetic._pickling.modules import Shipped
from kinetic._store.local import LocalStore
from kinetic.errors import InsufficientMemory, PreflightError


def local(store, **options):
    return LocalBackend(store, worker_environ(), **options)


BACKENDS = [pytest.param(local, id="local")]
UNSUCCESSFUL = (Phase.FAILED, Phase.CANCELLED)
"""What a backend may say of a cancelled job: not every one knows why its job has ended."""


@pytest.fixture
def store(home):
    return LocalStore(home)


@pytest.fixture(params=BACKENDS)
def backend(request, store):
    return request.param(store)


def planned(store, func, accelerator="cpu", **more):
    packed = call.pack(func, (), {}, env_vars={}, shipped=Shipped())
    store.put(layout.blob(packed.digest), packed.data, if_absent=True)
    return Plan(
        job_id=new_job_id(),
        name=func.__name__,
        place=Place("local", "gke"),
        topology=resolve(accelerator),
        payload=Blob(packed.digest, packed.size_bytes),
        versions=packed.versions,
        created_at=1_700_000_000.0,
        **more,
    )


def test_a_job_that_is_being_submitted_has_not_failed(store):
    """Another process may look at it between any two of the steps."""
    backend = local(store)
    ref = JobRef(
        "job-00000001", Place("local", "gke"), "cpu", "train", "train", 0.0, store.uri, hosts=1
    )
    folder = store.path("jobs/job-00000001/local")
    assert phase_of(backend, ref) is Phase.NOT_FOUND
    folder.mkdir(parents=True)
    assert phase_of(backend, ref) is Phase.NOT_FOUND
    (folder / "lock").touch()
    assert phase_of(backend, ref) is Phase.NOT_FOUND
    (folder / "lock").write_text("held\n")
    assert phase_of(backend, ref) is Phase.FAILED, "a supervisor began, and is gone"


def submitted(backend, store, func, **more):
    plan = planned(store, func, **more)
    ref = JobRef(
        plan.job_id,
        Place(backend.name, "gke"),
        plan.topology.name,
        plan.name,
        plan.name,
        0.0,
        store.uri,
        hosts=plan.hosts,
    )
    store.put(layout.ref(plan.job_id), json.dumps(ref.to_json()).encode())
    store.put(layout.plan(plan.job_id), json.dumps(plan.to_json()).encode())
    backend.submit(ref, backend.render(plan), {})
    return ref


def read(backend, ref, **request):
    return [chunk for chunk in backend.logs(ref, LogRequest(**request)) if chunk is not None]


def text(chunks, stream=STDOUT):
    return b"".join(c.data for c in chunks if c.stream == stream)


def speak():
    print("one", flush=True)
    print("two", file=sys.stderr, flush=True)
    print("three", flush=True)


def wait_for_ever():
    print("waiting", flush=True)
    time.sleep(1000)


def test_rendering_is_pure_and_plain(backend, store):
    plan = planned(store, speak)
    before = sorted(store.list("jobs")), sorted(store.list("blobs"))
    documents = backend.render(plan)
    assert documents == backend.render(plan)
    assert json.loads(json.dumps(documents)) == documents
    assert (sorted(store.list("jobs")), sorted(store.list("blobs"))) == before


def test_output_comes_in_order_and_following_ends(backend, store):
    ref = submitted(backend, store, speak)
    chunks = read(backend, ref)
    assert text(chunks) == b"one\nthree\n"
    assert text(chunks, STDERR) == b"two\n"
    assert phase_of(backend, ref) is Phase.SUCCEEDED


def test_output_goes_on_after_any_chunk(backend, store):
    ref = submitted(backend, store, speak)
    whole = read(backend, ref)
    for number, chunk in enumerate(whole):
        for follow in (False, True):
            rest = read(backend, ref, follow=follow, after={0: chunk.end})
            assert rest == whole[number + 1 :]
            assert [c.end for c in rest] == [c.end for c in whole[number + 1 :]]


def test_a_tail_begins_where_its_first_chunk_says(backend, store):
    ref = submitted(backend, store, speak)
    lines = b"".join(chunk.data for chunk in read(backend, ref)).splitlines(keepends=True)
    begins, *rest = read(backend, ref, tail=2)
    assert begins.data == b""
    for chunks in (rest, read(backend, ref, after={0: begins.end})):
        assert b"".join(chunk.data for chunk in chunks) == b"".join(lines[1:])


def test_an_ended_job_can_be_read_again(backend, store):
    ref = submitted(backend, store, speak)
    first = read(backend, ref)
    assert text(read(backend, ref, follow=False)) == text(read(backend, ref)) == text(first)
    assert text(read(backend, ref, tail=1)) == b"three\n"


def test_a_follower_is_never_kept_waiting_for_long(backend, store):
    ref = submitted(backend, store, wait_for_ever)
    follower = backend.logs(ref, LogRequest())
    silent = 0
    while silent < 20:
        silent = silent + 1 if next(follower) is None else 0
    follower.close()
    backend.cancel(ref)
    read(backend, ref)


def test_cancel_stops_the_job_and_is_harmless_afterwards(backend, store):
    ref = submitted(backend, store, wait_for_ever)
    backend.cancel(ref)
    read(backend, ref)
    assert phase_of(backend, ref) in UNSUCCESSFUL
    backend.cancel(ref)
    backend.cleanup(ref)
    backend.cleanup(ref)
    assert phase_of(backend, ref) in UNSUCCESSFUL


def test_an_unknown_job_is_not_found(backend, store):
    ref = JobRef("job-00000000", Place(backend.name, "gke"), "cpu", "f", "f", 0.0, store.uri)
    assert phase_of(backend, ref) is Phase.NOT_FOUND
    assert read(backend, ref) == []
    backend.cancel(ref)
    backend.cleanup(ref)


def test_phases_follow_the_job(backend, store):
    ref = submitted(backend, store, wait_for_ever)
    follower = backend.logs(ref, LogRequest())
    while next(follower) is None:
        assert phase_of(backend, ref) in (Phase.PENDING, Phase.RUNNING)
    assert phase_of(backend, ref) is Phase.RUNNING
    follower.close()
    backend.cancel(ref)
    read(backend, ref)


def test_a_signal_of_the_end_comes_with_the_end(backend, store):
    if not isinstance(backend, Signals):
        pytest.skip("optional")
    ref = submitted(backend, store, wait_for_ever)
    follower = backend.logs(ref, LogRequest())
    while next(follower) is None:
        pass
    follower.close()
    ends = backend.ending_fd(ref)
    assert select.select([ends], [], [], 0)[0] == []
    backend.cancel(ref)
    assert select.select([ends], [], [], 30)[0] == [ends]
    assert phase_of(backend, ref) in UNSUCCESSFUL, "what was signalled can be seen"
    os.close(ends)
    assert backend.ending_fd(ref) is None


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
    with pytest.raises(PreflightError, match="need Linux; this is 'darwin'"):
        local(store, system="darwin").preflight(planned(store, speak, "cpu"))


def test_the_lock_is_free_when_the_supervisor_is_gone(backend, store):
    ref = submitted(backend, store, wait_for_ever)
    told = backend.processes(ref)
    while not told:
        told = backend.processes(ref)
    os.kill(told.supervisor, 9)
    read(backend, ref)
    assert phase_of(backend, ref) is Phase.FAILED
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
