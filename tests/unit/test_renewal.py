"""An unpacked source tree becomes the tree of the next call: only what differs is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_cases import sent, shape, write

from kinetic._source import download, renewal

CACHED = Path("pkg/__pycache__")


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def make(place):
    """Store a tree of these files; return it with its store."""

    def make(files):
        root = place / f"root{len(list(place.iterdir()))}"
        write(root, files)
        built, store = sent(root, place)
        return built.tree, store

    return make


@pytest.fixture
def unpacked(make, place):
    """A tree that was unpacked, with Python's caches of its two modules."""
    tree, store = make({"pkg/a.py": "A = 1", "pkg/b.py": "B = 1", "old/c.py": "C = 1"})
    entries = download.unpack(store, tree, place / "dest")
    before = renewal.note(tree, place / "dest", entries)
    (place / "dest" / CACHED).mkdir()
    for name in ("a", "b"):
        (place / "dest" / CACHED / f"{name}.cpython-311.pyc").write_text("compiled")
    return before


def shape_of(tree):
    """What a host must get, without Python's caches."""
    return {path: what for path, what in shape(tree.path).items() if "__pycache__" not in path}


def read_stamps(tree):
    return {p.name: p.stat().st_ctime_ns for p in tree.path.rglob("*.py")}


def test_only_what_differs_is_written(unpacked, make, place):
    """Unchanged files stay as they are; compiled code of a file that was written is removed."""
    before = read_stamps(unpacked)
    tree, store = make({"pkg/a.py": "A = 2", "pkg/b.py": "B = 1", "new/d.py": "D = 1"})
    download.unpack(store, tree, place / "fresh")
    after = renewal.renew(store, tree, unpacked)
    assert shape_of(after) == shape(place / "fresh")
    now = read_stamps(after)
    assert {name for name in now if now[name] == before.get(name)} == {"b.py"}
    assert [p.name for p in (after.path / CACHED).iterdir()] == ["b.cpython-311.pyc"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("A = 3"),
        lambda file: file.unlink(),
        lambda file: file.chmod(0o600),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to("b.py")),
        lambda file: (file.parent / "strange.py").write_text("X = 1"),
    ],
    ids=["changed", "removed", "mode", "folder", "link", "added"],
)
def test_what_a_function_has_changed_is_undone(unpacked, make, damage):
    """The next call finds the tree as it was sent, and the one after that writes nothing."""
    _, store = make({"other": ""})
    wanted = shape_of(unpacked)
    damage(unpacked.path / "pkg/a.py")
    assert shape_of(unpacked) != wanted
    after = renewal.renew(store, unpacked.tree, unpacked)
    assert shape_of(after) == wanted
    stamps = read_stamps(after)
    assert read_stamps(renewal.renew(store, unpacked.tree, after)) == stamps
