"""Batches of a decorated function: what is packaged once for all jobs, and what differs for each
job."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import InlineBackend

import kinetic
from kinetic import collections, errors
from kinetic._backends import registry
from kinetic._client.batch.sources import UNKNOWN_ROOM, CallingFunction
from kinetic._config import settings as configuration
from kinetic._core import layout
from kinetic._core.plan import Plan
from kinetic._source import bundle

PATIENCE_S = 200.0


@pytest.fixture
def backend():
    backends = []

    def make(place, store):
        backends.append(InlineBackend(store)) if not backends else None
        return backends[0]

    with registry.substitute_backend("local", make):
        yield lambda: backends[0]


@kinetic.run(accelerator="cpu")
def add(a, b=0):
    return a + b


def plans(batch):
    batch.wait(timeout=PATIENCE_S)
    store = batch._view.records.store
    return [
        Plan.from_json(json.loads(store.get(layout.JobKeys(job.job_id).plan))) for job in batch.jobs
    ]


@pytest.mark.starts_processes
def test_inputs_become_arguments(backend):
    batch = add.run_async_map([1, (1, 2), {"a": 1, "b": 3}, [4]])
    assert batch.results(timeout=PATIENCE_S) == [1, 3, 4, 4]
    assert (batch.name, batch.tags) == ("add", {})


@pytest.mark.starts_processes
def test_a_batch_has_the_name_of_its_jobs_unless_it_has_its_own(backend):
    named = add.with_options(name="sums")
    for own_name, name in ((None, "sums"), ("x", "x")):
        batch = named.run_async_map([1], name=own_name)
        assert (batch.name, plans(batch)[0].name) == (name, "sums")


@pytest.mark.starts_processes
def test_all_is_packaged_once(backend, monkeypatch):
    built = []
    monkeypatch.setattr(
        bundle, "build", lambda *a, real=bundle.build, **k: built.append(1) or real(*a, **k)
    )
    batch = add.run_async_map(range(5), tags=["one"], name="five")
    assert batch.results(timeout=PATIENCE_S) == [0, 1, 2, 3, 4]
    assert len(built) == 1
    submitted = plans(batch)
    assert len({plan.function for plan in submitted}) == 1
    assert len({plan.tree for plan in submitted}) == 1
    assert len({plan.payload for plan in submitted}) == 5
    assert [plan.labels for plan in submitted] == [
        {"group_id": batch.group_id, "group_kind": "map", "group_index": str(i)} for i in range(5)
    ]
    assert [job.job_id for job in kinetic.list_jobs() if job.group_id == batch.group_id][::-1] == [
        j.job_id for j in batch.jobs
    ]


@pytest.mark.starts_processes
def test_each_input_has_an_output_folder_of_its_own(backend, tmp_path):
    into = kinetic.run(accelerator="cpu", output_dir=str(tmp_path / "out"))(lambda x: x)
    submitted = plans(into.run_async_map([1, 2]))
    assert [plan.output_dir for plan in submitted] == [
        str(tmp_path / "out" / "0"),
        str(tmp_path / "out" / "1"),
    ]
    free = kinetic.run(accelerator="cpu")(lambda x: x)
    assert {plan.output_dir for plan in plans(free.run_async_map([1, 2]))} == {None}


@pytest.mark.starts_processes
def test_methods_can_be_mapped(backend):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @kinetic.run(accelerator="cpu")
        def times(self, x):
            return self.scale * x

    assert Model(3).times.run_async_map([1, 2]).results(timeout=PATIENCE_S) == [3, 6]


def submit_add(*args, **kwargs):
    return add.run_async(*args, **kwargs)


@pytest.mark.starts_processes
@pytest.mark.parametrize("form", [lambda f: f, lambda f: f.run_async, lambda f: submit_add])
def test_map_takes_what_submits(backend, form):
    batch = collections.map(form(add), [1, {"a": 2, "b": 5}], retries=1)
    assert batch.results(timeout=PATIENCE_S) == [1, 7]
    assert [(job.group_id, job.group_index) for job in batch.jobs] == [
        (batch.group_id, 0),
        (batch.group_id, 1),
    ]
    attached = kinetic.attach_batch(batch.group_id)
    assert attached.results(timeout=PATIENCE_S) == [1, 7]
    assert {job.group_id for job in kinetic.list_jobs()} == {batch.group_id}


def test_a_function_that_submits_by_itself_has_the_room_of_its_backend(backend):
    source = CallingFunction([], submit_add, configuration.load(), MemoryStore(), 0)
    assert source.room() == UNKNOWN_ROOM


@pytest.mark.starts_processes
def test_a_function_that_submits_gets_the_retries_of_the_batch(backend):
    by_itself = collections.map(submit_add, [1, 2], retries=2)
    decorated = add.run_async_map([1], retries=3)
    retried = add.with_options(retries=1).run_async_map([1])
    for batch, retries in ((by_itself, 2), (decorated, 3), (retried, 1)):
        assert {plan.options.retries for plan in plans(batch)} == {retries}


@pytest.mark.starts_processes
def test_only_the_job_of_the_call_belongs_to_the_batch(backend):
    other = add.run_async(5)

    def submit_twice(x):
        first = add.run_async(x)
        add.run_async(x + 1)
        return first

    assert collections.map(submit_twice, [1, 2]).results(timeout=PATIENCE_S) == [1, 2]
    assert sum(job.group_id is None for job in kinetic.list_jobs()) == 3
    results = collections.map(lambda x: other, [1]).results(
        timeout=PATIENCE_S, return_exceptions=True
    )
    assert "must submit a new job in each call" in str(results[0])


def test_a_job_that_would_go_to_another_store_than_its_batch_is_refused(
    backend, tmp_path, monkeypatch
):
    def submit(x):
        monkeypatch.setenv("KINETIC_STORE", f"file://{tmp_path}/other")
        return add.run_async(x)

    results = collections.map(submit, [1]).results(timeout=PATIENCE_S, return_exceptions=True)
    assert "Pass the same project= and cluster= to map" in str(results[0])


def test_map_tells_what_does_not_submit(backend):
    with pytest.raises(errors.UsageTypeError, match="submit_fn= must be a decorated function"):
        collections.map(3, [1])
    results = collections.map(lambda x: x, [1]).results(timeout=PATIENCE_S, return_exceptions=True)
    assert isinstance(results[0], errors.UsageTypeError)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([1, (1, 2, 3)], r"inputs\[1\]: add\(a, b=0\): too many"),
        ([{"c": 1}], r"inputs\[0\]: add"),
        ([[]], "missing a required"),
    ],
)
def test_an_input_that_does_not_fit_is_refused_before_anything_is_submitted(
    backend, home, inputs, words
):
    with pytest.raises(errors.UsageTypeError, match=words):
        add.run_async_map(inputs)
    assert not home.exists()


@pytest.mark.starts_processes
def test_a_function_that_cannot_be_pickled_is_refused_before_anything_is_submitted(backend, home):
    lock = threading.Lock()
    held = kinetic.run(accelerator="cpu")(lambda x: lock)
    with pytest.raises(errors.PicklingError, match="lock"):
        held.run_async_map([1])
    assert not (home / "groups").exists()


@pytest.mark.starts_processes
def test_a_machine_that_cannot_take_one_job_is_told_at_once(backend, home):
    add.run_async_map([1]).wait(timeout=PATIENCE_S)
    backend().refusal = errors.InsufficientMemory("too large", hosts=1)
    with pytest.raises(errors.InsufficientMemory):
        add.run_async_map([1])
    assert len(list((home / "groups").iterdir())) == 1


@pytest.mark.starts_processes
def test_an_argument_that_cannot_be_pickled_costs_only_its_own_input(backend):
    results = add.run_async_map([1, threading.Lock(), 3]).results(
        timeout=PATIENCE_S, return_exceptions=True
    )
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], errors.PicklingError)
    assert "rgument 1" in str(results[1])


class Gated(InlineBackend):
    """A backend that creates no job until its gate is open."""

    def __init__(self, store):
        super().__init__(store)
        self.gate = threading.Event()

    def submit(self, *job):
        assert self.gate.wait(PATIENCE_S)
        super().submit(*job)


@pytest.fixture
def gated():
    backends = []
    with registry.substitute_backend(
        "local", lambda _, store: backends.append(Gated(store)) or backends[-1]
    ):
        yield backends


@pytest.mark.starts_processes
def test_jobs_get_the_inputs_as_they_were_when_the_batch_began(gated):
    @kinetic.run(accelerator="cpu")
    def rate_of(config, where, lock=None):
        return config["rate"]

    config = {}
    runs = []
    for rate in (0.1, 0.2):
        config["rate"] = rate
        inputs = [{"config": config, "where": f"{rate}-{n}"} for n in range(2)]
        inputs.append({"config": config, "where": "never", "lock": threading.Lock()})
        runs.append(rate_of.run_async_map(inputs, max_concurrent=1))
    config["rate"] = "changed"
    for backend in gated:
        backend.gate.set()
    for rate, batch in zip((0.1, 0.2), runs, strict=True):
        *values, refused = batch.results(timeout=PATIENCE_S, return_exceptions=True)
        assert values == [rate, rate]
        assert "Keyword 'lock' cannot be pickled" in str(refused)


@pytest.mark.starts_processes
def test_a_large_function_is_stored_once(backend, home):
    large = "x" * 1_000_000
    length = kinetic.run(accelerator="cpu")(lambda n: len(large) + n)
    assert length.run_async_map(range(4)).results(timeout=PATIENCE_S) == [
        1_000_000 + n for n in range(4)
    ]
    sizes = [p.stat().st_size for p in Path(home / "blobs").rglob("*") if p.is_file()]
    assert sum(size > 900_000 for size in sizes) == 1


class Building(InlineBackend):
    """A backend that builds images, or raises `unbuilt`."""

    unbuilt = None

    def choose_image(self, plan, installed, tell):
        self.calls.append("choose_image")
        if self.unbuilt is not None:
            raise self.unbuilt
        return plan


@pytest.mark.starts_processes
def test_the_image_of_a_batch_is_there_before_its_first_record(home):
    backends = []
    with registry.substitute_backend(
        "local", lambda _, store: backends.append(Building(store)) or backends[0]
    ):
        batch = add.run_async_map([1, 2])
        batch.results(timeout=PATIENCE_S)
        first = backends[0].calls
        assert first.index("choose_image") < first.index("submit")
        backends.clear()
        Building.unbuilt = errors.PreflightError("no such package")
        try:
            with pytest.raises(errors.PreflightError, match="no such package"):
                add.run_async_map([1, 2])
        finally:
            Building.unbuilt = None
        assert "submit" not in backends[0].calls
    assert len(kinetic.list_jobs()) == 2
