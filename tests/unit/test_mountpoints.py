"""Mount points on the real file system: made only where that is needed, removed by the last, never
anybody else's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._core.plan import Dataset
from kinetic._host.agent.mountpoints import RECORD, Mountpoints


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "data"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "machine").mkdir()
    return tmp_path / "machine"


def volume(path: Path, *, is_dir: bool = True) -> Dataset:
    return Dataset("/somewhere", is_dir, None, str(path))


def test_missing_folders_are_made_and_removed(root, place):
    data = [volume(place / "a" / "b"), volume(place / "f.txt", is_dir=False)]
    kept = Mountpoints(root)
    kept.keep(data)
    assert (place / "a" / "b").is_dir()
    assert (place / "f.txt").read_bytes() == b""
    kept.release(data)
    assert list(place.iterdir()) == []


def test_what_exists_is_left_alone(root, place):
    (place / "mine").mkdir()
    data = [volume(place / "mine"), volume(place / "mine" / "deeper")]
    kept = Mountpoints(root)
    kept.keep(data)
    kept.release(data)
    assert [p.name for p in place.iterdir()] == ["mine"]
    assert list((place / "mine").iterdir()) == []


def test_the_last_one_removes(root, place):
    data = [volume(place / "a")]
    first, second = Mountpoints(root), Mountpoints(root)
    first.keep(data)
    second.keep(data)
    first.release(data)
    assert (place / "a").is_dir(), "removing it would take the mount away from the second"
    second.release(data)
    assert list(place.iterdir()) == []


def test_one_above_that_is_kept_stays(root, place):
    deep, flat = [volume(place / "a" / "b")], [volume(place / "a")]
    first, second = Mountpoints(root), Mountpoints(root)
    first.keep(deep)
    second.keep(flat)
    first.release(deep)
    assert [p.name for p in (place / "a").iterdir()] == []
    second.release(flat)
    assert list(place.iterdir()) == []


def test_siblings_share_the_folder_above(root, place):
    one, other = [volume(place / "a" / "b")], [volume(place / "a" / "c")]
    first, second = Mountpoints(root), Mountpoints(root)
    first.keep(one)
    second.keep(other)
    first.release(one)
    assert [p.name for p in (place / "a").iterdir()] == ["c"]
    second.release(other)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("used", ["a/b/x", "a/x"])
def test_a_folder_that_somebody_used_meanwhile_stays(root, place, used):
    data = [volume(place / "a" / "b")]
    kept = Mountpoints(root)
    kept.keep(data)
    (place / used).write_text("theirs")
    kept.release(data)
    assert (place / used).read_text() == "theirs"
    assert (place / "a" / "b").exists() is (used == "a/b/x")


def test_a_file_that_was_written_stays(root, place):
    data = [volume(place / "f", is_dir=False)]
    kept = Mountpoints(root)
    kept.keep(data)
    (place / "f").write_text("theirs")
    kept.release(data)
    assert (place / "f").read_text() == "theirs"


def test_what_a_killed_one_left_is_removed_by_the_next(root, place):
    data = [volume(place / "a" / "b")]
    dead = os.fork()
    if dead == 0:
        try:
            Mountpoints(root).keep(data)
        finally:
            os._exit(0)
    os.waitpid(dead, 0)
    assert (place / "a" / "b").is_dir()
    Mountpoints(root).release(data)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_killed_while_it_removes_leaves_it_to_the_next(root, place, monkeypatch, when):
    data = [volume(place / "a" / "b"), volume(place / "a" / "c")]
    kept = Mountpoints(root)
    kept.keep(data)
    remove = os.rmdir

    def die(path: str) -> None:
        if when == "after":
            remove(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rmdir", die)
    with pytest.raises(KeyboardInterrupt):
        kept.release(data)
    monkeypatch.undo()
    Mountpoints(root).release(data)
    assert list(place.iterdir()) == []
    assert not (root / RECORD).exists()


@pytest.mark.parametrize("made", [1, 2])
def test_who_is_killed_while_it_makes_folders_leaves_them_to_the_next(root, place, made):
    data, make = [volume(place / "a" / "b")], os.mkdir

    def die(path: str, mode: int) -> None:
        make(path, mode)
        if path == str([place / "a", place / "a" / "b"][made - 1]):
            os._exit(9)

    if (pid := os.fork()) == 0:
        os.mkdir = die
        Mountpoints(root).keep(data)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 9 << 8
    assert (place / "a").is_dir()
    Mountpoints(root).release(data)
    assert list(place.iterdir()) == []


def test_what_a_killed_one_left_is_removed_by_a_job_with_other_volumes(root, place):
    dead = os.fork()
    if dead == 0:
        try:
            Mountpoints(root).keep([volume(place / "a" / "b"), volume(place / "f", is_dir=False)])
        finally:
            os._exit(0)
    os.waitpid(dead, 0)
    Mountpoints(root).release([volume(Path("/proc/self"))])
    assert list(place.iterdir()) == []
    assert not (root / RECORD).exists()


def test_what_was_made_looks_like_any_other_folder(root, place):
    before = place.stat().st_mtime
    Mountpoints(root).keep([volume(place / "a" / "b")])
    assert (place / "a").stat().st_mtime >= before
    assert (place / "a" / "b").stat().st_mtime >= before


@pytest.mark.parametrize("is_dir", [True, False])
def test_what_was_put_in_its_place_by_hand_stays(root, place, is_dir):
    data = [volume(place / "a", is_dir=is_dir)]
    kept = Mountpoints(root)
    kept.keep(data)
    if is_dir:
        (place / "a").rmdir()
        (place / "a").mkdir()
    else:
        (place / "a").unlink()
        (place / "a").touch()
    kept.release(data)
    assert (place / "a").exists()


def test_what_was_removed_by_hand_is_forgotten_and_made_again(root, place):
    data = [volume(place / "a" / "b")]
    first, second = Mountpoints(root), Mountpoints(root)
    first.keep(data)
    (place / "a" / "b").rmdir()
    (place / "a").rmdir()
    second.keep(data)
    assert (place / "a" / "b").is_dir()
    first.release(data)
    assert (place / "a" / "b").is_dir()
    second.release(data)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 1}'])
def test_a_damaged_record_costs_no_folder_of_anybody(root, place, damage):
    data = [volume(place / "a")]
    kept = Mountpoints(root)
    kept.keep(data)
    (root / RECORD).write_text(damage)
    (place / "theirs").mkdir()
    kept.release(data)
    kept.keep([volume(place / "more")])
    kept.release([volume(place / "more")])
    assert sorted(p.name for p in place.iterdir()) == ["a", "theirs"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=20))
def test_many_jobs_in_any_order_leave_nothing_and_take_nothing_away(tmp_path_factory, steps):
    """Each step of a job toggles it: it keeps a mount point, or gives it up."""
    place = tmp_path_factory.mktemp("machine")
    (place / "store").mkdir()
    paths = [place / name for name in ("a", "a/b", "a/b/c", "a/d", "e/f", "g")]
    jobs: dict[int, tuple[Mountpoints, list[Dataset]]] = {}
    for job, path in steps:
        if job in jobs:
            kept, data = jobs.pop(job)
            kept.release(data)
        else:
            kept, data = Mountpoints(place / "store" / "data"), [volume(paths[path])]
            kept.keep(data)
            jobs[job] = kept, data
        for _, data in jobs.values():
            assert Path(data[0].mount).is_dir()
    for kept, data in jobs.values():
        kept.release(data)
    assert [each.name for each in place.iterdir() if each.name != "store"] == []


def test_nothing_is_made_at_the_top_of_the_file_system(root):
    data = [volume(Path("/kinetic-test-of-mountpoints/x"))]
    kept = Mountpoints(root)
    kept.keep(data)
    assert not Path("/kinetic-test-of-mountpoints").exists()
    kept.release(data)


def test_without_volumes_nothing_is_touched(root):
    kept = Mountpoints(root)
    kept.keep([Dataset("/somewhere", True)])
    kept.release([Dataset("/somewhere", True)])
    assert not root.exists()


@pytest.mark.parametrize("record", ["{device}:{inode_before}:", "made after {long_ago}"])
def test_what_somebody_made_after_a_kill_stays(root, place, record):
    """Its inode begins as the one that was recorded, or it was made later."""
    (place / "mine").mkdir()
    facts = (place / "mine").stat()
    told = record.format(
        device=facts.st_dev,
        inode_before=str(facts.st_ino)[:-1],
        long_ago=facts.st_ctime_ns - 60 * 10**9,
    )
    root.mkdir()
    (root / RECORD).write_text(json.dumps({str(place / "mine"): told}))
    Mountpoints(root).release([volume(place / "mine")])
    assert (place / "mine").is_dir()
