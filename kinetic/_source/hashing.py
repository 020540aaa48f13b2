"""Digests of files, which are read only if they may have changed.

In: files that a walk found, the digests of an earlier walk. Out: `FileDigest`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kinetic._source import manifest
from kinetic._source.cache import Snapshot
from kinetic._source.walk import FoundFile, Stamp, stamp_of
from kinetic._store.files import chunks, open_regular
from kinetic._store.many import FILE_THREADS, at_once

_TRIES = 3
_LARGE_BYTES = 512 << 10


def is_worth_threads(count: int, size_bytes: int) -> bool:
    """True if the files are so large on average that several threads read them faster than one.
    With small files, threads only wait for each other."""
    return size_bytes > _LARGE_BYTES * max(count, 1)


class FileDigest(NamedTuple):
    """Digest, size and stamp of a file. The stamp is from the same moment as the content, or empty
    if the file changed while it was read."""

    digest: str
    size_bytes: int
    stamp: Stamp


def read_snapshot(root: str, old: Snapshot | None) -> Mapping[str, FileDigest]:
    """Return the digests of a snapshot's files, by real path."""
    if old is None:
        return {}
    digests: dict[str, FileDigest] = {}
    inside = root.rstrip("/") + "/"
    for file in manifest.list_files(old.manifest):
        path = old.followed.get(file.path) or inside + file.path
        digests[path] = FileDigest(file.digest, file.size_bytes, old.watched.get(path, ()))
    return digests


def hash_files(
    files: Iterable[FoundFile], before: Mapping[str, FileDigest]
) -> dict[str, FileDigest]:
    """Return the digests of the files by path. Read only files whose stamp is not that in `before`;
    skip files that cannot be read."""
    digests: dict[str, FileDigest] = {}
    new: list[str] = []
    new_bytes = 0
    for file in files:
        old = before.get(file.path)
        if old is not None and old.stamp == file.stamp:
            digests[file.path] = old
        else:
            new.append(file.path)
            new_bytes += file.size_bytes
    threads = FILE_THREADS if is_worth_threads(len(new), new_bytes) else 1
    fresh = at_once(_read_if_possible, new, threads)
    return digests | {
        path: content for path, content in zip(new, fresh, strict=True) if content is not None
    }


def _read_if_possible(path: str) -> FileDigest | None:
    for _ in range(_TRIES):
        try:
            return read(path)
        except FileNotFoundError:
            continue  # Try again: a writer may be replacing the file at this moment.
        except OSError:
            break
    return None


def read(path: str) -> FileDigest:
    """Read and hash a file, up to the size that it had when it was opened.

    A file that changes meanwhile is read again a few times. If it still changes, the last reading
    counts, with an empty stamp.
    """
    for _ in range(_TRIES):
        with open_regular(path) as file:
            before = os.fstat(file.fileno())
            digest, size = hashlib.sha256(), 0
            for chunk in chunks(file, before.st_size):
                digest.update(chunk)
                size += len(chunk)
            after = os.fstat(file.fileno())
        if stamp_of(before) == stamp_of(after):
            return FileDigest(digest.hexdigest(), size, stamp_of(after))
        # The file grows, as logs do: reading it again would not help.
        if size == before.st_size < after.st_size:
            break
    return FileDigest(digest.hexdigest(), size, ())
