"""A source tree from the store into a folder, verified while it is written.

In: a store, the tree's digest, an empty folder. Out: the files. Called on each host, by its
workspace and by `replica`.

Nothing is taken on trust: the root's list must have the digest that the plan names, everything else
the digest that its list names, and nothing is written outside the folder. What is damaged is
removed from the store, with the lists above what is damaged or missing, so that the next submission
sends it again.
"""

# ruff: noqa: PTH101, PTH102, PTH118, PTH211

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kinetic._core import layout
from kinetic._core.plan import Tree
from kinetic._source import manifest
from kinetic._source.threads import in_threads, worth_it
from kinetic._store import files
from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic.errors import CorruptRecord, NotFound, StoreError, StoreFull

_CHUNK_BYTES = 1 << 20
_AGAIN = "The damaged copy was removed from the store: submit the job again."


@dataclass(frozen=True)
class Listed:
    """What a tree holds, folders before what is in them; and its lists by digest, level by level
    from the root."""

    entries: list[manifest.Entry]
    lists: dict[str, bytes]


def unpack(store: Store, tree: Tree, dest: Path) -> list[manifest.Entry]:
    """Write the tree into `dest`, an empty folder or none, and return what it holds.

    Permission bits are restored; folders stay usable by their owner.

    Raises:
        CorruptRecord: what is stored is not what was sent.
        StoreError: the folder is not empty or cannot be written; StoreFull when its disk is full.
    """
    found = listed(store, tree)
    try:
        dest.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(dest.iterdir()):
            raise StoreError(
                f"The source tree cannot be unpacked into {dest}: it is not empty. Remove it first."
            )
        _write(store, tree, found, str(dest))
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"The source tree could not be unpacked into {dest}: {error}.") from error
    return found.entries


def listed(store: Store, tree: Tree) -> Listed:
    """Return what the tree holds.

    Raises:
        CorruptRecord: a list is missing, or not the one that the plan or the list above names.
    """
    lists: dict[str, bytes] = {}

    def read(level: Sequence[tuple[str, str]]) -> list[bytes]:
        found = in_threads(
            lambda each: _list(store, lists, *each), level, worth=not isinstance(store, LocalStore)
        )
        for (_, digest), data in zip(level, found, strict=True):
            lists.setdefault(digest, data)
        return found

    entries = manifest.decode(tree.manifest.digest, read)
    sizes = [entry.size_bytes for entry in entries if isinstance(entry, manifest.File)]
    if (len(sizes), sum(sizes)) != (tree.files, tree.size_bytes):
        raise CorruptRecord(
            "The manifest of the source tree is not the one of this plan: its files differ. Submit "
            "the job again."
        )
    return Listed(entries, lists)


def _list(store: Store, above: dict[str, bytes], folder: str, digest: str) -> bytes:
    what = f"The list of {folder!r} in the source tree" if folder else "The list of the source tree"
    try:
        data = store.get(layout.blob(digest))
    except NotFound as error:
        forget(store, above, digest)
        raise CorruptRecord(f"{what} is missing from the store: submit the job again.") from error
    if hashlib.sha256(data).hexdigest() != digest:
        forget(store, above, digest, damaged=True)
        raise CorruptRecord(f"{what} is not what was sent. {_AGAIN}")
    return data


def _write(store: Store, tree: Tree, found: Listed, dest: str) -> None:
    folders = [entry for entry in found.entries if isinstance(entry, manifest.Folder)]
    for folder in folders:
        os.mkdir(os.path.join(dest, folder.path), 0o700)
    files = [entry for entry in found.entries if isinstance(entry, manifest.File)]
    worth = not isinstance(store, LocalStore) or worth_it(tree.files, tree.size_bytes)
    in_threads(lambda file: write_file(store, found, file, dest), files, worth=worth)
    for entry in found.entries:
        if isinstance(entry, manifest.Link):
            os.symlink(entry.target, os.path.join(dest, entry.path))
    for folder in folders:
        os.chmod(os.path.join(dest, folder.path), folder.mode | 0o700)


def write_file(store: Store, found: Listed, file: manifest.File, dest: str) -> None:
    """Write one file of the tree below `dest` and verify it.

    Raises:
        CorruptRecord: what is stored is not what was sent.
    """
    path = os.path.join(dest, file.path)
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with open(descriptor, "wb", buffering=0) as target:
        for chunk in _chunks(store, found, file):
            digest.update(chunk)
            size += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[target.write(view) :]
        if (digest.hexdigest(), size) != (file.digest, file.size_bytes):
            forget(store, found.lists, file.digest, damaged=True)
            raise CorruptRecord(
                f"The stored content of {file.path!r} is not what was sent. {_AGAIN}"
            )
        os.fchmod(descriptor, file.mode & 0o777)


def _chunks(store: Store, found: Listed, file: manifest.File) -> Iterator[bytes]:
    key = layout.blob(file.digest)
    try:
        if not isinstance(store, LocalStore):
            yield store.get(key)
            return
        with files.opened(store.path(key)) as source:  # Never all of a large file in memory.
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except (NotFound, FileNotFoundError, IsADirectoryError) as error:
        forget(store, found.lists, file.digest)
        raise CorruptRecord(
            f"The stored content of {file.path!r} is missing. Submit the job again."
        ) from error


def forget(store: Store, lists: dict[str, bytes], digest: str, *, damaged: bool = False) -> None:
    """Remove the lists on the way to a content, and itself when damaged, so that the next
    submission comes by and sends it again.

    Args:
        store: where they are.
        lists: by digest, level by level from the root.
        digest: of the content.
        damaged: whether it is there, but wrong.
    """
    lost = {digest}
    for above, data in reversed(lists.items()):
        if any(each.encode() in data for each in lost):
            lost.add(above)
    for each in lost if damaged else lost - {digest}:
        with suppress(StoreError):  # A host that may only read has done its part by saying so.
            store.delete(layout.blob(each))
