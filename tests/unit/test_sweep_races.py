"""Several processes submit trees that share folders, while another one sweeps the store, which
removes unused content. Every job finds its tree complete."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest

from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._source import bundle, packs
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store import gc_lock, index
from kinetic._store.gc_lock import lock_for_submission
from kinetic._store.local import LocalStore
from kinetic.cli import pruning
from kinetic.cli.root import call
from kinetic.errors import CorruptRecord, StoreError

SUBMISSIONS = 25


def test_a_sweep_does_not_wait_for_ever_for_a_submission_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_lock, "SUBMISSIONS_TAKE_S", 0.1)
    store = LocalStore(tmp_path)
    with lock_for_submission(store):
        words = r"one of these processes is stopped \(Ctrl-Z\)"
        with pytest.raises(StoreError, match=words), gc_lock.lock_for_sweep(store):
            pass
        with lock_for_submission(store):
            pass
    with gc_lock.lock_for_sweep(store):
        pass


def test_a_prune_that_cannot_sweep_says_what_it_has_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gc_lock, "SUBMISSIONS_TAKE_S", 0.1)
    store = LocalStore(home)
    ref = JobRef("job-00000001", Place("local"), "cpu", "f", "f", 1.0, store.uri)
    index.add(store, ref)
    report = HostReport(0, Exit.RETURNED, started_at=1.0)
    index.write_outcome(
        store, ref.job_id, Outcome(Verdict.SUCCEEDED, reports=(report,), ended_at=2.0)
    )
    with lock_for_submission(store):
        assert call(["jobs", "prune", "--yes", "--json"]) == 5
    document = json.loads(capsys.readouterr().out)
    assert (document["jobs"], document["contents"]) == ([ref.job_id], 0)
    assert "(Ctrl-Z)" in document["failed"][0]["error"]


def plant(root: Path) -> None:
    for folder in ("a/x", "a/y", "b/x", "b/y"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").write_text(folder)
    for number in range(70):
        (root / f"{number}").write_text(str(number) * 20)
    (root / "large").write_bytes(b"x" * (packs.SMALL_BYTES + 1))


def submit(place: Path, number: int, answers) -> None:
    store, chance, failures = LocalStore(place / "store"), random.Random(number), []
    root, dest = place / f"root{number}", place / f"dest{number}"
    plant(root)
    for turn in range(SUBMISSIONS):
        (root / chance.choice("ab") / chance.choice("xy") / "file").write_text(
            str(chance.randrange(3))
        )
        tree, job = bundle.build(root, cache_dir=place / f"cache{number}"), f"job-{number}-{turn}"
        store.put(layout.JobKeys(job).ref, b"{}")
        with lock_for_submission(store):
            upload(tree, store)
            store.put(
                layout.JobKeys(job).plan,
                json.dumps({"tree": {"manifest": {"digest": tree.tree.manifest.digest}}}).encode(),
            )
        try:
            unpack(store, tree.tree, dest)
        except CorruptRecord as error:
            failures.append(str(error))
        shutil.rmtree(dest, ignore_errors=True)
        if chance.random() < 0.7:
            store.delete(layout.JobKeys(job).prefix)
            store.delete(layout.JobKeys(job).ref)
    answers.put(failures)


def sweep(place: Path, done) -> None:
    while not done.is_set():
        pruning.sweep(LocalStore(place / "store"), older_than=time.time())


@pytest.mark.starts_processes
def test_every_job_finds_its_tree(tmp_path):
    context = multiprocessing.get_context("fork")
    (tmp_path / "store").mkdir()
    answers, done = context.Queue(), context.Event()
    submitters = [
        context.Process(target=submit, args=(tmp_path, number, answers)) for number in range(2)
    ]
    sweeper = context.Process(target=sweep, args=(tmp_path, done))
    for process in (*submitters, sweeper):
        process.start()
    try:
        assert [answers.get(timeout=200) for _ in submitters] == [[], []]
    finally:
        done.set()
        for process in (*submitters, sweeper):
            process.join(200)
    assert sweeper.exitcode == 0


def test_a_job_that_is_removed_while_the_sweep_looks_is_passed_over(tmp_path, monkeypatch):
    store, listed = LocalStore(tmp_path / "store"), LocalStore.parts
    store.put(layout.JobKeys("job-1").plan, b"{}")

    def listed_then_removed(store, prefix):
        entries = list(listed(store, prefix))
        store.delete(layout.JobKeys("job-1").prefix)
        return iter(entries)

    monkeypatch.setattr(LocalStore, "parts", listed_then_removed)
    pruning.sweep(store, older_than=time.time() + 60)
    assert list(store.list("")) == []
