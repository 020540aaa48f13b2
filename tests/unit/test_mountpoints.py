"""Mount points on the real file system: made only where that is needed, removed by the last, never
anybody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kinetic._core.plan import Dataset
from kinetic._host.agent.mountpoints import Mountpoints


@pytest.fixture
def root(tmp_path: Path) -> Path:
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
        Mountpoints(root).keep(data)
        os._exit(0)
    os.waitpid(dead, 0)
    assert (place / "a" / "b").is_dir()
    Mountpoints(root).release(data)
    assert list(place.iterdir()) == []


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
