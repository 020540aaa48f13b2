"""A source tree from the store into a folder, verified while it is written.

In: a store, the tree's digest, an empty folder. Out: the files. Called on each host, by its workspace and by `replica`.

Nothing is taken on trust: the manifest must have the digest that the plan names, every content the digest that the manifest
names, and nothing is written outside the folder. A damaged content is removed from the store, so that the next submission
sends it again.
"""

# ruff: noqa: PTH101, PTH102, PTH118, PTH211

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kinetic.errors import CorruptRecord, NotFound, StoreError, StoreFull
from kinetic.job import paths
from kinetic.job.plan import Tree
from kinetic.packaging import manifest
from kinetic.packaging.threads import in_threads, worth_it
from kinetic.storage.base import Store
from kinetic.storage.local import LocalStore

_CHUNK_BYTES = 1 << 20
_AGAIN = "The damaged copy was removed from the store: submit the job again."


def unpack(store: Store, tree: Tree, dest: Path) -> None:
    """Write the tree into `dest`, an empty folder or none. Permission bits are restored; folders stay usable by their owner.

    Raises:
        CorruptRecord: what is stored is not what was sent.
        StoreError: the folder is not empty or cannot be written; StoreFull when its disk is full.
    """
    entries = listed(store, tree)
    try:
        dest.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(dest.iterdir()):
            raise StoreError(f"The source tree cannot be unpacked into {dest}: it is not empty. Remove it first.")
        _write(store, tree, entries, str(dest))
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"The source tree could not be unpacked into {dest}: {error}.") from error


def listed(store: Store, tree: Tree) -> list[manifest.Entry]:
    """Return what the tree holds.

    Raises:
        CorruptRecord: its manifest is missing, or not the one that the plan names.
    """
    key = paths.blob(tree.manifest.digest)
    try:
        data = store.get(key)
    except NotFound as error:
        raise CorruptRecord("The manifest of the source tree is missing from the store: submit the job again.") from error
    if hashlib.sha256(data).hexdigest() != tree.manifest.digest:
        forget(store, key)
        raise CorruptRecord(f"The manifest of the source tree is not what was sent. {_AGAIN}")
    entries = manifest.decode(data)
    sizes = [entry.size_bytes for entry in entries if isinstance(entry, manifest.File)]
    if (len(sizes), sum(sizes)) != (tree.files, tree.size_bytes):
        raise CorruptRecord(
            "The manifest of the source tree is not the one of this plan: its files differ. Submit the job again."
        )
    return entries


def _write(store: Store, tree: Tree, entries: list[manifest.Entry], dest: str) -> None:
    folders = [entry for entry in entries if isinstance(entry, manifest.Folder)]
    for folder in sorted(folders, key=lambda each: each.path.count("/")):
        os.mkdir(os.path.join(dest, folder.path), 0o700)
    files = [entry for entry in entries if isinstance(entry, manifest.File)]
    worth = not isinstance(store, LocalStore) or worth_it(tree.files, tree.size_bytes)
    in_threads(lambda file: write_file(store, tree, file, dest), files, worth=worth)
    for entry in entries:
        if isinstance(entry, manifest.Link):
            os.symlink(entry.target, os.path.join(dest, entry.path))
    for folder in folders:
        os.chmod(os.path.join(dest, folder.path), folder.mode | 0o700)


def write_file(store: Store, tree: Tree, file: manifest.File, dest: str) -> None:
    """Write one file of the tree below `dest` and verify it.

    Raises:
        CorruptRecord: what is stored is not what was sent.
    """
    path = os.path.join(dest, file.path)
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as target:
        for chunk in _chunks(store, tree, file):
            digest.update(chunk)
            size += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[target.write(view) :]
        if (digest.hexdigest(), size) != (file.digest, file.size_bytes):
            forget(store, paths.blob(file.digest), paths.blob(tree.manifest.digest))
            raise CorruptRecord(f"The stored content of {file.path!r} is not what was sent. {_AGAIN}")
        os.fchmod(descriptor, file.mode & 0o777)


def _chunks(store: Store, tree: Tree, file: manifest.File) -> Iterator[bytes]:
    key = paths.blob(file.digest)
    try:
        if not isinstance(store, LocalStore):
            yield store.get(key)
            return
        with open(store.path(key), "rb", buffering=0) as source:  # Never all of a large file in memory.
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except (NotFound, FileNotFoundError) as error:
        forget(store, paths.blob(tree.manifest.digest))
        raise CorruptRecord(f"The stored content of {file.path!r} is missing. Submit the job again.") from error


def forget(store: Store, *keys: str) -> None:
    """Remove damaged content, so that the next submission sends it again."""
    for key in keys:
        with suppress(StoreError):  # A host that may only read has done its part by saying so.
            store.delete(key)
