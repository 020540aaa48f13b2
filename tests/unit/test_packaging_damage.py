"""Unpacking a damaged source tree: the damage is detected and reported, and the next submission
repairs it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from bundle_cases import FOREVER, build, index_of, later, sent, shape, whole, write
from hypothesis import example, given
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._core.plan import Blob, Tree
from kinetic._source import bundle, cache, manifest, packs
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store.local import LocalStore
from kinetic.errors import CorruptRecord, StoreError


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def root(place) -> Path:
    (place / "root").mkdir()
    return place / "root"


def noticed(store: LocalStore, bundle_: bundle.Bundle, dest: Path) -> bool:
    """True if unpacking reports the damage, so that the next submission sends the content again."""
    try:
        unpack(store, bundle_.tree, dest)
    except CorruptRecord as error:
        message = str(error).lower()
    else:
        return False
    assert "submit the job again" in message
    assert not store.has(layout.tree(bundle_.tree.manifest.digest))
    return True


@FOREVER
@given(data=st.data())
def test_any_byte_changed_in_the_store_is_noticed_and_mended(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("p").resolve()
    same = {f"{folder}/{name}": name for folder in ("d", "p/q/d", "p/d") for name in "bef"}
    write(place / "root", {"a": "one", "large": "five!", "p/q/only": "b"} | same)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packs, "SMALL_BYTES", 4)
        built, store = sent(place / "root", place)
        key = data.draw(st.sampled_from(sorted(store.list(""))))
        content = bytearray(store.get(key))
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        store.put(key, bytes(content))
        # The damage is in a record that unpacking does not read: only sweeps of the store need it.
        if not noticed(store, built, place / "dest"):
            assert shape(place / "dest") == shape(place / "root")
            assert key.startswith(layout.TREES)
        upload(built, store)
        unpack(store, built.tree, place / "dest2")
        assert shape(place / "dest2") == shape(place / "root")


def keys_of(store: LocalStore, digest: str) -> list[str]:
    """Return the keys of the objects in the store that contain this content: an object of its own,
    or packs. For the list of a tree's files, that is the base list which several trees share."""
    own = layout.blob(digest)
    if store.has(layout.tree(digest)):
        digest = packs.TreeRecord.from_json(store.get(layout.tree(digest))).base_list
    stored = [key for key in store.list(layout.PACKS) if digest in index_of(store.get(key)).spans]
    return [own] if store.has(own) else stored


@pytest.mark.parametrize("small", [0, 1000])
def test_what_is_missing_is_noticed_and_mended(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    built, store = sent(root, place)
    for number, find in enumerate(
        (
            lambda: keys_of(store, built.digests()["a"]),
            lambda: keys_of(store, built.tree.manifest.digest),
            lambda: [layout.tree(built.tree.manifest.digest)],
        )
    ):
        for key in find():
            store.delete(key)
        with pytest.raises(CorruptRecord, match="missing"):
            unpack(store, built.tree, place / f"dest{number}")
        upload(built, store)
        unpack(store, built.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


@pytest.mark.parametrize("small", [0, 1000])
def test_a_loop_of_symlinks_is_missing_content(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    built, store = sent(root, place)
    for number, digest in enumerate((built.digests()["a"], built.tree.manifest.digest)):
        (key,) = keys_of(store, digest)
        store.delete(key)
        store.path(key).symlink_to(store.path(key))
        assert not store.has(key)
        with pytest.raises(CorruptRecord, match="submit the job again"):
            unpack(store, built.tree, place / f"dest{number}")
        upload(built, store)
        unpack(store, built.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_a_file_in_place_of_all_packs(root, place):
    write(root, {"a": "1"})
    built, store = sent(root, place)
    shutil.rmtree(store.path(layout.PACKS))
    store.path(layout.PACKS).touch()
    with pytest.raises(CorruptRecord, match="An archive of the job's files is missing"):
        unpack(store, built.tree, place / "dest")


def test_a_pack_that_claims_more_than_memory_holds_is_damaged(root, place):
    write(root, {"a": "1"})
    built, store = sent(root, place)
    for key in keys_of(store, built.tree.manifest.digest):
        store.put(key, store.get(key)[:8] + b"\xff" * 4)
    with pytest.raises(CorruptRecord, match="cut off"):
        unpack(store, built.tree, place / "dest")


@pytest.mark.parametrize("path", ["", "deep/er/a", "large"])
def test_what_is_wrong_is_told_by_its_path_and_mended(root, place, path, monkeypatch):
    """Two trees share a damaged file. Unpacking names its path; after a new submission of each
    tree, both can be unpacked."""
    monkeypatch.setattr(packs, "SMALL_BYTES", 10)
    write(root, {"deep/er/a": "1", "other/b": "2", "large": "x" * 11})
    write(root, {f"wide/{n}": f"{n}" for n in range(200)})
    built, store = sent(root, place)
    write(root, {"other/b": "3"})
    second, _ = sent(root, place)
    digest = built.digests()[path] if path else built.tree.manifest.digest
    (key,) = keys_of(store, digest)
    content = bytearray(store.get(key))
    if path == "large":
        content[0] ^= 1
    elif path:
        content[index_of(content).spans[digest][0]] ^= 1
    else:
        content[-1] ^= 1
    store.put(key, bytes(content))
    with pytest.raises(CorruptRecord, match=path or "The stored list of the job's files"):
        unpack(store, built.tree, place / "dest")
    with pytest.raises(CorruptRecord, match="missing"):
        unpack(store, second.tree, place / "second")
    for number, each in enumerate([built, second]):
        assert not store.has(layout.tree(each.tree.manifest.digest))
        write(root, {"other/b": "2" if each is built else "3"})
        upload(each, store)
        whole(store)
        unpack(store, each.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_it_unpacks_into_an_empty_folder_only(root, place):
    write(root, {"a": "1"})
    built, store = sent(root, place)
    (place / "dest").mkdir()
    unpack(store, built.tree, place / "dest")
    with pytest.raises(StoreError, match="not empty"):
        unpack(store, built.tree, place / "dest")
    write(place, {"file": ""})
    with pytest.raises(StoreError, match="could not be unpacked"):
        unpack(store, built.tree, place / "file")


DIGEST = hashlib.sha256(b"x").hexdigest()


FILE = ["f", "a", 0o644, 1, DIGEST]


HOSTILE = {
    "up": [["f", "..", 0o644, 1, DIGEST]],
    "up by a path": [["f", "../a", 0o644, 1, DIGEST]],
    "up inside": [["d", "d", 0o755], ["f", "d/../../a", 0o644, 1, DIGEST]],
    "absolute": [["f", "/tmp/a", 0o644, 1, DIGEST]],
    "in no folder": [["f", "d/a", 0o644, 1, DIGEST]],
    "before its folder": [["f", "d/a", 0o644, 1, DIGEST], ["d", "d", 0o755]],
    "twice": [FILE, FILE],
    "file and folder": [FILE, ["d", "a", 0o755]],
    "below a file": [FILE, ["f", "a/b", 0o644, 1, DIGEST]],
    "below a link": [["d", "d", 0o755], ["l", "l", "d"], ["f", "l/a", 0o644, 1, DIGEST]],
    "link up": [["l", "l", "../etc"]],
    "link out by a detour": [["d", "d", 0o755], ["l", "d/l", "../../x"]],
    "link out by a link": [FILE, ["l", "l", "."], ["l", "m", "l/../a"]],
    "absolute link": [["l", "l", "/etc/passwd"]],
    "link to nothing": [["l", "l", "b"]],
    "link to a link": [FILE, ["l", "b", "a"], ["l", "c", "b"]],
    "link to itself": [["l", "l", "l"]],
    "empty link": [["l", "l", ""]],
    "object for a target": [FILE, ["l", "l", {"a": 1}]],
    "nul in a target": [FILE, ["l", "l", "a\0"]],
    "number for a path": [["f", 7, 0o644, 1, DIGEST]],
    "object for a path": [["f", {}, 0o644, 1, DIGEST]],
    "list for a path": [["f", [], 0o644, 1, DIGEST]],
    "fraction for a size": [["f", "a", 0o644, 1.0, DIGEST]],
    "number for a digest": [["f", "a", 0o644, 1, 7]],
    "more than there is to a file": [[*FILE, 1]],
    "less than there is to a file": [FILE[:-1]],
    "device": [["c", "a", 0o644]],
    "setuid": [["f", "a", 0o4755, 1, DIGEST]],
    "negative size": [["f", "a", 0o644, -1, DIGEST]],
    "short digest": [["f", "a", 0o644, 1, DIGEST[:-1]]],
    "path for a digest": [["f", "a", 0o644, 1, "../" + DIGEST[3:]]],
    "nul": [["f", "a\0", 0o644, 1, DIGEST]],
    "dot": [["d", ".", 0o755]],
    "empty": [["d", "", 0o755]],
    "bool": [["d", "a", True]],
    "text": ["fa"],
    "number": [3],
    "object": [{}],
    "nothing": [[]],
}


def packed(place: Path, rows: list) -> tuple[LocalStore, Tree]:
    """Store a file and a tree whose list of files has these rows; return the store and the tree."""
    store = LocalStore(place / "store")
    data = "\n".join(map(json.dumps, rows)).encode()
    deflated = packs.deflate_list(data)
    base_list = hashlib.sha256(deflated).hexdigest()
    index = packs.build({DIGEST: b"x", base_list: deflated})
    store.put(layout.pack(index.name), b"".join([index.data, b"x", deflated]))
    digest = hashlib.sha256(data).hexdigest()
    record = packs.TreeRecord((index.name,), (), base_list)
    store.put(layout.tree(digest), record.to_json())
    files = sum(isinstance(row, list) and row[:1] == ["f"] for row in rows)
    return store, Tree(Blob(digest, len(data)), files, files)


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lists_write_nothing(place, rows):
    store, tree = packed(place, rows)
    with pytest.raises(CorruptRecord):
        unpack(store, tree, place / "deep/dest")
    assert not (place / "deep").exists()


def test_a_harmless_list_written_by_hand_is_unpacked(place):
    """Prove that the test of hostile lists does not fail for every handwritten list."""
    d_a, d_l = ["f", "d/a", 0o644, 1, DIGEST], ["l", "d/l", "../a"]
    store, tree = packed(place, [FILE, ["d", "d", 0o755], d_a, d_l, ["l", "l", "d/a"]])
    unpack(store, tree, place / "dest")
    assert sorted(shape(place / "dest")) == ["a", "d", "d/a", "d/l", "l"]


@given(st.binary(min_size=1) | st.sampled_from([b"[]", b"{}", b"[" * 5000]))
@example(b"\t")
@example(b"\n")
def test_garbage_is_no_list(data):
    with pytest.raises(CorruptRecord):
        manifest.decode(data)


def test_a_tree_of_another_size_is_refused(root, place):
    write(root, {"a": "1"})
    built, store = sent(root, place)
    with pytest.raises(CorruptRecord, match="is that of another job"):
        unpack(store, Tree(built.tree.manifest, 2, 1), place / "dest")


def test_stamps_are_trusted_when_both_times_are_old():
    now, second = 10**18, 10**9
    assert cache.is_trusted((now - 3 * second, now - 3 * second, 1, 1, 1, 1), now)
    assert not cache.is_trusted((now - 3 * second, now - second, 1, 1, 1, 1), now)
    assert not cache.is_trusted((now - second, now - 3 * second, 1, 1, 1, 1), now)
    assert not cache.is_trusted((now - 3 * second, now + 3 * second, 1, 1, 1, 1), now)
    assert cache.is_trusted((), now)


def test_nothing_is_left_beside_the_notes(root, place):
    write(root, {"a": "1"})
    for _ in range(3):
        build(root, clock_ns=later)
    assert len(os.listdir(place / "cache/trees")) == 1
    shutil.rmtree(place / "cache")
    assert build(root).tree.files == 1
