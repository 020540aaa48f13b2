"""Unpacks a source tree from the store into a folder, verifying it on the way.

In: a store, the tree's digest, an empty folder. Out: the files.

The store is not trusted: the tree's list must have the digest in the job's plan, and each file the
digest in the list. Nothing is written outside the folder. Damaged content is removed from the store
together with the record of the tree, so that the next submission sends it again.
"""

# ruff: noqa: PTH101, PTH102, PTH118, PTH211

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from io import FileIO
from pathlib import Path

from kinetic._core import layout
from kinetic._core.plan import Tree
from kinetic._core.values import dataclass
from kinetic._source import manifest, packs
from kinetic._source.packs import Index, TreeRecord
from kinetic._store import files
from kinetic._store.base import Store, folder_of
from kinetic._store.many import FILE_THREADS, at_once
from kinetic.errors import CorruptRecord, NotFound, StoreError, StoreFull

_WORTH_THREADS_BYTES = 8 << 20
_RESUBMIT = "It was removed from the store: submit the job again."


@dataclass(frozen=True)
class _Pack:
    """A pack (many small files in one object), open for reading."""

    index: Index
    file: FileIO


@dataclass(frozen=True)
class StoredTree:
    """A tree in the store, open for reading.

    Attributes:
        store: the store.
        tree: its digest and size.
        packs: its packs, by the digests of their contents.
        entries: its entries; folders come before their entries.
    """

    store: Store
    tree: Tree
    packs: Mapping[str, _Pack]
    entries: list[manifest.Entry] = field(default_factory=list)

    def read_small(self, digest: str, subject: str) -> bytes:
        """Return the content with this digest from a pack.

        Raises:
            CorruptRecord: it is missing or damaged; the message begins with `subject`.
        """
        pack = self.packs.get(digest)
        if pack is None:
            raise self.explain_missing(subject)
        offset, size_bytes = pack.index.spans[digest]
        data = os.pread(pack.file.fileno(), size_bytes, offset)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self.explain_damage(subject, pack.index.name)
        return data

    def explain_missing(self, subject: str, name: str = "") -> CorruptRecord:
        """Return the error for content that is missing from the store, and let the next submission
        send it again. `name` is the object's name of a large content. The object is removed,
        because it may not be a file."""
        _forget(self.store, self.tree, name)
        return CorruptRecord(f"{subject} is missing from the store: submit the job again.")

    def explain_damage(self, subject: str, name: str) -> CorruptRecord:
        """Return the error for damaged content, and let the next submission send it again. `name`
        is the name of the object in the store that holds the content."""
        _forget(self.store, self.tree, name)
        return CorruptRecord(f"{subject} is damaged. {_RESUBMIT}")


def unpack(store: Store, tree: Tree, dest: Path) -> list[manifest.Entry]:
    """Write the tree into `dest`, which is empty or does not exist, and return its entries.

    Permission bits are restored; folders stay usable by their owner.

    Raises:
        CorruptRecord: the stored tree is damaged or incomplete.
        StoreError: the folder is not empty or cannot be written; StoreFull when its disk is full.
    """
    with open_tree(store, tree) as stored:
        try:
            dest.mkdir(exist_ok=True, mode=0o700)  # Without parents: they may have been removed.
            if any(dest.iterdir()):
                raise StoreError(
                    f"The job's files cannot be unpacked into {dest}: the folder is not empty. "
                    "Remove it first."
                )
            write_tree(stored, str(dest), write_file)
        except OSError as error:
            kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind(f"The job's files could not be unpacked into {dest}: {error}.") from error
        return stored.entries


@contextmanager
def open_tree(store: Store, tree: Tree) -> Iterator[StoredTree]:
    """Fetch a tree's packs, unless the store is a local folder, and read the tree's list.

    Raises:
        CorruptRecord: the list is missing, or differs from the plan's.
        StoreError: the packs cannot be written to this machine's disk.
    """
    record = _read_record(store, tree)
    with ExitStack() as stack:
        opened = _open_packs(store, tree, record.packs, stack)
        stored = StoredTree(
            store, tree, {digest: pack for pack in opened for digest in pack.index.spans}
        )
        base = stored.read_small(record.base_list, _LIST)
        try:
            data = manifest.amend(packs.inflate_list(base), record.removed, record.changed)
            if hashlib.sha256(data).hexdigest() != tree.manifest.digest:
                raise CorruptRecord(f"{_LIST} is damaged.")
        except CorruptRecord as error:
            _forget(store, tree)
            raise CorruptRecord(f"{error} {_RESUBMIT}") from error
        stored.entries.extend(manifest.decode(data))
        sizes = [entry.size_bytes for entry in manifest.list_files(data)]
        if (len(sizes), sum(sizes)) != (tree.files, tree.size_bytes):
            raise CorruptRecord(
                f"{_LIST} is that of another job: the number or the size of the files differs. "
                "Submit the job again."
            )
        yield stored


_LIST = "The stored list of the job's files"


def _read_record(store: Store, tree: Tree) -> TreeRecord:
    try:
        return TreeRecord.from_json(store.get(layout.tree(tree.manifest.digest)))
    except NotFound as error:
        raise CorruptRecord(f"{_LIST} is missing from the store: submit the job again.") from error
    except CorruptRecord as error:
        _forget(store, tree)
        raise CorruptRecord(f"{error} {_RESUBMIT}") from error


def _open_packs(store: Store, tree: Tree, names: Sequence[str], stack: ExitStack) -> list[_Pack]:
    """Open packs for reading until the stack is closed."""
    if (at := folder_of(store)) is not None:
        paths = [at / layout.pack(name) for name in names]
    else:
        from tempfile import TemporaryDirectory  # Slow to import, not needed for a local store.

        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kn-packs-")))
        paths = [folder / name for name in names]

        def fetch(name: str) -> None:
            with suppress(NotFound):
                store.fetch(layout.pack(name), folder / name)

        at_once(fetch, names, store.calls_at_once)
    return [
        _open_pack(store, tree, name, path, stack) for name, path in zip(names, paths, strict=True)
    ]


def _open_pack(store: Store, tree: Tree, name: str, path: Path, stack: ExitStack) -> _Pack:
    try:
        file = stack.enter_context(files.open_regular(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        _forget(store, tree, name)
        raise CorruptRecord(
            "An archive of the job's files is missing from the store: submit the job again."
        ) from error
    except OSError as error:
        raise StoreError(f"An archive of the job's files could not be read: {error}.") from error
    try:
        size = packs.index_bytes(file.read(packs.HEAD_BYTES))
        if size > os.fstat(file.fileno()).st_size:
            raise CorruptRecord("An archive of the job's files is cut off.")
        index = packs.parse(os.pread(file.fileno(), size, 0))
        if index.name != name:
            raise CorruptRecord("An archive of the job's files is damaged.")
    except CorruptRecord as error:
        _forget(store, tree, name)
        raise CorruptRecord(f"{error} {_RESUBMIT}") from error
    return _Pack(index, file)


def write_tree(
    stored: StoredTree, dest: str, put: Callable[[StoredTree, manifest.File, str], None]
) -> None:
    """Write all entries of a tree below `dest`. Files are written by `put`, in several threads."""
    folders = [entry for entry in stored.entries if isinstance(entry, manifest.Folder)]
    for folder in folders:
        os.mkdir(os.path.join(dest, folder.path), 0o700)
    all_files = [entry for entry in stored.entries if isinstance(entry, manifest.File)]
    small = [file for file in all_files if file.digest in stored.packs]
    large = [file for file in all_files if file.digest not in stored.packs]
    threads = FILE_THREADS if stored.tree.size_bytes > _WORTH_THREADS_BYTES else 1
    at_once(lambda file: put(stored, file, dest), small, threads)
    threads = max(threads, stored.store.calls_at_once)
    at_once(lambda file: put(stored, file, dest), large, threads)
    for entry in stored.entries:
        if isinstance(entry, manifest.Symlink):
            os.symlink(entry.target, os.path.join(dest, entry.path))
    for folder in folders:
        os.chmod(os.path.join(dest, folder.path), folder.mode | 0o700)


def write_file(stored: StoredTree, file: manifest.File, dest: str) -> None:
    """Write one file of the tree below `dest` and verify it.

    Raises:
        CorruptRecord: the stored content is missing or damaged.
    """
    subject = f"The stored content of the file {file.path!r}"
    path = os.path.join(dest, file.path)
    if file.digest not in stored.packs:
        _fetch_large(stored, file, subject, path)
        return
    content = stored.read_small(file.digest, subject)
    if len(content) != file.size_bytes:
        raise stored.explain_missing(subject)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        files.write_all(descriptor, content)
        os.fchmod(descriptor, file.mode & 0o777)
    finally:
        os.close(descriptor)


def _fetch_large(stored: StoredTree, file: manifest.File, subject: str, path: str) -> None:
    """Fetch a large file, which is a separate object in the store, to `path`."""
    try:
        stored.store.fetch(layout.blob(file.digest), Path(path), sha256=file.digest)
    except NotFound as error:
        raise stored.explain_missing(subject, file.digest) from error
    except CorruptRecord as error:
        raise stored.explain_damage(subject, file.digest) from error
    os.chmod(path, file.mode & 0o777)


def _forget(store: Store, tree: Tree, name: str = "") -> None:
    """Remove the record of a tree, and the object `name` unless it is "", so that the next
    submission sends both again. Hosts of other jobs that need the object report that it is
    missing. Ignore errors, because this host may only have the right to read."""
    names = (layout.pack(name), layout.blob(name)) if name else ()
    for key in (layout.tree(tree.manifest.digest), *names):
        with suppress(StoreError):
            store.delete(key)
