"""Renew an unpacked source tree for the next call of a session: write only what differs.

The function of the last call may have changed, removed or added anything in the tree. A file counts
as unchanged if its stamp is the one that it had after it was written.
Python's caches of compiled modules stay, except those of files that are written.
"""

# ruff: noqa: PTH102, PTH108, PTH115, PTH116, PTH211

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kinetic._core.plan import Tree
from kinetic._core.values import dataclass
from kinetic._source import download, manifest
from kinetic._source.walk import Stamp, stamp_of
from kinetic._store.base import Store

_CACHE = "__pycache__"


@dataclass(frozen=True)
class UnpackedTree:
    """A tree that was unpacked.

    Attributes:
        tree: its digest and size.
        path: its folder.
        entries: its entries; folders come before their entries.
        stamps: the stamp of each file, by path, after it was written.
    """

    tree: Tree
    path: Path
    entries: list[manifest.Entry]
    stamps: Mapping[str, Stamp]


def note(tree: Tree, path: Path, entries: list[manifest.Entry]) -> UnpackedTree:
    """Note the files of a tree that was just unpacked."""
    stamps = {
        e.path: stamp_of(os.stat(path / e.path)) for e in entries if isinstance(e, manifest.File)
    }
    return UnpackedTree(tree, path, entries, stamps)


def renew(store: Store, tree: Tree, before: UnpackedTree) -> UnpackedTree:
    """Turn the unpacked tree `before` into `tree`, or back into itself, and return the result.

    Raises:
        CorruptRecord: the stored tree is damaged or incomplete.
        StoreError: the store does not answer.
        OSError: the folder cannot be written.
    """
    if tree == before.tree:
        entries = before.entries
        stale = _remove_strange(before, entries)
        if not stale:
            return before
    with download.open_tree(store, tree) as stored:
        entries = list(stored.entries)
        stale = _remove_strange(before, entries)
        for entry in entries:
            if entry.path not in stale:
                continue
            at = str(before.path / entry.path)
            if isinstance(entry, manifest.Folder):
                os.mkdir(at, 0o700)
            elif isinstance(entry, manifest.Symlink):
                os.symlink(entry.target, at)
            else:
                download.write_file(stored, entry, str(before.path))
                # Python compares times in whole seconds, and would take the code of a file of equal
                # size that was written in the same second for that of the new one.
                file = before.path / entry.path
                for compiled in (file.parent / _CACHE).glob(f"{file.stem}.*"):
                    compiled.unlink()
        for entry in entries:
            if isinstance(entry, manifest.Folder) and entry.path in stale:
                (before.path / entry.path).chmod(entry.mode | 0o700)
    stamps = {
        entry.path: stamp_of(os.stat(before.path / entry.path))
        if entry.path in stale
        else before.stamps[entry.path]
        for entry in entries
        if isinstance(entry, manifest.File)
    }
    return UnpackedTree(tree, before.path, entries, stamps)


def _remove_strange(before: UnpackedTree, entries: list[manifest.Entry]) -> set[str]:
    """Remove everything from the folder that is not as the wanted entries say; return the paths of
    the entries that must be written."""
    wanted = {entry.path: entry for entry in entries}
    own = {entry.path: entry for entry in before.entries}
    present: set[str] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(before.path / folder) as scan:
            items = list(scan)
        for item in items:
            path = f"{folder}/{item.name}" if folder else item.name
            entry = wanted.get(path)
            if item.name == _CACHE and entry is None:
                continue
            if entry is not None and entry == own.get(path) and _is_same(item, entry, before):
                present.add(path)
                if isinstance(entry, manifest.Folder):
                    folders.append(path)
            elif item.is_dir(follow_symlinks=False):
                shutil.rmtree(item.path)
            else:
                os.unlink(item.path)
    return set(wanted) - present


def _is_same(item: os.DirEntry[str], entry: manifest.Entry, before: UnpackedTree) -> bool:
    """True if an item of the folder is this entry, as it was written."""
    if isinstance(entry, manifest.File):
        info = item.stat(follow_symlinks=False)
        return stamp_of(info) == before.stamps.get(entry.path)
    if isinstance(entry, manifest.Folder):
        return item.is_dir(follow_symlinks=False)
    return item.is_symlink() and os.readlink(item.path) == entry.target
