"""The digest of a file's content, read only when it may have changed.

In: files as a walk found them, what was known before. Out: `Content`. Called by `bundle`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kinetic.errors import SourceChanged
from kinetic.packaging import manifest
from kinetic.packaging.snapshot import Snapshot
from kinetic.packaging.threads import in_threads, worth_it
from kinetic.packaging.walk import FoundFile, Stamp, stamp_of

_TRIES = 3
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Content:
    """What a file held: the stamp is that of the very moment."""

    digest: str
    size_bytes: int
    stamp: Stamp


def known(root: str, old: Snapshot | None) -> Mapping[str, Content]:
    """Return the contents that a snapshot tells, by the path that was read."""
    if old is None:
        return {}
    found: dict[str, Content] = {}
    inside = root.rstrip("/") + "/"
    for entry in manifest.unfold(old.manifests):
        if isinstance(entry, manifest.File):
            path = old.followed.get(entry.path) or inside + entry.path
            found[path] = Content(entry.digest, entry.size_bytes, old.watched.get(path, ()))
    return found


def contents(files: Iterable[FoundFile], before: Mapping[str, Content]) -> dict[str, Content]:
    """Return what the files hold, by path, reading only those whose stamp is new; without those that cannot be read.

    Raises:
        SourceChanged: a file changes whenever it is read.
    """
    held: dict[str, Content] = {}
    new: list[str] = []
    new_bytes = 0
    for found in files:
        old = before.get(found.path)
        if old is not None and old.stamp == found.stamp:
            held[found.path] = old
        else:
            new.append(found.path)
            new_bytes += found.size_bytes
    fresh = in_threads(_read_if_possible, new, worth=worth_it(len(new), new_bytes))
    return held | {path: content for path, content in zip(new, fresh, strict=True) if content is not None}


def _read_if_possible(path: str) -> Content | None:
    try:
        return read(path)
    except OSError:
        return None


def read(path: str) -> Content:
    """Read and hash a file that stands still meanwhile.

    Raises:
        SourceChanged: it does not.
    """
    for _ in range(_TRIES):
        # Not blocking, in case a pipe has taken the file's place.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            small = before.st_size <= _SMALL_BYTES
            digest = hashlib.sha256(file.readall()).hexdigest() if small else hashlib.file_digest(file, "sha256").hexdigest()
            after = stamp_of(os.fstat(file.fileno()))
            if stamp_of(before) == after:
                return Content(digest, before.st_size, after)
    raise SourceChanged(
        f"{path} changes while it is read ({_TRIES} tries). Stop what writes to it, or leave it out in .kineticignore."
    )
