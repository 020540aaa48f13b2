"""The list of a tree's files is the same whatever the order of its entries, and after decoding. A
base list and the changes to it give the same list, too."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._source import manifest
from kinetic._source.manifest import File, Folder, Symlink

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
    """Draw the entries of a file tree, parents before children."""
    entries: dict[str, manifest.Entry] = {}
    folders = [""]
    for name in draw(st.lists(NAMES, max_size=60)):
        folder = draw(st.sampled_from(folders))
        path = f"{folder}/{name}" if folder else name
        if path in entries:
            continue
        kind = draw(st.sampled_from(["file", "file", "folder", "link"]))
        if kind == "file":
            entries[path] = File(path, draw(MODES), draw(st.integers(0, 2**40)), draw(DIGESTS))
        elif kind == "folder":
            entries[path] = Folder(path, draw(MODES))
            folders.append(path)
        else:
            entries[path] = Symlink(path, "/".join([".."] * path.count("/")) or ".")
    return list(entries.values())


@settings(deadline=None)
@given(entries=trees(), data=st.data())
def test_what_is_read_is_what_was_written_whatever_the_order(entries, data):
    text = manifest.encode(entries)
    assert manifest.encode(data.draw(st.permutations(entries))) == text
    read = manifest.decode(text)
    assert {entry.path: entry for entry in read} == {entry.path: entry for entry in entries}
    folders = {""}
    for entry in read:
        assert entry.path.rpartition("/")[0] in folders, "a folder comes before what is in it"
        folders.add(entry.path)


@settings(deadline=None)
@given(first=trees(), second=trees(), shared=trees())
def test_a_list_is_another_one_and_the_differences(first, second, shared):
    def merge(own):
        return manifest.encode({e.path: e for e in (*shared, *own)}.values())

    base, text = merge(first), merge(second)
    removed, changed = manifest.compare(base, text)
    assert manifest.amend(base, removed, changed) == text
    assert manifest.compare(text, text) == ([], [])


@settings(deadline=None)
@given(entries=trees(), data=st.data())
def test_one_changed_file_is_one_row(entries, data):
    files = [entry for entry in entries if isinstance(entry, File)]
    if not files:
        return
    file = data.draw(st.sampled_from(files))
    changed = [file._replace(digest="f" * 64) if entry is file else entry for entry in entries]
    removed, rows = manifest.compare(manifest.encode(entries), manifest.encode(changed))
    assert removed == []
    assert rows == [manifest.encode([file._replace(digest="f" * 64)]).decode()]


def test_an_empty_tree_has_an_empty_list():
    assert manifest.encode([]) == b""
    assert manifest.decode(b"") == ()


def test_regular_files_are_told_from_all_else():
    text = manifest.encode(
        [Folder("d", 0o755), File("d/a", 0o644, 1, "0" * 64), Symlink("l", "d/a")]
    )
    assert manifest.files_among(text, ["d", "d/a", "l", "x"]) == {"d/a"}
