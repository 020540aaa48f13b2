"""Uploads a source tree by content: contents that the store has are not sent again.

In: a `Bundle`, a store. Out: `Sent`.

Small files are sent in packs, large ones one by one. The record of the tree, which names them all,
is written last: if it exists, the store has everything that the tree needs. A note in the user's
cache lists the packs in the store: those of the tree's base and those of later changes (see
`packs`). If a tree has changed, only contents in none of these packs are sent. Packs that will be
used are renewed, so that the store's cleanup does not remove them before a job needs them.

Files may change during the upload. Each file is sent under the digest of the bytes that were read,
and the list is written afterwards. So every list in the store is correct, and a program that writes
to the files cannot make a submission fail. If a file only grows, the part that was packed is sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from io import FileIO
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._core.values import dataclass
from kinetic._source import cache, hashing, manifest, packs
from kinetic._source.manifest import File
from kinetic._store.base import Store
from kinetic._store.files import CHUNK_BYTES, chunks, open_regular
from kinetic._store.many import FILE_THREADS, at_once, put_content, renew_many
from kinetic.errors import CorruptRecord, StoreError

if TYPE_CHECKING:
    from kinetic._source.bundle import Bundle

_log = logging.getLogger("kinetic.packaging")

_WHOLE_BYTES = 64 << 20
_LOGGED_PATHS = 5
_MOST_DELTAS = 8
"""Largest number of packs with changes, besides the base: a host makes one call per pack."""

Changes = Mapping[str, File | None]
"""Files that changed since they were packed, by path: the file that was sent instead, or None if it
could not be read."""


@dataclass(frozen=True)
class Sent:
    """The result of an upload: number and bytes of the files that the store did not have, and bytes
    of the lists, indexes and records.

    Attributes:
        changed: the tree as it was sent if files changed since it was packed; else None.
    """

    files: int
    size_bytes: int
    lists_bytes: int = 0
    changed: Bundle | None = field(default=None, compare=False)


@dataclass(frozen=True)
class _Base:
    """The packs of a tree that the store has (see `packs`).

    Attributes:
        packs: names of the packs.
        digest: SHA-256 of the compressed list in one of the packs.
        manifest: the list.
        deltas: packs of changes since, by name: the sizes of their contents, by digest.
    """

    packs: tuple[str, ...]
    digest: str
    manifest: bytes
    deltas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def small_sizes(self) -> dict[str, int]:
        """Return the sizes of the contents in the packs of the base, by digest."""
        return _small_sizes(_by_content(self.manifest))

    def list_stored(self) -> set[str]:
        """Return the digests of the contents in all packs."""
        return {*self.small_sizes(), *itertools.chain.from_iterable(self.deltas.values())}


class _Differs(Exception):
    """The file has changed since it was packed."""


def upload(
    bundle: Bundle, store: Store, *, on_change: Callable[[Changes], None] | None = None
) -> Sent:
    """Upload the tree; send nothing if the store has its record.

    Args:
        bundle: the tree.
        store: the store to upload to.
        on_change: called with the files that changed since they were packed, before a list names
            them; may raise.

    Raises:
        StoreError: the store cannot be written to.
    """
    if store.renew(layout.tree(bundle.tree.manifest.digest)):
        return Sent(0, 0)
    return _Upload(bundle, store).run(on_change)


class _Upload:
    """One upload of a project to the store, in which small files travel together in packs.

    Attributes:
        changes: files that changed since they were packed.
        packs: for each pack in the store, by name, the sizes of its files in bytes, by digest.
        file_sizes, list_sizes: sizes in bytes of the files and of the lists that were sent.
    """

    def __init__(self, bundle: Bundle, store: Store) -> None:
        self._bundle = bundle
        self._store = store
        self._note = None if bundle.note is None else cache.sent_note_path(bundle.note, store.uri)
        self.changes: dict[str, File | None] = {}
        self.packs: dict[str, dict[str, int]] = {}
        self.file_sizes: list[int] = []
        self.list_sizes: list[int] = []

    def run(self, on_change: Callable[[Changes], None] | None) -> Sent:
        sources = _by_content(self._bundle.manifest)
        sizes = _small_sizes(sources)
        base = self._find_base(sizes)
        stored = base.list_stored() if base is not None else set()
        missing = {digest: size for digest, size in sizes.items() if digest not in stored}
        *groups, last = packs.groups(missing)
        shrunk = self._send_large([same for digest, same in sources.items() if digest not in sizes])
        at_once(
            lambda group: self._send_pack(self._read_small(sources[digest] for digest in group)),
            groups,
            min(self._store.calls_at_once, FILE_THREADS),
        )
        contents = shrunk | self._read_small(sources[digest] for digest in last)
        if self.changes and on_change is not None:
            on_change(self.changes)
        bundle = self._amend_tree() if self.changes else self._bundle
        if base is not None:
            self._send_pack(contents)
            if self.packs:
                base = dataclasses.replace(base, deltas={**base.deltas, **self.packs})
                self._remember(base)
        else:
            data = packs.deflate_list(bundle.manifest)
            self._send_pack(contents, data)
            base = _Base(tuple(self.packs), hashlib.sha256(data).hexdigest(), bundle.manifest)
            self._remember(base)
        self._record(bundle, base)
        changed = None if bundle is self._bundle else bundle
        return Sent(len(self.file_sizes), sum(self.file_sizes), sum(self.list_sizes), changed)

    def _find_base(self, sizes: Mapping[str, int]) -> _Base | None:
        """Return the base that the store has. Return None if the tree uses too little of it: hosts
        fetch whole packs, so a new base is better.

        Args:
            sizes: sizes of the tree's small contents, by digest.
        """
        base = self._read_note()
        if base is None:
            return None
        stored = base.small_sizes()
        used_bytes = sum(size for digest, size in stored.items() if digest in sizes)
        delta_bytes = sum(size for digest, size in sizes.items() if digest not in stored)
        removed, changed = manifest.compare(base.manifest, self._bundle.manifest)
        half_bytes = sum(stored.values()) // 2
        half_rows = base.manifest.count(b"\n") // 2 + 1
        if used_bytes < half_bytes or delta_bytes > half_bytes:
            return None
        if len(removed) + len(changed) > half_rows:
            return None
        base = dataclasses.replace(base, deltas=_choose_deltas(base, sizes, half_bytes))
        renewed = renew_many(self._store, [layout.pack(name) for name in _list_packs(base)])
        if not renewed.issuperset(map(layout.pack, base.packs)):
            return None
        deltas = {name: pack for name, pack in base.deltas.items() if layout.pack(name) in renewed}
        return dataclasses.replace(base, deltas=deltas)

    def _send_large(self, contents: Sequence[Sequence[File]]) -> dict[str, bytes]:
        """Send large files, each as an object. Return the contents, by digest, of those that have
        become small since they were listed: they travel in packs."""
        small: dict[str, bytes] = {}

        def send(same: Sequence[File]) -> None:
            key = layout.blob(same[0].digest)
            if not self._store.renew(key):
                for file in same:
                    if not self._send_file(file, small):
                        break

        size_bytes = sum(same[0].size_bytes for same in contents)
        is_worth = hashing.is_worth_threads(len(contents), size_bytes)
        at_once(send, contents, FILE_THREADS if self._store.calls_at_once > 1 or is_worth else 1)
        return small

    def _send_file(self, file: File, small: dict[str, bytes]) -> bool:
        """Send one large file; return whether it has changed since it was packed. If it has become
        small, add its content to `small` instead."""
        try:
            with open_regular(self._bundle.path_on_disk(file.path)) as source:
                try:
                    self._put_large(file, _read_verified(source, file))
                    return False
                except _Differs:
                    source.seek(0)
                self.changes[file.path] = self._send_changed(source, file, small)
        except OSError as error:
            self._note_unreadable(file, error)
        return True

    def _put_large(self, file: File, content: Iterator[bytes]) -> None:
        data = content if file.size_bytes > _WHOLE_BYTES else b"".join(content)
        if self._store.put(layout.blob(file.digest), data, if_absent=True):
            self.file_sizes.append(file.size_bytes)

    def _send_changed(self, source: FileIO, file: File, small: dict[str, bytes]) -> File:
        """Send a changed file from a copy, which cannot change between hashing and sending."""
        from tempfile import TemporaryFile  # Slow to import, and not needed for an unchanged tree.

        with TemporaryFile() as copy:
            digest = hashlib.sha256()
            for chunk in chunks(source, os.fstat(source.fileno()).st_size):
                digest.update(chunk)
                copy.write(chunk)
            now = file._replace(digest=digest.hexdigest(), size_bytes=copy.tell())
            copy.seek(0)
            if now.size_bytes <= packs.SMALL_BYTES:
                small[now.digest] = copy.read()
            else:
                self._put_large(now, iter(lambda: copy.read(CHUNK_BYTES), b""))
            return now

    def _read_small(self, contents: Iterable[Sequence[File]]) -> dict[str, bytes]:
        """Read each content from any of the files that had it when the tree was packed. If a file
        has changed, read its new content too."""
        by_digest: dict[str, bytes] = {}
        for same in contents:
            for file in same:
                try:
                    with open_regular(self._bundle.path_on_disk(file.path)) as source:
                        data = b"".join(chunks(source, file.size_bytes))
                        if hashlib.sha256(data).hexdigest() == file.digest:
                            by_digest[file.digest] = data
                            break  # Other files with the same content need not be read.
                        source.seek(0)
                        size_bytes = os.fstat(source.fileno()).st_size
                        data = b"".join(chunks(source, size_bytes))
                except OSError as error:
                    self._note_unreadable(file, error)
                    continue
                digest = hashlib.sha256(data).hexdigest()
                self.changes[file.path] = file._replace(digest=digest, size_bytes=len(data))
                by_digest[digest] = data
        return by_digest

    def _note_unreadable(self, file: File, error: OSError) -> None:
        path = self._bundle.path_on_disk(file.path)
        _log.info("%s could not be read during the upload and is left out: %s", path, error)
        self.changes[file.path] = None

    def _send_pack(self, files: Mapping[str, bytes], *lists: bytes) -> None:
        """Write a pack, unless it is empty."""
        contents = {**files, **{hashlib.sha256(data).hexdigest(): data for data in lists}}
        if not contents:
            return
        index = packs.build(contents)
        self.packs[index.name] = {digest: len(data) for digest, data in files.items()}
        if put_content(self._store, layout.pack(index.name), [index.data, *contents.values()]):
            self.file_sizes.extend(map(len, files.values()))
            self.list_sizes += [len(index.data), *map(len, lists)]

    def _amend_tree(self) -> Bundle:
        """Return the tree with the changed files, without missing files and links to them."""
        bundle = self._bundle
        _log.info(
            "%s: files changed during the upload: %s",
            bundle.root,
            ", ".join(sorted(self.changes)[:_LOGGED_PATHS]),
        )
        entries = [
            self.changes.get(entry.path, entry) if isinstance(entry, File) else entry
            for entry in manifest.decode(bundle.manifest)
        ]
        return bundle.with_entries([entry for entry in entries if entry is not None])

    def _record(self, bundle: Bundle, base: _Base) -> None:
        """Write the record of a tree, after all its contents."""
        sources = _by_content(bundle.manifest)
        removed, changed = manifest.compare(base.manifest, bundle.manifest)
        record = packs.TreeRecord(
            _list_packs(base),
            tuple(sorted(sources.keys() - _small_sizes(sources).keys())),
            base.digest,
            tuple(removed),
            tuple(changed),
        ).to_json()
        self._store.put(layout.tree(bundle.tree.manifest.digest), record, if_absent=True)
        self.list_sizes.append(len(record))

    def _remember(self, base: _Base) -> None:
        """Save the base in the user's cache; errors are ignored."""
        if self._note is None:
            return
        head = json.dumps({"packs": base.packs, "digest": base.digest, "deltas": base.deltas})
        try:
            cache.write(self._note, head.encode() + b"\n" + base.manifest)
        except (OSError, StoreError) as error:
            _log.debug("the upload could not be noted in %s: %s", self._note, error)

    def _read_note(self) -> _Base | None:
        try:
            if self._note is None:
                return None
            head, _, data = cache.read(self._note).partition(b"\n")
            about = json.loads(head)
            manifest.decode(data)
            return _Base(tuple(about["packs"]), about["digest"], data, dict(about["deltas"]))
        except (OSError, ValueError, LookupError, TypeError, CorruptRecord):
            return None


def _list_packs(base: _Base) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*base.packs, *base.deltas)))


def _choose_deltas(
    base: _Base, sizes: Mapping[str, int], most_bytes: int
) -> dict[str, Mapping[str, int]]:
    """Return the packs with changes that a tree needs. Return none if they are too many or too
    large, so that all changes go into one new pack.

    Args:
        base: the base with its packs.
        sizes: sizes of the tree's small contents, by digest.
        most_bytes: maximum size that a host may fetch in addition to the base.
    """
    needed = sizes.keys() - base.small_sizes().keys()
    deltas = {
        name: pack for name, pack in base.deltas.items() if not needed.isdisjoint(pack.keys())
    }
    held = {digest: size for pack in deltas.values() for digest, size in pack.items()}
    size_bytes = sum(size for pack in deltas.values() for size in pack.values())
    size_bytes += sum(sizes[digest] for digest in needed - held.keys())
    return deltas if len(deltas) < _MOST_DELTAS and size_bytes <= most_bytes else {}


def _by_content(data: bytes) -> dict[str, list[File]]:
    """Return the files of a tree by the digest of their content."""
    sources: dict[str, list[File]] = {}
    for file in manifest.list_files(data):
        sources.setdefault(file.digest, []).append(file)
    return sources


def _small_sizes(sources: Mapping[str, Sequence[File]]) -> dict[str, int]:
    """Return the sizes of the contents that travel in packs, by digest."""
    sizes = {digest: same[0].size_bytes for digest, same in sources.items()}
    return {digest: size for digest, size in sizes.items() if size <= packs.SMALL_BYTES}


def _read_verified(source: FileIO, file: File) -> Iterator[bytes]:
    """Yield the content of a file. If the file has changed, raise at the end, so that the store
    discards what it has written."""
    digest = hashlib.sha256()
    try:
        for chunk in chunks(source, file.size_bytes):
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise _Differs from error
    if digest.hexdigest() != file.digest:
        raise _Differs
