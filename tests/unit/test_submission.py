"""Submitting a job: the order in which records are written, and the records left by an error."""

from __future__ import annotations

import dataclasses
import json

import laptop_fakes
import pytest
from laptop_fakes import FakeBackend, plan

from kinetic import errors
from kinetic._client import submission
from kinetic._core import layout
from kinetic._core.plan import Blob, Plan
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore

PAYLOAD = b"payload"
DIGEST = "ab" * 32


class RecordingStore(LocalStore):
    """A store that records the order of its writes. It raises `error` when a key begins with
    `fails_at`."""

    def __init__(self, root, fails_at="", error=None):
        super().__init__(root)
        self.written = []
        self.fails_at = fails_at
        self.error = error

    def put(self, key, data, *, if_absent=False):
        if self.fails_at and key.startswith(self.fails_at):
            raise self.error
        self.written.append(key)
        return super().put(key, data, if_absent=if_absent)


@pytest.fixture
def planned():
    named = plan(payload=Blob(DIGEST, len(PAYLOAD)), secrets=("TOKEN",))
    return laptop_fakes.planned(named, PAYLOAD, secrets={"TOKEN": "hunter2"})


def test_the_order_of_writes(tmp_path, planned):
    store = RecordingStore(tmp_path)
    backend = FakeBackend(store)
    ref = submission.submit(planned, backend, store)
    assert store.written == [
        layout.blob(DIGEST),
        layout.JobKeys(ref.job_id).plan,
        layout.JobKeys(ref.job_id).ref,
    ]
    assert backend.calls == ["preflight", "render", "submit"]
    assert backend.secrets == {"TOKEN": "hunter2"}
    assert JobRef.from_json(json.loads(store.get(layout.JobKeys(ref.job_id).ref))) == ref
    assert Plan.from_json(json.loads(store.get(layout.JobKeys(ref.job_id).plan))) == planned.plan
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]
    assert (ref.backend, ref.place.requested, ref.hosts, ref.store_uri) == (
        "local",
        "pathways",
        4,
        str(tmp_path),
    )


@pytest.mark.parametrize(("joins_jax", "name"), [("program", "train.py"), (True, "py")])
def test_the_name_of_a_function_and_of_a_program(planned, joins_jax, name):
    options = dataclasses.replace(planned.plan.options, joins_jax=joins_jax)
    named = dataclasses.replace(planned.plan, name="train.py", options=options)
    assert submission.ref_of(named, "/store").func_name == name


def test_what_pods_install_is_sent_once(tmp_path, planned):
    archive, listed = ("1" * 64, b"archive"), ("2" * 64, b"numpy\n")
    changes = {"runtime": Blob(archive[0], 7), "requirements": Blob(listed[0], 6)}
    planned = dataclasses.replace(
        planned,
        plan=dataclasses.replace(planned.plan, **changes),
        installed=dict([archive, listed]),
    )
    store = RecordingStore(tmp_path)
    submission.submit(planned, FakeBackend(store), store)
    first = store.written[:]
    assert {layout.blob(archive[0]), layout.blob(listed[0])} <= set(first)
    assert first.index(layout.JobKeys(planned.plan.job_id).plan) > first.index(
        layout.blob(listed[0])
    )
    assert store.get(layout.blob(listed[0])) == b"numpy\n"
    stored_plan = Plan.from_json(json.loads(store.get(layout.JobKeys(planned.plan.job_id).plan)))
    assert stored_plan == planned.plan
    second_plan = dataclasses.replace(
        planned, plan=dataclasses.replace(planned.plan, job_id="job-00000002")
    )
    store.written.clear()
    submission.submit(second_plan, FakeBackend(store), store)
    assert not {layout.blob(archive[0]), layout.blob(listed[0])} & set(store.written)


def test_a_refusal_comes_before_the_first_write(tmp_path, planned):
    store = RecordingStore(tmp_path / "store")
    backend = FakeBackend(store)
    backend.refusal = errors.InsufficientMemory("too big", hosts=4, hosts_that_fit=1)
    with pytest.raises(errors.InsufficientMemory):
        submission.submit(planned, backend, store)
    assert store.written == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("place", ["blobs", "jobs", "refs"])
@pytest.mark.parametrize(
    "error",
    [errors.StoreFull("no space left"), errors.StoreError("read-only"), KeyboardInterrupt()],
)
def test_a_store_that_fails_leaves_no_job(tmp_path, planned, place, error):
    store = RecordingStore(tmp_path, fails_at=place, error=error)
    backend = FakeBackend(store)
    with pytest.raises(type(error)):
        submission.submit(planned, backend, store)
    assert "submit" not in backend.calls
    assert list(store.list(layout.JOBS)) == []
    assert list(store.list(layout.REFS)) == []


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (OSError("Resource temporarily unavailable"), errors.SubmitError),
        (errors.PreflightError("now full"), errors.PreflightError),
    ],
)
def test_a_backend_that_fails_leaves_no_job(tmp_path, planned, failure, kind):
    store = LocalStore(tmp_path)
    backend = FakeBackend(store)
    backend.failure = failure
    with pytest.raises(kind, match=str(failure)) as caught:
        submission.submit(planned, backend, store)
    assert caught.value is failure or caught.value.__cause__ is failure
    assert list(store.list(layout.JOBS)) == []
    assert list(store.list(layout.REFS)) == []


@pytest.mark.parametrize("answers_again", [True, False])
def test_a_backend_that_may_have_made_a_part_of_the_job(tmp_path, planned, answers_again):
    store = LocalStore(tmp_path)
    backend = FakeBackend(store)
    backend.failure = errors.BackendUnavailable("The cluster does not answer.")

    def cancel(ref):
        raise errors.BackendUnavailable("still no route")

    if not answers_again:
        backend.cancel = cancel
    with pytest.raises(errors.BackendUnavailable, match="The cluster does not answer"):
        submission.submit(planned, backend, store)
    keys = [layout.JobKeys(planned.plan.job_id).ref]
    assert list(store.list(layout.REFS)) == ([] if answers_again else keys)
    assert ("cancel" in backend.calls) is answers_again


class Alarm(Exception):
    """An exception that a user's handler of SIGALRM raises."""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeoutError, Alarm])
def test_ctrl_c_while_the_job_is_created(tmp_path, planned, monkeypatch, interrupt):
    store = LocalStore(tmp_path)
    backend = FakeBackend(store)
    backend.failure = interrupt()
    with pytest.raises(interrupt):
        submission.submit(planned, backend, store)
    assert backend.calls[-1] == "cancel"
    assert list(store.list(layout.REFS)) == [], "it was not created"

    backend.phases[planned.plan.job_id] = JobStatus.RUNNING
    monkeypatch.setattr(submission, "TAKE_BACK_S", 0.5)
    with pytest.raises(interrupt):
        submission.submit(planned, backend, store)
    assert list(store.list(layout.REFS)) == [layout.JobKeys(planned.plan.job_id).ref], (
        "it was created: it can be found"
    )


def test_ctrl_c_when_the_backend_does_not_answer(tmp_path, planned):
    store = LocalStore(tmp_path)
    backend = FakeBackend(store)
    backend.failure = KeyboardInterrupt()

    def status(refs):
        raise errors.BackendUnavailable("no route")

    backend.status = status
    with pytest.raises(KeyboardInterrupt):
        submission.submit(planned, backend, store)
    assert list(store.list(layout.REFS)) == [layout.JobKeys(planned.plan.job_id).ref], (
        "it may have been created: it can be found"
    )


def test_records_that_cannot_be_removed_can_still_be_found(tmp_path, planned, caplog):
    class Stubborn(LocalStore):
        def delete(self, prefix):
            raise errors.StoreError("The store is read-only.")

    store = Stubborn(tmp_path)
    backend = FakeBackend(store)
    backend.failure = errors.SubmitError("no")
    with pytest.raises(errors.SubmitError, match="no"):
        submission.submit(planned, backend, store)
    assert list(store.list(layout.REFS)) == [layout.JobKeys(planned.plan.job_id).ref]
    assert "The store is read-only." in caplog.text


def test_an_id_that_is_taken_does_not_touch_the_other_job(tmp_path, planned):
    store = LocalStore(tmp_path)
    submission.submit(planned, FakeBackend(store), store)
    before = {key: store.get(key) for key in store.list("")}
    with pytest.raises(errors.SubmitError, match="already has the id"):
        submission.submit(planned, FakeBackend(store), store)
    assert {key: store.get(key) for key in store.list("")} == before


class Building(FakeBackend):
    """A backend that builds images. It raises `unbuilt` if that is set."""

    unbuilt: BaseException | None = None

    def choose_image(self, plan, installed, tell):
        self.calls.append("choose_image")
        if self.unbuilt is not None:
            raise self.unbuilt
        return dataclasses.replace(plan, place=dataclasses.replace(plan.place, image="bundled"))


def test_the_image_comes_before_the_first_write(tmp_path, planned):
    store = RecordingStore(tmp_path)
    backend = Building(store)
    ref = submission.submit(planned, backend, store)
    wanted = ["preflight", "choose_image", "render", "submit"]
    assert backend.calls == wanted
    assert ref.place.image == "bundled"
    stored_plan = Plan.from_json(json.loads(store.get(layout.JobKeys(ref.job_id).plan)))
    assert stored_plan.place.image == "bundled"


@pytest.mark.parametrize(
    "error",
    [errors.PreflightError("no"), errors.BackendUnavailable("no answer"), KeyboardInterrupt()],
)
def test_an_image_that_cannot_be_had_leaves_nothing(tmp_path, planned, error):
    store = RecordingStore(tmp_path / "store")
    backend = Building(store)
    backend.unbuilt = error
    with pytest.raises(type(error)):
        submission.submit(planned, backend, store)
    assert store.written == []
    assert backend.calls == ["preflight", "choose_image"]
