"""Cached copies of declared data on a host: shared by jobs, read-only, whole in spite of kills and
changes, and removed when unused."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kinetic._core import layout
from kinetic._core.plan import Tree
from kinetic._datasets import cached_copy
from kinetic._source import bundle, download, packs
from kinetic._source.upload import upload
from kinetic._store.local import LocalStore
from kinetic.errors import CorruptRecord, StoreFull


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def tree(tmp_path: Path, store: LocalStore) -> Tree:
    folder = tmp_path / "data"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "same.txt").write_text("a")
    (folder / "sub" / "b.sh").write_text("b")
    (folder / "sub" / "b.sh").chmod(0o755)
    (folder / "nothing").write_text("")
    (folder / "large").write_text(LARGE)
    (folder / "link").symlink_to("sub/b.sh")
    return send(folder, store)


def send(folder: Path, store: LocalStore) -> Tree:
    built = bundle.build_data(folder, cache_dir=folder.parent / "cache")
    upload(built, store)
    return built.tree


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def contents(files: Path) -> dict[str, str]:
    return {
        str(p.relative_to(files)): p.read_text() for p in sorted(files.rglob("*")) if p.is_file()
    }


LARGE = "l" * 300_000
WHOLE = {
    "a.txt": "a", "same.txt": "a", "sub/b.sh": "b", "nothing": "", "link": "b", "large": LARGE,
}  # fmt: skip


def test_the_content_is_there_without_write_permission(store, tree):
    files = cached_copy.provide(store, tree, cached_copy.find_root(store))
    assert files == store.path(layout.data(tree.manifest.digest)) / "files"
    assert contents(files) == WHOLE
    assert (files / "sub" / "empty").is_dir()
    modes = {
        p.name: stat.S_IMODE(p.lstat().st_mode)
        for p in [files, *files.rglob("*")]
        if not p.is_symlink()
    }
    assert modes == {
        "files": 0o555, "sub": 0o555, "empty": 0o555, "a.txt": 0o444, "same.txt": 0o444,
        "nothing": 0o444, "b.sh": 0o555, "large": 0o444,
    }  # fmt: skip
    assert os.readlink(files / "link") == "sub/b.sh"


def test_the_second_use_makes_nothing(store, tree, monkeypatch):
    first = cached_copy.provide(store, tree, cached_copy.find_root(store))
    monkeypatch.setattr(cached_copy, "_build", lambda *a: pytest.fail("it was built again"))
    assert cached_copy.provide(store, tree, cached_copy.find_root(store)) == first


def test_a_write_in_place_reaches_neither_the_store_nor_the_next_job(store, tree):
    """Root can write to the copy in a container without read-only mounts; the data must survive."""
    files = cached_copy.provide(store, tree, cached_copy.find_root(store))
    (files / "large").chmod(0o644)
    mapped = np.memmap(files / "large", dtype=np.uint8, mode="r+")
    mapped[:4] = 0
    mapped.flush()
    assert store.get(layout.blob(digest_of(LARGE))) == LARGE.encode()
    assert contents(cached_copy.provide(store, tree, cached_copy.find_root(store))) == WHOLE


def test_nothing_of_a_copy_is_linked_to_the_store(store, tree):
    files = cached_copy.provide(store, tree, cached_copy.find_root(store))
    assert {p.stat().st_nlink for p in files.rglob("*") if p.is_file()} == {1}


def test_of_very_many_files_the_first_are_looked_at(store, tree, monkeypatch):
    monkeypatch.setattr(cached_copy, "_MOST_SEALED", 2)
    cached_copy.provide(store, tree, cached_copy.find_root(store))
    walk, items = cached_copy._walk, []

    def counting(top):
        for item in walk(top):
            items.append(item)
            yield item

    monkeypatch.setattr(cached_copy, "_walk", counting)
    assert contents(cached_copy.provide(store, tree, cached_copy.find_root(store))) == WHOLE
    assert len(items) == 2


@pytest.mark.parametrize("how", ["write", "add", "remove", "replace", "retarget"])
def test_a_changed_copy_is_made_again(store, tree, how):
    files = cached_copy.provide(store, tree, cached_copy.find_root(store))
    os.chmod(files, 0o755)
    target = files / "sub" / "b.sh"
    if how == "write":
        target.chmod(0o755)
        target.write_text("longer")
    elif how == "add":
        (files / "new").write_text("x")
    elif how == "remove":
        (files / "a.txt").unlink()
    elif how == "replace":
        (files / "a.txt").unlink()
        (files / "a.txt").write_text("b")
    else:
        (files / "link").unlink()
        (files / "link").symlink_to("a.txt")
    assert contents(cached_copy.provide(store, tree, cached_copy.find_root(store))) == WHOLE


@pytest.mark.parametrize("name", ["sub/b.sh", "large"])
def test_damaged_content_is_told_and_forgotten(store, tree, name):
    if name == "large":
        store.path(layout.blob(digest_of(LARGE))).write_text("x")
    else:
        (key,) = store.list(layout.PACKS)
        pack = store.get(key)
        index = packs.parse(pack[: packs.index_bytes(pack[: packs.HEAD_BYTES])])
        at = index.spans[digest_of("b")][0]
        store.put(key, pack[:at] + b"x" + pack[at + 1 :])
    with pytest.raises(CorruptRecord, match=name):
        cached_copy.provide(store, tree, cached_copy.find_root(store))
    assert not store.has(layout.tree(tree.manifest.digest)), "the next submission sends it again"
    assert [each.name for each in cached_copy.find_root(store).iterdir()] == ["lock"], (
        "nothing of it is left"
    )


@pytest.mark.parametrize("kind", [layout.PACKS, layout.BLOBS])
def test_a_loop_of_symlinks_is_missing_content(store, tree, kind):
    for key in list(store.list(kind)):
        store.delete(key)
        store.path(key).symlink_to(store.path(key))
    with pytest.raises(CorruptRecord, match="submit the job again"):
        cached_copy.provide(store, tree, cached_copy.find_root(store))


def test_a_full_disk_is_told_and_leaves_nothing(store, tree, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "write_file", full)
    with pytest.raises(StoreFull):
        cached_copy.provide(store, tree, cached_copy.find_root(store))
    assert [each.name for each in cached_copy.find_root(store).iterdir()] == ["lock"]


# -- concurrent jobs, and kills --------------------------------------------------------------------

CHILD = textwrap.dedent("""
    import json, os, sys
    from pathlib import Path
    from kinetic._core.plan import Blob, Tree
    from kinetic._datasets import cached_copy
    from kinetic._store.local import LocalStore

    root, digest, size, files, size_bytes, die_after = sys.argv[1:]
    store, tree = LocalStore(Path(root)), Tree(Blob(digest, int(size)), int(files), int(size_bytes))
    built, placed, real_build, real_place = 0, 0, cached_copy._build, cached_copy._place_file

    def build(*given):
        global built
        built += 1
        real_build(*given)

    def place(*given):
        global placed
        real_place(*given)
        placed += 1
        if placed == int(die_after):
            os.kill(os.getpid(), 9)

    cached_copy._build, cached_copy._place_file = build, place
    found = cached_copy.provide(store, tree, cached_copy.find_root(store))
    print(json.dumps([str(found), built]))
""")


def child(store: LocalStore, tree: Tree, *, die_after: int = 0) -> subprocess.Popen[str]:
    facts = (
        store.uri,
        tree.manifest.digest,
        tree.manifest.size_bytes,
        tree.files,
        tree.size_bytes,
        die_after,
    )
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, facts)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.starts_processes
def test_of_eight_processes_one_builds_and_all_see_it_whole(tmp_path, store):
    folder = tmp_path / "many"
    folder.mkdir()
    for n in range(300):
        (folder / f"{n}.txt").write_text(str(n))
    tree = send(folder, store)
    children = [child(store, tree) for _ in range(8)]
    outputs = [each.communicate()[0] for each in children]
    assert [each.returncode for each in children] == [0] * 8
    files = store.path(layout.data(tree.manifest.digest)) / "files"
    assert sorted(outputs)[:-1] == [f'["{files}", 0]\n'] * 7
    assert sorted(outputs)[-1] == f'["{files}", 1]\n'
    assert contents(files) == contents(folder)


@pytest.mark.starts_processes
@pytest.mark.parametrize("die_after", [1, 4])
def test_one_that_is_killed_on_the_way_leaves_the_rest_to_the_next(store, tree, die_after):
    dead = child(store, tree, die_after=die_after)
    dead.communicate()
    assert dead.returncode == -signal.SIGKILL
    assert not store.path(layout.data(tree.manifest.digest)).exists()
    assert cached_copy.list_copies(cached_copy.find_root(store)), "prune sees what is left"
    assert contents(cached_copy.provide(store, tree, cached_copy.find_root(store))) == WHOLE
    assert sorted(each.name for each in cached_copy.find_root(store).iterdir()) == [
        tree.manifest.digest,
        "lock",
    ]


# -- removing --------------------------------------------------------------------------------------


def test_a_removed_copy_is_gone_and_can_be_made_again(store, tree):
    cached_copy.provide(store, tree, cached_copy.find_root(store))
    (copy,) = cached_copy.list_copies(cached_copy.find_root(store))
    assert copy.digest == tree.manifest.digest
    assert cached_copy.size_bytes(copy) == len("a" + "a" + "b" + LARGE)
    cached_copy.remove(copy)
    assert cached_copy.list_copies(cached_copy.find_root(store)) == []
    assert contents(cached_copy.provide(store, tree, cached_copy.find_root(store))) == WHOLE


@pytest.mark.starts_processes
def test_what_a_killed_one_left_is_removed(store, tree):
    child(store, tree, die_after=2).communicate()
    (copy,) = cached_copy.list_copies(cached_copy.find_root(store))
    assert cached_copy.size_bytes(copy) == 0
    cached_copy.remove(copy)
    assert [each.name for each in cached_copy.find_root(store).iterdir()] == ["lock"]


def test_a_store_without_data_has_no_copies(store):
    assert cached_copy.list_copies(cached_copy.find_root(store)) == []
