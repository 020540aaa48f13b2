"""The lists of a tree: the same from any order, whole again when read, and what a sweep finds in
them."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._source import manifest
from kinetic._source.manifest import File, Folder, ManifestPart, Symlink

DIGESTS = st.integers(0, 40).map(lambda number: f"{number:064x}")
MODES = st.integers(0, 0o777)
NAMES = (
    st.binary(min_size=1, max_size=12)
    .filter(lambda name: b"/" not in name and b"\0" not in name)
    .map(os.fsdecode)
    | st.text("[]\",\\'ds0é\u2028\U0001f600", min_size=1)
).filter(lambda name: name not in (".", ".."))


@st.composite
def trees(draw):
    """Entries of a tree, parents before children."""
    found: dict[str, manifest.Entry] = {}
    folders = [""]
    for name in draw(st.lists(NAMES, max_size=60)):
        folder = draw(st.sampled_from(folders))
        path = f"{folder}/{name}" if folder else name
        if path in found:
            continue
        kind = draw(st.sampled_from(["file", "file", "folder", "link"]))
        if kind == "file":
            found[path] = File(path, draw(MODES), draw(st.integers(0, 2**40)), draw(DIGESTS))
        elif kind == "folder":
            found[path] = Folder(path, draw(MODES))
            folders.append(path)
        else:
            found[path] = Symlink(path, "/".join([".."] * path.count("/")) or ".")
    return list(found.values())


def bare(entries):
    """Entries by path, folders without the digests of their lists."""
    return {
        each.path: Folder(each.path, each.mode) if isinstance(each, Folder) else each
        for each in entries
    }


@pytest.fixture(params=[2, 64], ids=["in parts", "whole"], scope="module", autouse=True)
def wide(request):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "_WIDE", request.param)
        yield request.param


@settings(deadline=None)
@given(entries=trees(), data=st.data())
def test_what_is_read_is_what_was_written_whatever_the_order(entries, data):
    lists = manifest.encode(entries)
    assert manifest.encode(data.draw(st.permutations(entries))) == lists
    text = manifest.join(lists)
    assert manifest.split(text) == lists
    assert list(manifest.split(text)) == list(lists)
    read = manifest.unfold(text)
    assert bare(read) == bare(entries)
    seen = {""}
    for entry in read:
        assert entry.path.rpartition("/")[0] in seen, "a folder comes before what is in it"
        seen.add(entry.path)


@settings(deadline=None)
@given(entries=trees())
def test_each_list_comes_after_those_that_it_names(entries):
    before: set[str] = set()
    for digest, data in manifest.encode(entries).items():
        below = {
            each.digest
            for each in manifest.contents("", data)
            if isinstance(each, Folder | ManifestPart)
        }
        assert below <= before
        before.add(digest)


@settings(deadline=None)
@given(entries=trees(), data=st.data())
def test_a_change_changes_the_lists_on_its_way_and_no_others(entries, data):
    files = [each for each in entries if isinstance(each, File)]
    if not files:
        return
    file = data.draw(st.sampled_from(files))
    changed = [
        File(each.path, each.mode, each.size_bytes, "f" * 64) if each is file else each
        for each in entries
    ]
    old, new = manifest.encode(entries), manifest.encode(changed)
    assert list(old)[-1] != list(new)[-1]
    on_the_way = {
        "/".join(file.path.split("/")[:depth]) for depth in range(file.path.count("/") + 1)
    }
    paths: dict[str, set[str]] = {}
    level = [("", list(new)[-1])]
    while level:
        folder, digest = level.pop()
        paths.setdefault(digest, set()).add(folder)
        level += [
            (each.path, each.digest)
            for each in manifest.contents(folder, new[digest])
            if isinstance(each, Folder | ManifestPart)
        ]
    assert all(paths[digest] & on_the_way for digest in new.keys() - old.keys())


def test_a_wide_folder_is_listed_in_parts_of_a_few(wide):
    lists = manifest.encode(
        File(f"f{number}", 0o644, 1, f"{number:064x}") for number in range(3000)
    )
    assert max(len(json.loads(data)["entries"]) for data in lists.values()) <= max(wide, 16)
    assert len(manifest.unfold(manifest.join(lists))) == 3000


def test_nothing_is_a_tree_too():
    (data,) = manifest.encode([]).values()
    assert manifest.unfold(data) == []
