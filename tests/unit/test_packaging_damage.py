"""Unpacking a source tree that is not what was sent: noticed, told, sent again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from bundle_cases import FOREVER, build, later, sent, shape, whole, write
from hypothesis import given
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


def noticed(store: LocalStore, made: bundle.Bundle, dest: Path) -> bool:
    """Whether a host finds something wrong, and sees to it that the next submission sends it."""
    try:
        unpack(store, made.tree, dest)
    except CorruptRecord as error:
        told = str(error).lower()
    else:
        return False
    assert "submit the job again" in told
    assert not store.has(layout.tree(made.tree.manifest.digest))
    return True


@FOREVER
@given(data=st.data())
def test_any_byte_changed_in_the_store_is_noticed_and_mended(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("p").resolve()
    same = {f"{folder}/{name}": name for folder in ("d", "p/q/d", "p/d") for name in "bef"}
    write(place / "root", {"a": "one", "large": "five!", "p/q/only": "b"} | same)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "_WIDE", 2)
        patched.setattr(packs, "SMALL_BYTES", 4)
        made, store = sent(place / "root", place)
        key = data.draw(st.sampled_from(sorted(store.list(""))))
        content = bytearray(before := store.get(key))
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        store.put(key, bytes(content))
        # Whole in spite of it: what only a submission reads, or what only prune does.
        if not noticed(store, made, place / "dest"):
            assert shape(place / "dest") == shape(place / "root")
            only_there = key.startswith((layout.PACK_INDEXES, layout.TREES))
            assert only_there or inflates_alike(before, bytes(content), at)
        upload(made, store)
        unpack(store, made.tree, place / "dest2")
        assert shape(place / "dest2") == shape(place / "root")


def inflates_alike(pack: bytes, changed: bytes, at: int) -> bool:
    """Whether the byte that differs lies in a list that is deflated, and is inflated to the same: a
    few bits at the end of a deflated stream mean nothing."""
    index = packs.parse(pack[: packs.index_bytes(pack[: packs.HEAD_BYTES])])
    (span,) = [s for s in index.spans.values() if s.offset <= at < s.offset + s.stored_bytes]
    ends = slice(span.offset, span.offset + span.stored_bytes)
    return span.deflated and packs.inflate_list(pack[ends]) == packs.inflate_list(changed[ends])


def keys_of(store: LocalStore, digest: str) -> list[str]:
    """Where a content lies: its own object, or a pack."""
    own = layout.blob(digest)
    return [own] if store.has(own) else packs_with(store, digest)


def packs_with(store: LocalStore, digest: str) -> list[str]:
    indexes = [packs.parse(store.get(key)) for key in store.list(layout.PACK_INDEXES)]
    return [layout.pack(index.name) for index in indexes if digest in index.spans]


@pytest.mark.parametrize("small", [0, 1000])
def test_what_is_missing_is_noticed_and_mended(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    made, store = sent(root, place)
    for number, find in enumerate(
        (
            lambda: keys_of(store, made.digests()["a"]),
            lambda: keys_of(store, made.tree.manifest.digest),
            lambda: [layout.tree(made.tree.manifest.digest)],
        )
    ):
        for key in find():
            store.delete(key)
        with pytest.raises(CorruptRecord, match="missing"):
            unpack(store, made.tree, place / f"dest{number}")
        upload(made, store)
        unpack(store, made.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


@pytest.mark.parametrize("small", [0, 1000])
def test_a_loop_of_symlinks_is_missing_content(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    made, store = sent(root, place)
    for number, digest in enumerate((made.digests()["a"], made.tree.manifest.digest)):
        (key,) = keys_of(store, digest)
        store.delete(key)
        store.path(key).symlink_to(store.path(key))
        assert not store.has(key)
        with pytest.raises(CorruptRecord, match="submit the job again"):
            unpack(store, made.tree, place / f"dest{number}")
        upload(made, store)
        unpack(store, made.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_a_file_in_place_of_all_packs(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    shutil.rmtree(store.path(layout.PACKS))
    store.path(layout.PACKS).touch()
    with pytest.raises(CorruptRecord, match="A pack of the source tree is missing"):
        unpack(store, made.tree, place / "dest")


def test_a_pack_that_claims_more_than_memory_holds_is_damaged(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    for key in keys_of(store, made.tree.manifest.digest):
        store.put(key, store.get(key)[:8] + b"\xff" * 4)
    with pytest.raises(CorruptRecord, match="cut off"):
        unpack(store, made.tree, place / "dest")


@pytest.mark.parametrize("path", ["deep/er", "wide/7", "", "deep/er/a", "large"])
def test_what_is_wrong_below_is_told_by_its_place_and_mended(root, place, path, monkeypatch):
    """Also for another tree that shares what is damaged."""
    monkeypatch.setattr(packs, "SMALL_BYTES", 10)
    write(root, {"deep/er/a": "1", "other/b": "2", "large": "x" * 11})
    write(root, {f"wide/{n}": f"{n}" for n in range(200)})
    made, store = sent(root, place)
    write(root, {"other/b": "3"})
    second, _ = sent(root, place)
    digest = {"": made.tree.manifest.digest} | {
        each.path: each.digest for each in manifest.unfold(made.manifests) if each.path == path
    }
    for key in keys_of(store, digest[path]):
        content = bytearray(store.get(key))
        index = None if path == "large" else packs.parse(content[: packs.index_bytes(content[:12])])
        content[0 if index is None else index.spans[digest[path]].offset] ^= 1
        store.put(key, bytes(content))
    with pytest.raises(CorruptRecord, match=path or "The list of the source tree"):
        unpack(store, made.tree, place / "dest")
    for number, each in enumerate([made, second]):
        assert not store.has(layout.tree(each.tree.manifest.digest))
        write(root, {"other/b": "2" if each is made else "3"})
        upload(each, store)
        whole(store)
        unpack(store, each.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_it_unpacks_into_an_empty_folder_only(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    (place / "dest").mkdir()
    unpack(store, made.tree, place / "dest")
    with pytest.raises(StoreError, match="not empty"):
        unpack(store, made.tree, place / "dest")
    write(place, {"file": ""})
    with pytest.raises(StoreError, match="could not be unpacked"):
        unpack(store, made.tree, place / "file")


DIGEST = hashlib.sha256(b"x").hexdigest()


FILE = ["f", "a", 0o644, 1, DIGEST]


HOSTILE = {
    "up": [["f", "..", 0o644, 1, DIGEST]],
    "up by a path": [["f", "../a", 0o644, 1, DIGEST]],
    "up inside": [["d", "d", 0o755, [["d", "..", 0o755, [FILE]]]]],
    "absolute": [["f", "/tmp/a", 0o644, 1, DIGEST]],
    "path for a name": [["d", "d", 0o755, []], ["f", "d/a", 0o644, 1, DIGEST]],
    "twice": [FILE, FILE],
    "twice in parts": [["s", [FILE]], ["s", [FILE, ["f", "b", 0o644, 1, DIGEST]]]],
    "folder twice": [["d", "d", 0o755, []], ["d", "d", 0o755, [FILE]]],
    "file and folder": [FILE, ["d", "a", 0o755, []]],
    "below a link": [["d", "d", 0o755, []], ["l", "l", "d"], ["d", "l", 0o755, [FILE]]],
    "link up": [["l", "l", "../etc"]],
    "link out by a detour": [["d", "d", 0o755, [["l", "l", "../../x"]]]],
    "link out by a link": [FILE, ["l", "l", "."], ["l", "m", "l/../a"]],
    "absolute link": [["l", "l", "/etc/passwd"]],
    "link to nothing": [["l", "l", "b"]],
    "link to a link": [FILE, ["l", "b", "a"], ["l", "c", "b"]],
    "link to itself": [["l", "l", "l"]],
    "empty link": [["l", "l", ""]],
    "object for a target": [FILE, ["l", "l", {"a": 1}]],
    "nul in a target": [FILE, ["l", "l", "a\0"]],
    "number for a name": [["f", 7, 0o644, 1, DIGEST]],
    "object for a name": [["f", {}, 0o644, 1, DIGEST]],
    "fraction for a size": [["f", "a", 0o644, 1.0, DIGEST]],
    "number for a digest": [["f", "a", 0o644, 1, 7]],
    "more than there is to a file": [[*FILE, 1]],
    "less than there is to a file": [FILE[:-1]],
    "device": [["c", "a", 0o644]],
    "setuid": [["f", "a", 0o4755, 1, DIGEST]],
    "negative size": [["f", "a", 0o644, -1, DIGEST]],
    "short digest": [["f", "a", 0o644, 1, DIGEST[:-1]]],
    "path for a digest": [["f", "a", 0o644, 1, "../" + DIGEST[3:]]],
    "path for a list": [["d", "d", 0o755, "../" + DIGEST[3:]]],
    "path for a part": [["s", "../" + DIGEST[3:]]],
    "file for a list": [["d", "d", 0o755, DIGEST]],
    "no list": [["d", "d", 0o755]],
    "no part": [["s"]],
    "number for a part": [["s", 3]],
    "nul": [["f", "a\0", 0o644, 1, DIGEST]],
    "dot": [["d", ".", 0o755, []]],
    "empty": [["d", "", 0o755, []]],
    "bool": [["d", "a", True, []]],
    "text": ["fa"],
    "number": [3],
    "object": [{}],
    "nothing": [[]],
}


def keep(rows: list, lists: dict[str, bytes]) -> tuple[Blob, int]:
    """Make a list, and those that stand in it in place of their digests; return it, and how many
    files they name."""
    files, flat = 0, []
    for row in rows:
        if isinstance(row, list) and row and isinstance(row[-1], list):
            below, inside = keep(row[-1], lists)
            flat.append([*row[:-1], below.digest])
            files += inside
        else:
            flat.append(row)
            files += isinstance(row, list) and row[:1] == ["f"]
    data = json.dumps({"schema": manifest.SCHEMA, "entries": flat}).encode()
    digest = hashlib.sha256(data).hexdigest()
    lists[digest] = data
    return Blob(digest, len(data)), files


def packed(place: Path, root: Blob, lists: dict[str, bytes]) -> LocalStore:
    """A store with these lists, and one file."""
    store = LocalStore(place / "store")
    index, parts = packs.build({DIGEST: b"x"}, lists)
    store.put(layout.pack(index.name), b"".join([index.data, *parts]))
    store.put(layout.tree(root.digest), packs.Contents((index.name,)).to_json())
    return store


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_write_nothing(place, rows):
    lists: dict[str, bytes] = {}
    root, files = keep(rows, lists)
    with pytest.raises(CorruptRecord):
        unpack(packed(place, root, lists), Tree(root, files, files), place / "deep/dest")
    assert not (place / "deep").exists()


def test_harmless_manifests_written_by_hand_are_unpacked(place):
    """Or the test above could find fault with all of them."""
    lists: dict[str, bytes] = {}
    root, files = keep(
        [["s", [FILE, ["l", "l", "d/a"]]], ["s", [["d", "d", 0o755, [FILE, ["l", "l", "../a"]]]]]],
        lists,
    )
    unpack(packed(place, root, lists), Tree(root, files, files), place / "dest")
    assert sorted(shape(place / "dest")) == ["a", "d", "d/a", "d/l", "l"]


def test_lists_that_unfold_without_end_are_refused(place, monkeypatch):
    monkeypatch.setattr(manifest, "_MOST_ENTRIES", 1000)
    for kind in (["d", "{}", 0o755], ["s"]):
        lists: dict[str, bytes] = {}
        below = keep([], lists)[0]
        for _ in range(60):
            below = keep(
                [
                    [part.format(n) if part == "{}" else part for part in kind] + [below.digest]
                    for n in "12"
                ],
                lists,
            )[0]
        with pytest.raises(CorruptRecord, match="more than 1,000"):
            unpack(packed(place, below, lists), Tree(below, 0, 0), place / "dest")


@given(
    st.binary()
    | st.sampled_from(
        [b"[]", b"{}", b'{"schema":1,"entries":[]}', b'{"schema":2,"entries":3}', b"[" * 5000]
    )
)
def test_garbage_is_no_manifest(data):
    with pytest.raises(CorruptRecord):
        manifest.contents("", data)


def test_a_tree_of_another_size_is_refused(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    with pytest.raises(CorruptRecord, match="not the one of this plan"):
        unpack(store, Tree(made.tree.manifest, 2, 1), place / "dest")


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
