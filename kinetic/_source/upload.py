"""Uploading a source tree by content: what the store has already is not sent again.

In: a `Bundle`, a store. Out: `Sent`.

Small files and the lists of folders travel in packs, large files one by one. Last comes the record
of the tree, which names them all: if it exists, everything that the tree needs is there, and a
submission looks no further. What is there and will be used is renewed, so that no sweep takes it
before a plan names it (see `_store.gc_lock`).

Files may change during the upload. Each is sent as it is read, under the digest of what was read;
where that differs from what was packed, the lists are rewritten to name what was sent. So every
list in the store is true, and no writer can make a submission fail. Of a file that only grows, the
part that was packed is sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kinetic._core import layout
from kinetic._core.plan import Blob, Tree
from kinetic._core.values import dataclass
from kinetic._source import cache, hashing, manifest, packs
from kinetic._source.packs import Index
from kinetic._store.base import Store
from kinetic._store.files import CHUNK_BYTES, open_regular
from kinetic._store.many import FILE_THREADS, at_once, get_many, put_content, renew_many
from kinetic.errors import CorruptRecord, NotFound, StoreError

if TYPE_CHECKING:
    from kinetic._source.bundle import Bundle

_log = logging.getLogger("kinetic.packaging")

_WHOLE_BYTES = 64 << 20
_NAMED = 5

_Sources = Mapping[str, Sequence[manifest.File]]
"""Files by the digest of the content that they had."""
Changes = Mapping[str, manifest.File | None]
"""Files that changed since they were packed, by path: what was sent instead, or None for one
that could not be read."""
_MOST_LEARNED = 100
_DIGEST_BYTES = 64


@dataclass(frozen=True)
class Sent:
    """What an upload wrote: files that the store did not have, their total size, and that of the
    lists, indexes and records which name them.

    Attributes:
        changed: the tree as it was sent, if that is not how it was packed; else None.
    """

    files: int
    size_bytes: int
    lists_bytes: int = 0
    changed: Bundle | None = field(default=None, compare=False)


@dataclasses.dataclass
class _Staged:
    """Files that were read: small ones wait for their pack, large ones are in the store.

    Attributes:
        store: where they go.
        small: contents by digest.
        written: sizes of the large files that the store did not have.
        changes: files that changed since they were packed.
    """

    store: Store
    small: dict[str, bytes] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)
    changes: dict[str, manifest.File | None] = field(default_factory=dict)

    def add(self, file: manifest.File, content: Iterator[bytes]) -> None:
        if file.size_bytes <= packs.SMALL_BYTES:
            self.small[file.digest] = b"".join(content)
            return
        data = content if file.size_bytes > _WHOLE_BYTES else b"".join(content)
        if self.store.put(layout.blob(file.digest), data, if_absent=True):
            self.written.append(file.size_bytes)


@dataclass(frozen=True)
class _SentPack:
    """A pack in the store, and what this upload wrote of it."""

    index: Index
    sent: Sent


class _Differs(Exception):
    """The file has changed since it was packed."""


def upload(
    bundle: Bundle, store: Store, *, on_change: Callable[[Changes], None] | None = None
) -> Sent:
    """Upload the tree; nothing is sent when the store has its record.

    Args:
        bundle: the tree.
        store: where it goes.
        on_change: called with the files that have changed since they were packed, before a list
            names them; may raise.

    Raises:
        StoreError: the store cannot be written to.
    """
    if store.renew(layout.tree(bundle.tree.manifest.digest)):
        return Sent(0, 0)
    sources, lists = _sources(bundle), manifest.split(bundle.manifests)
    needed = _list_small(sources) | {digest: len(data) for digest, data in lists.items()}
    chosen = _choose_packs(bundle, store, needed)
    there = {digest for pack in chosen for digest in pack.spans}
    staged, made = _send_files(bundle, store, sources, there)
    now = _as_sent(bundle, staged, on_change)
    if now is not bundle:
        sources, lists = _sources(now), manifest.split(now.manifests)
    # Some of the files were large when they were packed.
    files = {digest: data for staged_files in staged for digest, data in staged_files.small.items()}
    made += _send_pack(store, files, {d: data for d, data in lists.items() if d not in there})
    found = [*chosen, *(pack.index for pack in made)]
    recorded = _record(now, store, packs.locate_contents({*sources, *lists}, found), found)
    written = [size for staged_files in staged for size in staged_files.written]
    return Sent(
        len(written) + sum(pack.sent.files for pack in made),
        sum(written) + sum(pack.sent.size_bytes for pack in made),
        recorded + sum(pack.sent.lists_bytes for pack in made),
        None if now is bundle else now,
    )


def _send_files(
    bundle: Bundle, store: Store, sources: _Sources, there: Collection[str]
) -> tuple[list[_Staged], list[_SentPack]]:
    """Send the contents that the store lacks; those of the last pack are only read, because the
    lists go into the same pack."""
    absent = {digest: same for digest, same in sources.items() if digest not in there}
    small = _list_small(absent)
    *groups, last = packs.groups(small)
    large = [same for digest, same in absent.items() if digest not in small]
    staged = _send_large(bundle, store, large)
    made: list[_SentPack] = []
    for staged_files, pack in at_once(
        lambda group: _send_group(bundle, store, [absent[digest] for digest in group]),
        groups,
        min(store.calls_at_once, FILE_THREADS),
    ):
        staged.append(staged_files)
        made += pack
    return [*staged, _read_contents(bundle, store, [absent[digest] for digest in last])], made


def _sources(bundle: Bundle) -> _Sources:
    """Return the files of a tree by content."""
    sources: dict[str, list[manifest.File]] = {}
    for entry in manifest.unfold(bundle.manifests):
        if isinstance(entry, manifest.File):
            sources.setdefault(entry.digest, []).append(entry)
    return sources


def _list_small(sources: _Sources) -> dict[str, int]:
    """Return the sizes of the contents that travel in packs, by digest."""
    sizes = {digest: same[0].size_bytes for digest, same in sources.items()}
    return {digest: size for digest, size in sizes.items() if size <= packs.SMALL_BYTES}


def _send_large(
    bundle: Bundle, store: Store, sources: Sequence[Sequence[manifest.File]]
) -> list[_Staged]:
    """Send contents as objects of their own."""

    def send(same: Sequence[manifest.File]) -> _Staged:
        there = store.renew(layout.blob(same[0].digest))
        return _read_contents(bundle, store, [] if there else [same])

    size_bytes = sum(same[0].size_bytes for same in sources)
    worth = store.calls_at_once > 1 or hashing.is_worth_threads(len(sources), size_bytes)
    return at_once(send, sources, FILE_THREADS if worth else 1)


def _send_group(
    bundle: Bundle, store: Store, sources: Sequence[Sequence[manifest.File]]
) -> tuple[_Staged, list[_SentPack]]:
    """Send contents as one pack."""
    staged_files = _read_contents(bundle, store, sources)
    packed = _send_pack(store, staged_files.small, {})
    staged_files.small.clear()
    return staged_files, packed


def _send_pack(
    store: Store, files: Mapping[str, bytes], lists: Mapping[str, bytes]
) -> list[_SentPack]:
    """Write a pack, unless it would be empty; its index comes last, because it vouches for the
    pack."""
    if not files and not lists:
        return []
    index, parts = packs.build(files, lists)
    if not put_content(store, layout.pack(index.name), [index.data, *parts]):
        files, parts = {}, []
    store.put(layout.pack_index(index.name), index.data)  # Also over a damaged one.
    size_bytes = sum(map(len, files.values()))
    rest_bytes = 2 * len(index.data) + sum(map(len, parts)) - size_bytes
    return [_SentPack(index, Sent(len(files), size_bytes, rest_bytes))]


def _record(bundle: Bundle, store: Store, record: packs.Contents, found: Sequence[Index]) -> int:
    """Write the record of a tree whose contents are all there; return its size."""
    data = record.to_json()
    store.put(layout.tree(bundle.tree.manifest.digest), data, if_absent=True)
    _remember(bundle, store, [each for each in found if each.name in record.packs])
    return len(data)


def _read_contents(
    bundle: Bundle, store: Store, sources: Iterable[Sequence[manifest.File]]
) -> _Staged:
    """Read each content from one of the files that had it."""
    staged_files = _Staged(store)
    for same in sources:
        for file in same:
            try:
                now = _read_file(bundle, staged_files, file)
            except OSError as error:
                _log.info(
                    "%s could not be read while it was sent, and is left out: %s",
                    bundle.place_of(file.path),
                    error,
                )
                now = None
            if now == file:
                # The others of the same content need not be read.
                break
            staged_files.changes[file.path] = now
    return staged_files


def _read_file(bundle: Bundle, staged_files: _Staged, file: manifest.File) -> manifest.File:
    """Read the content that a file was packed with, or else its current one; return the file as
    read."""
    with open_regular(bundle.place_of(file.path)) as source:
        try:
            staged_files.add(file, _read_verified(source, file))
        except _Differs:
            source.seek(0)
            return _read_changed(bundle, staged_files, source, file)
        return file


def _read_verified(source: FileIO, file: manifest.File) -> Iterator[bytes]:
    """Yield the content, and fail at the end if it differs: the store keeps nothing of a write
    that fails."""
    digest = hashlib.sha256()
    try:
        for chunk in hashing.chunks(source, file.size_bytes):
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise _Differs from error
    if digest.hexdigest() != file.digest:
        raise _Differs


def _read_changed(
    bundle: Bundle, staged_files: _Staged, source: FileIO, file: manifest.File
) -> manifest.File:
    """Read a changed file; a large one is copied first, so that it cannot change
    between hashing and sending."""
    size = os.fstat(source.fileno()).st_size
    with _open_spool(bundle, large=size > _WHOLE_BYTES) as copy:
        digest = hashlib.sha256()
        for chunk in hashing.chunks(source, size):
            digest.update(chunk)
            copy.write(chunk)
        now = file._replace(digest=digest.hexdigest(), size_bytes=copy.tell())
        copy.seek(0)
        staged_files.add(now, iter(lambda: copy.read(CHUNK_BYTES), b""))
        return now


def _open_spool(bundle: Bundle, *, large: bool) -> IO[bytes]:
    import tempfile  # not needed for an unchanged tree

    if not large or bundle.note is None:
        return tempfile.SpooledTemporaryFile(max_size=2 * _WHOLE_BYTES)
    folder = bundle.note.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()


def _as_sent(
    bundle: Bundle, staged: Iterable[_Staged], on_change: Callable[[Changes], None] | None
) -> Bundle:
    """Return the tree as it was read."""
    changes = {path: file for staged_files in staged for path, file in staged_files.changes.items()}
    if not changes:
        return bundle
    if on_change is not None:
        on_change(changes)
    _log.info("%s: changed while it was sent: %s", bundle.root, ", ".join(sorted(changes)[:_NAMED]))
    return _amend_tree(bundle, changes)


def _amend_tree(bundle: Bundle, changes: Changes) -> Bundle:
    """Return the tree with these files as they are now, without missing ones and the links
    to them."""
    entries = [
        now
        for entry in manifest.unfold(bundle.manifests)
        if (now := _as_changed(entry, changes)) is not None
    ]
    files = [entry for entry in entries if isinstance(entry, manifest.File)]
    lists = manifest.encode(manifest.drop_broken_links(entries))
    digest, data = next(reversed(lists.items()))
    tree = Tree(Blob(digest, len(data)), len(files), sum(file.size_bytes for file in files))
    return replace(bundle, manifests=manifest.join(lists), tree=tree)


def _as_changed(entry: manifest.Entry, changes: Changes) -> manifest.Entry | None:
    return (
        changes[entry.path] if isinstance(entry, manifest.File) and entry.path in changes else entry
    )


def _choose_packs(bundle: Bundle, store: Store, needed: Mapping[str, int]) -> list[Index]:
    """Return packs in the store from which a tree takes contents; `needed` has their sizes. No
    sweep takes these before a plan names the tree.

    A note in the user's cache says as what a tree was sent last. If the store still has the record
    of that, it vouches for its packs. Without a note (another machine, a removed cache, a record
    that a host found broken) some of the indexes in the store are read.
    """
    digest, noted = _read_note(_note_of(bundle, store))
    if digest and store.renew(layout.tree(digest)):  # What it names stays as long as it does.
        with suppress(NotFound, CorruptRecord):
            vouched = packs.Contents.from_json(store.get(layout.tree(digest))).packs
            return packs.choose(needed, [index for index in noted if index.name in vouched])
    keys = list(islice(store.list(layout.PACK_INDEXES), _MOST_LEARNED))
    found = packs.choose(needed, _parse_sound(get_many(store, keys)))
    there = renew_many(store, [layout.pack(index.name) for index in found])
    return [index for index in found if layout.pack(index.name) in there]


def _remember(bundle: Bundle, store: Store, indexes: Iterable[Index]) -> None:
    """Note how the tree was sent; failure to do so is ignored."""
    content = bundle.tree.manifest.digest.encode() + b"".join(index.data for index in indexes)
    note = _note_of(bundle, store)
    if note is not None:
        try:
            cache.write(note, content)
        except (OSError, StoreError) as error:
            _log.debug("what was sent could not be remembered in %s: %s", note, error)


def _note_of(bundle: Bundle, store: Store) -> Path | None:
    return None if bundle.note is None else cache.note_of_sent(bundle.note, store.uri)


def _read_note(note: Path | None) -> tuple[str, list[Index]]:
    """Return the digest of the tree that was sent last, "" for none, and its packs."""
    if note is None:
        return "", []
    try:
        content = cache.read(note)
        return content[:_DIGEST_BYTES].decode(), [*packs.parse_many(content[_DIGEST_BYTES:])]
    except (OSError, ValueError, CorruptRecord):
        return "", []


def _parse_sound(stored: Mapping[str, bytes]) -> Iterator[Index]:
    """Yield the indexes that are not damaged."""
    for key, data in stored.items():
        with suppress(CorruptRecord):
            index = packs.parse(data)
            if layout.pack_index(index.name) == key:
                yield index
