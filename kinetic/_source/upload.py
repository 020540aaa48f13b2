"""A source tree into a store, by content: what is there already is not sent again.

In: a `Bundle`, a store. Out: `Sent`.

Files may change while a tree is on its way. Each is sent as it is read, under the digest of what
was read; where that is not what the tree was packed with, the lists are made again to name what was
sent. So every list in the store is true, and no writer can make a submission fail. Of a file that
only grows, the part that was packed is sent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from typing import IO, TYPE_CHECKING

from kinetic._core import layout
from kinetic._core.plan import Blob, Tree
from kinetic._source import hashing, manifest
from kinetic._source.threads import in_threads, worth_it
from kinetic._store.base import Store
from kinetic._store.local import LocalStore

if TYPE_CHECKING:
    from kinetic._source.bundle import Bundle

_log = logging.getLogger("kinetic.packaging")

_WHOLE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_NAMED = 5

Changes = Mapping[str, manifest.File | None]
"""Files that were not what they were packed as, by path: what was sent instead, or None for one
that could not be read."""


@dataclass(frozen=True)
class Sent:
    """What an upload wrote: files that the store did not have, their total size, and that of the
    lists which name them.

    Attributes:
        changed: the tree as it was sent, where that is not how it was packed; else None.
    """

    files: int
    size_bytes: int
    lists_bytes: int = 0
    changed: Bundle | None = field(default=None, compare=False)


class _Differs(Exception):
    """The file does not hold what it held when it was packed."""


def upload(
    bundle: Bundle, store: Store, *, on_change: Callable[[Changes], None] | None = None
) -> Sent:
    """Bring the tree's content into the store; a folder whose list is there sends nothing.

    A list comes after all that it names, so that one which is there vouches for everything below
    it.

    Args:
        bundle: the tree.
        store: where it goes.
        on_change: is told which files have changed since they were packed, before a list names
            them; may raise.

    Raises:
        StoreError: the store does not take it.
    """
    if store.has(layout.blob(bundle.tree.manifest.digest)):
        return Sent(0, 0)
    distant = not isinstance(store, LocalStore)
    lists = manifest.split(bundle.manifests)
    levels, sources = _absent(bundle, lists, store, distant)
    worth = distant or worth_it(bundle.tree.files, bundle.tree.size_bytes)
    deliveries = in_threads(
        lambda same: _deliver(bundle, store, same), list(sources.values()), worth=worth
    )
    sizes = [size for written, _ in deliveries for size in written]
    changes = {path: file for _, changed in deliveries for path, file in changed.items()}
    if changes:
        if on_change is not None:
            on_change(changes)
        _log.info(
            "%s: changed while it was sent: %s", bundle.root, ", ".join(sorted(changes)[:_NAMED])
        )
        now = _amended(bundle, changes)
        rest = upload(now, store)
        return Sent(
            len(sizes) + rest.files,
            sum(sizes) + rest.size_bytes,
            rest.lists_bytes,
            rest.changed or now,
        )
    lists_bytes = 0
    for level in reversed(levels):
        written = in_threads(
            lambda digest: store.put(layout.blob(digest), lists[digest], if_absent=True),
            level,
            worth=distant,
        )
        lists_bytes += sum(
            len(lists[digest]) for digest, wrote in zip(level, written, strict=True) if wrote
        )
    return Sent(len(sizes), sum(sizes), lists_bytes)


def _absent(
    bundle: Bundle, lists: Mapping[str, bytes], store: Store, distant: bool
) -> tuple[list[list[str]], dict[str, list[manifest.File]]]:
    """Return the lists that the store lacks, level by level from the root, and the files that they
    name, by content."""
    levels: list[list[str]] = []
    sources: dict[str, list[manifest.File]] = {}
    level = {bundle.tree.manifest.digest: ""}
    while level:
        there = in_threads(
            lambda digest: store.has(layout.blob(digest)), list(level), worth=distant
        )
        absent = {
            digest: path
            for (digest, path), has in zip(level.items(), there, strict=True)
            if not has
        }
        levels.append(list(absent))
        level = {}
        for digest, folder in absent.items():
            for entry in manifest.contents(folder, lists[digest]):
                if isinstance(entry, manifest.File):
                    sources.setdefault(entry.digest, []).append(entry)
                elif not isinstance(entry, manifest.Link):
                    level[entry.digest] = entry.path
    return levels, sources


def _deliver(
    bundle: Bundle, store: Store, same: Sequence[manifest.File]
) -> tuple[list[int], dict[str, manifest.File | None]]:
    """Put one content that these files had; return the sizes of what was written, and which of the
    files have changed."""
    if store.has(layout.blob(same[0].digest)):
        return [], {}
    written: list[int] = []
    changed: dict[str, manifest.File | None] = {}
    for file in same:
        try:
            now, wrote = _put(bundle, store, file)
        except OSError as error:
            _log.info(
                "%s could not be read while it was sent, and is left out: %s",
                bundle.root / file.path,
                error,
            )
            changed[file.path] = None
            continue
        written += [now.size_bytes] if wrote else []
        if now == file:
            break  # The others of the same content need not be read.
        changed[file.path] = now
    return written, changed


def _put(bundle: Bundle, store: Store, file: manifest.File) -> tuple[manifest.File, bool]:
    """Put the content that a file was packed with, or else the one it has; return the file as sent,
    and whether that wrote."""
    with hashing.opened(str(bundle.root / file.path)) as source:
        try:
            return file, _put_as_packed(store, source, file)
        except _Differs:
            source.seek(0)
            return _put_as_read(bundle, store, source, file)


def _put_as_packed(store: Store, source: FileIO, file: manifest.File) -> bool:
    key = layout.blob(file.digest)
    if file.size_bytes > _WHOLE_BYTES:
        return store.put(key, _verified(source, file), if_absent=True)
    return store.put(key, b"".join(_verified(source, file)), if_absent=True)


def _verified(source: FileIO, file: manifest.File) -> Iterator[bytes]:
    """Yield the content, and fail at its end when it is another: the store keeps nothing of a write
    that fails."""
    digest = hashlib.sha256()
    try:
        for chunk in hashing.chunks(source, file.size_bytes, _CHUNK_BYTES):
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise _Differs from error
    if digest.hexdigest() != file.digest:
        raise _Differs


def _put_as_read(
    bundle: Bundle, store: Store, source: FileIO, file: manifest.File
) -> tuple[manifest.File, bool]:
    """Put what a changed file holds; a large one is copied aside first, where nothing changes it
    between hashing and sending."""
    size = os.fstat(source.fileno()).st_size
    with _aside(bundle, large=size > _WHOLE_BYTES) as copy:
        digest = hashlib.sha256()
        for chunk in hashing.chunks(source, size, _CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
        now = replace(file, digest=digest.hexdigest(), size_bytes=copy.tell())
        copy.seek(0)
        content = iter(lambda: copy.read(_CHUNK_BYTES), b"")
        return now, store.put(layout.blob(now.digest), content, if_absent=True)


def _aside(bundle: Bundle, *, large: bool) -> IO[bytes]:
    if not large:
        return tempfile.SpooledTemporaryFile(max_size=2 * _WHOLE_BYTES)
    try:
        bundle.aside.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.TemporaryFile(dir=bundle.aside)
    except OSError:
        return tempfile.TemporaryFile()


def _amended(bundle: Bundle, changes: Changes) -> Bundle:
    """Return the tree with these files as they are now, without those that are gone and the links
    to them."""
    entries = [
        now
        for entry in manifest.unfold(bundle.manifests)
        if (now := _as_changed(entry, changes)) is not None
    ]
    files = [entry for entry in entries if isinstance(entry, manifest.File)]
    lists = manifest.encode(manifest.connected(entries))
    digest, data = next(reversed(lists.items()))
    tree = Tree(Blob(digest, len(data)), len(files), sum(file.size_bytes for file in files))
    return replace(bundle, manifests=manifest.join(lists), tree=tree)


def _as_changed(entry: manifest.Entry, changes: Changes) -> manifest.Entry | None:
    return (
        changes[entry.path] if isinstance(entry, manifest.File) and entry.path in changes else entry
    )
