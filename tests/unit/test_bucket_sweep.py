"""Sweeps (removals of unused content) of a bucket while jobs are submitted.

A sweep may interrupt a submission at any request: the job finds all content that its plan names.
If a submission interrupts a sweep, at worst the job must be submitted again. All content is a month
old when a test begins. The double of Cloud Storage calls back before each answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.storage")

from doubles.gcs import Double, serving
from forks import Forks

from kinetic._core import layout
from kinetic._core.plan import Tree
from kinetic._source import bundle, packs
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store import index
from kinetic._store.gc_lock import content_age_s, lock_for_submission
from kinetic._store.gcs import GcsStore
from kinetic.cli import pruning
from kinetic.errors import CorruptRecord

MONTH_S = 30 * 86400.0
CONTENT = ("blobs/", "packs/", "trees/")


@pytest.fixture
def double(monkeypatch):
    with serving("bucket") as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.uri)
        yield running


def plant(root: Path, text: str = "") -> None:
    root.mkdir(exist_ok=True)
    for number in range(5):
        (root / f"{number}.py").write_text(f"{number}" * 100)
    (root / "changing.py").write_text(text)
    (root / "large").write_bytes(b"x" * (packs.SMALL_BYTES + 1))


def submit(place: Path, job_id: str, cache: str = "cache") -> Tree:
    """Send the project's tree and store a plan that names it, as a submission does."""
    store = GcsStore("gs://bucket")
    built = bundle.build(place / "root", cache_dir=place / cache)
    with lock_for_submission(store):
        upload(built, store)
        plan = {"tree": {"manifest": {"digest": built.tree.manifest.digest}}}
        store.put(layout.JobKeys(job_id).plan, json.dumps(plan).encode())
    store.put(layout.JobKeys(job_id).ref, b"{}")
    return built.tree


def arrives(place: Path, tree: Tree, dest: str) -> None:
    unpack(GcsStore("gs://bucket"), tree, place / dest)
    assert (place / dest / "large").stat().st_size == packs.SMALL_BYTES + 1


def sweep() -> pruning.Swept:
    store = GcsStore("gs://bucket")
    return pruning.sweep(store, older_than=time.time() - content_age_s(store))


def remove(job_id: str) -> None:
    store = GcsStore("gs://bucket")
    store.delete(layout.JobKeys(job_id).prefix)
    store.delete(layout.JobKeys(job_id).ref)


def contents(double: Double) -> set[str]:
    return {name for name in double.buckets.names("bucket") if name.startswith(CONTENT)}


class Between:
    """A hook that calls `act` once, before the double answers its n-th request."""

    def __init__(self, double: Double, number: int, act: Callable[[], object]) -> None:
        self.countdown, self.double, self.act = number, double, act
        double.before = self

    def __call__(self, _call: str, _name: str) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            self.double.before = None
            self.act()

    @property
    def happened(self) -> bool:
        return self.countdown <= 0


def old_unused_tree(place: Path, double: Double) -> Tree:
    plant(place / "root")
    tree = submit(place, "job-old")
    remove("job-old")
    double.buckets.grow_old("bucket", MONTH_S)
    return tree


KINDS = {
    "unchanged": ("", "cache"),
    "changed": ("changed", "cache"),
    "another machine": ("changed", "elsewhere"),
}


def old_place(tmp_path: Path, double: Double, number: int, text: str) -> Path:
    place = tmp_path / f"{number}"
    place.mkdir()
    old_unused_tree(place, double)
    (place / "root/changing.py").write_text(text)
    return place


def leave_nothing(double: Double, job_id: str) -> None:
    remove(job_id)
    double.buckets.grow_old("bucket", MONTH_S)
    sweep()
    assert contents(double) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_between_any_two_requests_of_a_submission(tmp_path, double, kind):
    text, cache = KINDS[kind]
    number, happened = 0, True
    while happened:
        number += 1
        place = old_place(tmp_path, double, number, text)
        between = Between(double, number, sweep)
        tree = submit(place, f"job-{number}", cache)
        happened, double.before = between.happened, None
        arrives(place, tree, "dest")
        leave_nothing(double, f"job-{number}")
    assert number > 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_submission_between_any_two_requests_of_a_sweep(tmp_path, double, kind):
    """The sweep may remove content that was unused for a week and that the new job needs. The job's
    host then raises `CorruptRecord`, and a second submission succeeds."""
    text, cache = KINDS[kind]
    number, happened, lost = 0, True, 0
    while happened:
        number += 1
        place, trees = old_place(tmp_path, double, number, text), []

        def send(place=place, trees=trees, number=number):
            trees.append(submit(place, f"job-{number}", cache))

        between = Between(double, number, send)
        sweep()
        happened, double.before = between.happened, None
        if not happened:
            send()
        with contextlib.suppress(CorruptRecord):
            arrives(place, trees[0], "dest")
            leave_nothing(double, f"job-{number}")
            continue
        lost += 1
        arrives(place, submit(place, f"job-{number}", cache), "again")
        leave_nothing(double, f"job-{number}")
    assert number > lost > 0


def test_two_clients_send_the_same_tree(tmp_path, double):
    plant(tmp_path / "root")
    number, happened = 0, True
    while happened:
        number += 1

        def other(job_id=f"job-other-{number}", cache=f"cache-other-{number}"):
            submit(tmp_path, job_id, cache)

        between = Between(double, number, other)
        tree = submit(tmp_path, f"job-{number}", f"cache-{number}")
        happened, double.before = between.happened, None
        arrives(tmp_path, tree, f"dest-{number}")
        for name in [*double.buckets.names("bucket")]:
            double.buckets.delete("bucket", name, {})
    assert number > 3


def test_what_a_plan_names_stays_however_old_it_is(tmp_path, double):
    plant(tmp_path / "root")
    tree = submit(tmp_path, "job-1")
    double.buckets.grow_old("bucket", 12 * MONTH_S)
    before = contents(double)
    assert sweep().contents == ()
    assert contents(double) == before
    arrives(tmp_path, tree, "dest")


def test_what_nobody_names_stays_for_a_week(tmp_path, double):
    old_unused_tree(tmp_path, double)
    assert submit(tmp_path, "job-2")
    remove("job-2")
    before = contents(double)
    double.buckets.grow_old("bucket", 6 * 86400.0)
    assert sweep().contents == ()
    double.buckets.grow_old("bucket", 2 * 86400.0)
    swept = sweep()
    assert {each.key for each in swept.contents} == before
    assert swept.size_bytes > packs.SMALL_BYTES
    assert contents(double) == set()


def test_a_submission_that_was_killed_is_swept(tmp_path, double):
    plant(tmp_path / "root")
    submit(tmp_path, "job-1")
    GcsStore("gs://bucket").delete(layout.JobKeys("job-1").ref)
    assert sweep().orphans == ()
    double.buckets.grow_old("bucket", MONTH_S)
    swept = sweep()
    assert swept.orphans == ("job-1",)
    assert double.buckets.names("bucket") == []


def test_what_no_reference_vouches_for_is_swept(double):
    """A sweep removes the old leftovers of killed processes: half of a job's reference, and a probe
    that `kinetic doctor` wrote."""
    store = GcsStore("gs://bucket")
    store.put(f"{layout.JobKeys('job-1').listing}/ref-x", b"")
    store.put(f"{layout.PROBES}/1234", b"")
    sweep()
    assert len(double.buckets.names("bucket")) == 2
    double.buckets.grow_old("bucket", MONTH_S)
    assert sweep().orphans == ("job-1",)
    assert double.buckets.names("bucket") == []


IMPORTS = """
import sys, time
import google.cloud.storage
from kinetic._client import planning, submission
from kinetic._config import settings
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._store.gcs import GcsStore
from kinetic.cli import pruning
from kinetic.errors import CorruptRecord, NotFound
"""
SUBMIT = """
class Nowhere:
    def render(self, plan):
        return []
    preflight = submit = lambda *_: None

sys.path.insert(0, "root")
import function
made = planning.plan_call(
    function.function,
    (),
    {},
    Options(topology=resolve("cpu")),
    settings=settings.load(),
    place=Place("ray"),
)
submission.submit(made, Nowhere(), GcsStore("gs://bucket"))
"""


@pytest.fixture
def run_killed(tmp_path, double):
    """Return a function that runs a program and kills it before its n-th request is answered; True
    if the program made n requests."""
    with Forks(IMPORTS) as forks:

        def run(program, number):
            started = queue.SimpleQueue()
            between = Between(double, number, lambda: os.kill(started.get(), signal.SIGKILL))
            started.put(forks.start(program, tmp_path, cwd=tmp_path))
            code = forks.wait()
            killed, double.before = between.happened, None
            assert code == (-signal.SIGKILL if killed else 0), (tmp_path / "err").read_text()
            return killed

        yield run


@pytest.mark.starts_processes
def test_a_submission_that_is_killed_at_any_request_leaves_nothing_for_ever(
    tmp_path, double, run_killed
):
    """After each kill, the bucket is empty once all listed jobs are removed and a sweep has run."""
    plant(tmp_path / "root")
    (tmp_path / "root/function.py").write_text("def function():\n    pass\n")
    (tmp_path / "root/pyproject.toml").write_text("")
    number, killed = 0, True
    while killed:
        number += 1
        killed = run_killed(SUBMIT, number)
        assert double.idle(200)
        store = GcsStore("gs://bucket")
        job_ids = [ref.job_id for ref in index.list_refs(store)]
        assert killed or job_ids
        for job_id in job_ids:
            store.delete(layout.JobKeys(job_id).prefix)
            index.remove(store, job_id)
        double.buckets.grow_old("bucket", MONTH_S)
        sweep()
        assert double.buckets.names("bucket") == []
    assert number > 9


SWEEP = """
pruning.sweep(GcsStore("gs://bucket"), older_than=time.time() - 7 * 86400)
"""


@pytest.mark.starts_processes
def test_a_sweep_that_is_killed_at_any_request_harms_nobody(tmp_path, double, run_killed):
    number, killed = 0, True
    while killed:
        number += 3
        place = tmp_path / f"{number}"
        place.mkdir()
        old_unused_tree(place, double)
        killed = run_killed(SWEEP, number)
        arrives(place, submit(place, "job-1"), "dest")
        remove("job-1")
        double.buckets.grow_old("bucket", MONTH_S)
        sweep()
        assert contents(double) == set()
    assert number > 6


def test_two_sweeps_at_once(tmp_path, double):
    old_unused_tree(tmp_path, double)
    number, happened = 0, True
    while happened:
        number += 1
        old_unused_tree(tmp_path, double)
        between = Between(double, number, sweep)
        sweep()
        happened, double.before = between.happened, None
        assert contents(double) == set()


def test_a_submission_renews_once_a_day(tmp_path, double):
    old_unused_tree(tmp_path, double)
    for patches in (1, 0):
        double.forget_requests()
        submit(tmp_path, "job-1")
        assert double.calls()["patch"] == patches
