"""`kinetic jobs cancel`, `cleanup`, `stacks` and `prune` over fake backends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fakes import DAY, NOW, Capture, World

from kinetic._core import layout
from kinetic._datasets import cached_copy
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store.base import Entry
from kinetic._store.gc_lock import lock_for_submission
from kinetic._store.local import LocalStore
from kinetic.cli import pruning


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


# -- stopping and removing -------------------------------------------------------------------------


def test_cancel_takes_several_and_passes_over_what_has_ended(world: World, capsys: Capture) -> None:
    for number in range(3):
        world.job(f"job-0000000{number}")
    world.succeed("job-00000000")
    assert world("jobs", "cancel", "00000000", "00000001", "job-00000001") == 0
    assert world.backend.cancelled == ["job-00000001"]
    assert world("jobs", "cancel", "00000002", "nobody") == 3
    assert world.backend.cancelled == ["job-00000001"], (
        "a wrong id must not leave half of the others cancelled"
    )


def test_cleanup(world: World) -> None:
    world.job("job-00000001")
    world.succeed("job-00000001")
    assert world("jobs", "cleanup", "--no-gcs", "job-0") == 0
    assert world.store.has(layout.JobKeys("job-00000001").ref)
    assert world("jobs", "cleanup", "-y", "job-0") == 0
    assert not world.store.has(layout.JobKeys("job-00000001").ref)


@pytest.mark.parametrize("age", ["0", "0s", "0d"])
def test_prune_removes_what_has_just_ended(world: World, age: str) -> None:
    world.job("job-00000001")
    world.succeed("job-00000001")
    assert world("jobs", "prune", "--yes", "--older-than", age) == 0
    assert not world.store.has(layout.JobKeys("job-00000001").ref)


def test_cleanup_stops_a_running_job_and_gives_up_in_time(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [None]
    assert world("jobs", "cleanup", "--cleanup-timeout", "0.01", "job-0") == 124
    assert world.backend.cancelled == ["job-00000001"]
    assert world.store.has(layout.JobKeys("job-00000001").ref)


def history(world: World) -> None:
    """Store three jobs (ended long ago, ended recently, still running) and content: shared, unused,
    unused but young."""
    world.job("job-0000000d", age=30 * DAY)
    world.succeed("job-0000000d", ended=NOW - 20 * DAY)
    world.job("job-0000000e", age=2 * DAY)
    world.fail("job-0000000e", ended=NOW - 1 * DAY)
    world.job("job-0000000f", age=90 * DAY)
    shared = world.blob("a")
    world.plan("job-0000000d", world.blob("b"), shared)
    world.plan("job-0000000f", world.blob("c"), world.tree("1", world.blob("2", b"source file")))
    world.plan("job-0000000e", world.blob("d"), shared)
    world.blob("e")
    world.blob("f", age=3600)
    world.store.put(f"{layout.JobKeys('job-0000000d').outputs}/model.bin", b"weights")


def remaining(world: World) -> str:
    return "".join(sorted(key[-1] for key in contents(world)))


def contents(world: World) -> set[str]:
    """Return the keys of all blobs, packs and trees in the store."""
    prefixes = (layout.BLOBS, layout.PACKS, layout.TREES)
    return {key for prefix in prefixes for key in world.store.list(prefix)}


def test_prune_removes_old_executables(world: World, capsys: Capture) -> None:
    """JAX's compilation cache has an old and a new program: only the new one stays."""
    for digest, age in (("a" * 64, 30 * DAY), ("b" * 64, 3600.0)):
        key = layout.executable("0.10.2-tpu", digest)
        world.store.put(key, b"program")
        os.utime(world.store.path(key), (NOW - age, NOW - age))
    assert world("jobs", "prune", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["contents"] == 1
    left = list(world.store.list(layout.EXECUTABLES))
    assert left == [layout.executable("0.10.2-tpu", "b" * 64)]


def test_prune_removes_what_nobody_needs(world: World, capsys: Capture) -> None:
    history(world)
    assert world("jobs", "prune", "--dry-run", "--json") == 0
    promised = json.loads(capsys.readouterr().out)
    assert (promised["jobs"], promised["contents"]) == (["job-0000000d"], 2)
    assert remaining(world) == "12abcdef"
    assert world("jobs", "prune", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == promised
    assert remaining(world) == "12acdf"
    assert not world.store.has(layout.JobKeys("job-0000000d").ref)
    assert not list(world.store.list(layout.JobKeys("job-0000000d").prefix))
    assert world.store.has(layout.JobKeys("job-0000000e").ref)
    assert world.store.get(f"{layout.JobKeys('job-0000000d').outputs}/model.bin") == b"weights"
    assert world.backend.cleaned == ["job-0000000d"]


def test_prune_of_many_jobs_keeps_to_one_screen_and_ends_with_what_it_did(
    world: World, capsys: Capture
) -> None:
    for number in range(25):
        world.job(f"job-{number:08x}", name="many", age=30 * DAY)
        world.succeed(f"job-{number:08x}", ended=NOW - 20 * DAY)
    assert world("jobs", "prune", "--dry-run") == 0
    assert capsys.readouterr().out.count("  many\n") == 25
    assert world("jobs", "prune", "--yes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Removed ")
    assert lines[-2].endswith(" more")
    assert len(lines) == 22


def test_prune_asks_and_does_nothing_without_an_answer(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(world)
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert world("jobs", "prune") == 2
    assert "--yes" in capsys.readouterr().err
    assert remaining(world) == "12abcdef"


def test_prune_takes_no_chances_with_plans_that_it_cannot_read(world: World) -> None:
    history(world)
    newer = {"schema_version": 99, "forest": [{"root": "1" * 64}], "payload": "c" * 64}
    for plan in (json.dumps(newer).encode(), b"garbage " + b"1" * 64 + b" \xff " + b"c" * 64):
        world.store.put(layout.JobKeys("job-0000000f").plan, plan)
        assert world("jobs", "prune", "--yes") == 0
        assert set("12c") <= set(remaining(world))


def test_prune_goes_on_when_a_job_cannot_be_removed(world: World, capsys: Capture) -> None:
    world.job("job-00000001", age=30 * DAY)
    world.succeed("job-00000001", ended=NOW - 20 * DAY)
    world.job("job-00000002", age=30 * DAY)
    world.succeed("job-00000002", ended=NOW - 20 * DAY)
    world.backend.broken = {"job-00000001"}
    assert world("jobs", "prune", "--yes") == 5
    assert world.store.has(layout.JobKeys("job-00000001").ref)
    assert not world.store.has(layout.JobKeys("job-00000002").ref)
    assert "job-00000001 was not removed" in capsys.readouterr().err


def test_prune_removes_what_a_killed_submission_left(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.plan("job-0000000a", world.blob("a"))
    os.utime(world.store.path(layout.JobKeys("job-0000000a").plan), (NOW - 2 * DAY, NOW - 2 * DAY))
    world.plan("job-0000000b", world.blob("b"))
    os.utime(world.store.path(layout.JobKeys("job-0000000b").plan), (NOW - 60, NOW - 60))
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert world("jobs", "prune") == 2
    assert "This would remove 0 jobs, 1 unfinished submission" in capsys.readouterr().err
    assert world("jobs", "prune", "--yes") == 0
    assert "Removed 0 jobs, 1 unfinished submission and" in capsys.readouterr().out
    assert remaining(world) == "b"
    assert not list(world.store.list(layout.JobKeys("job-0000000a").prefix))


def ship(world: World, folder: Path, *, age: float) -> str:
    """Send a real tree, as a submission does; make it `age` seconds old; return its digest."""
    from kinetic._source import bundle

    before = contents(world)
    built = bundle.build(folder, cache_dir=folder.parent / "cache")
    upload(built, world.store)
    for key in contents(world) - before:
        os.utime(world.store.path(key), (NOW - age, NOW - age))
    return built.tree.manifest.digest


def plant(folder: Path, changing: str = "") -> None:
    (folder / "pkg").mkdir(parents=True, exist_ok=True)
    (folder / "pkg/a.py").write_text("a = 1" * 100)
    (folder / "b.py").write_text(f"b = {changing!r}")
    (folder / "weights").write_bytes(b"w" * 300_000)


def test_a_real_tree_is_kept_as_long_as_a_job_needs_it(world: World, tmp_path: Path) -> None:
    plant(tmp_path / "tree")
    world.job("job-00000001")
    world.plan("job-00000001", world.blob("a"), ship(world, tmp_path / "tree", age=9 * DAY))
    before = contents(world)
    assert len(before) == 4, "payload, large file, pack, record"
    pruning.sweep(world.store, older_than=NOW - DAY)
    assert contents(world) == before
    world.succeed("job-00000001")
    assert world("jobs", "cleanup", "job-00000001") == 0
    pruning.sweep(world.store, older_than=NOW - DAY)
    assert contents(world) == set()


def test_old_content_of_a_young_tree_stays_with_its_record(world: World, tmp_path: Path) -> None:
    """A sweep keeps old content that a young tree's record, or a tree in a plan, refers to. Without
    the content, the next submission would find the record, send nothing, and lack files."""
    from kinetic._source import bundle

    plant(tmp_path / "tree", "first")
    old = ship(world, tmp_path / "tree", age=9 * DAY)
    before = contents(world)
    plant(tmp_path / "tree", "second")
    young = ship(world, tmp_path / "tree", age=60)
    assert len(contents(world) - before) == 2, "a small pack, a record"
    built = bundle.build(tmp_path / "tree", cache_dir=tmp_path / "cache")
    for older_than in (NOW - DAY, NOW + DAY):
        swept = pruning.sweep(world.store, older_than=older_than)
        keys = [content.key for content in swept.contents]
        assert keys == ([layout.tree(old)] if older_than < NOW else [])
        unpack(world.store, built.tree, tmp_path / f"dest{older_than}")
        world.plan("job-00000001", world.blob("a"), young)
        world.job("job-00000001")


def test_a_sweep_that_is_killed_leaves_nothing_that_vouches_for_what_is_gone(
    world: World, tmp_path: Path
) -> None:
    plant(tmp_path / "tree")
    ship(world, tmp_path / "tree", age=9 * DAY)
    unused = pruning.find_unused(world.store, older_than=NOW - DAY)
    kinds = [content.key.partition("/")[0] for content in unused.contents]
    assert kinds == ["trees", "packs", "blobs"]


def test_a_sweep_survives_content_that_vanishes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content may vanish during a sweep: hosts remove damaged content without a lock."""
    listed = LocalStore.entries

    def vanishing(store: LocalStore, prefix: str) -> Iterator[Entry]:
        for key in listed(store, prefix):
            store.delete(key.key)
            yield key

    world.tree("1", world.blob("3"), age=60)
    world.tree("2")
    monkeypatch.setattr(LocalStore, "entries", vanishing)
    assert pruning.sweep(world.store, older_than=NOW - DAY).contents == ()
    assert contents(world) == set()


def test_prune_of_nothing(world: World, capsys: Capture) -> None:
    assert world("jobs", "prune") == 0
    assert "0 jobs" in capsys.readouterr().out


def test_a_sweep_waits_for_submissions_to_end(world: World) -> None:
    """No sweep may run between a submission's check that old content exists and the write of the
    plan that names the content."""
    import threading

    content = world.blob("a")
    order: list[str] = []
    with lock_for_submission(world.store):
        assert world.store.has(layout.blob(content))
        sweeper = threading.Thread(
            target=lambda: (pruning.sweep(world.store, older_than=NOW), order.append("swept"))
        )
        sweeper.start()
        sweeper.join(0.05)
        world.plan("job-00000001", content)
        order.append("submitted")
    sweeper.join()
    assert order == ["submitted", "swept"]
    assert world.store.has(layout.blob(content))


def test_data_that_hosts_fetched_stays_while_a_plan_names_where_it_lies(world: World) -> None:
    plan = json.dumps({"data": [{"source": "gs://bucket/x/", "is_dir": True}]}).encode()
    world.store.put(layout.JobKeys("job-00000001").plan, plan)
    root = cached_copy.find_root(world.store)
    for digest, source in (("a" * 64, "gs://bucket/x/"), ("b" * 64, "gs://bucket/y/")):
        cached_copy.provide_as(root, digest, lambda _: None, source=source)
        os.utime(root / digest, (NOW - 9 * DAY,) * 2)
    unused = pruning.find_unused(world.store, older_than=NOW - DAY)
    assert [copy.digest for copy in unused.data] == ["b" * 64]
