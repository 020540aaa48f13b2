"""Snapshots of packed source trees in the user's cache, so that unchanged trees are not read again.

A snapshot has a tree, and the stamp (times, size, inode) of every path that the tree depends on:
folders, files, ignore files, also absent ones. While all stamps are the same, so is the tree. A
stamp from less than two seconds before the walk is not trusted: a later change could have the same
times. A damaged snapshot counts as missing.
"""

# ruff: noqa: PTH108

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from array import array
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kinetic._core.plan import Blob, Tree
from kinetic._core.values import dataclass
from kinetic._source.walk import Stamp, stamp_at
from kinetic._store import files
from kinetic.errors import StoreError

_log = logging.getLogger("kinetic.packaging")

SCHEMA = 6
_WIDTH = 6
_RACY_NS = 2_000_000_000
_ABSENT: Stamp = (-1,) * _WIDTH
_DISTRUSTED: Stamp = (-2,) * _WIDTH
_MOST_SNAPSHOTS = 100
_PACKED = "trees"
_SENT = "sent"


@dataclass(frozen=True)
class Snapshot:
    """A source tree, and the paths that it depends on.

    Attributes:
        manifest: the list of its entries.
        tree: its digest and size.
        warnings: warnings for the caller.
        largest: the largest files.
        followed: the real path of each file reached through a link, by path in the tree.
        watched: stamps by absolute path.
        left_out: paths that the caller left out.
        targets: targets of links that lead out of the tree.
    """

    manifest: bytes
    tree: Tree
    warnings: tuple[str, ...]
    largest: tuple[tuple[str, int], ...]
    followed: Mapping[str, str]
    watched: Mapping[str, Stamp]
    left_out: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


def own_folders(cache_dir: Path) -> tuple[Path, Path]:
    """Return the folders that this module writes, which are never source."""
    return cache_dir / _PACKED, cache_dir / _SENT


def sent_note_path(note: Path, store_uri: str) -> Path:
    """Return the path of the cache file that lists what a store has of a tree. `note`: path of the
    tree's snapshot."""
    name = hashlib.sha256(os.fsencode(f"{note.name}:{store_uri}")).hexdigest()[:32]
    return note.parent.parent / _SENT / name


def snapshot_path(
    cache_dir: Path, root: str, exclude: Collection[str], default_excludes: bool
) -> Path:
    """Return the path of the snapshot of a tree that is packed with these options."""
    key = json.dumps([SCHEMA, root, sorted(exclude), default_excludes])
    return cache_dir / _PACKED / hashlib.sha256(key.encode()).hexdigest()[:32]


def load(path: Path) -> Snapshot | None:
    """Read a snapshot; None if it is missing or damaged."""
    try:
        return _decode(read(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_unchanged(snapshot: Snapshot) -> bool:
    """True if every path still has the stamp it had."""
    return all((stamp_at(path) or _ABSENT) == stamp for path, stamp in snapshot.watched.items())


def save(path: Path, snapshot: Snapshot, *, began_ns: int) -> None:
    """Save a snapshot; errors are ignored. `began_ns` is the start of the walk, in nanoseconds
    since the epoch."""
    try:
        write(path, _encode(snapshot, began_ns))
    except (OSError, StoreError, OverflowError) as error:
        _log.debug("the snapshot of the source tree could not be saved in %s: %s", path, error)


def write(path: Path, content: bytes) -> None:
    """Write a file of the cache atomically, with a checksum; remove the oldest files.

    Raises:
        OSError, StoreError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.save(path, [b"%08x\n" % zlib.crc32(content), content])
    _sweep(path.parent)


def read(path: Path) -> bytes:
    """Return the content of a file of the cache.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    check, _, content = files.content(path).partition(b"\n")
    if check != b"%08x" % zlib.crc32(content):
        raise ValueError(f"{path} is damaged")
    return content


def is_trusted(stamp: Stamp, began_ns: int) -> bool:
    """True if any later change must alter the stamp: its times are two seconds older than the walk,
    which is longer than any file system's clock tick."""
    return not stamp or (abs(began_ns - stamp[0]) > _RACY_NS and stamp[1] < began_ns - _RACY_NS)


def _encode(snapshot: Snapshot, began_ns: int) -> bytes:
    stamps = array("q")
    for stamp in snapshot.watched.values():
        stamps.extend((stamp or _ABSENT) if is_trusted(stamp, began_ns) else _DISTRUSTED)
    paths = "\0".join(snapshot.watched).encode("utf-8", "surrogateescape")
    rest = b"".join((stamps.tobytes(), paths, snapshot.manifest))
    head = {
        "watched": len(snapshot.watched),
        "paths_bytes": len(paths),
        "tree": asdict(snapshot.tree),
        "warnings": snapshot.warnings,
        "largest": snapshot.largest,
        "followed": dict(snapshot.followed),
        "left_out": snapshot.left_out,
        "targets": snapshot.targets,
    }
    return json.dumps(head).encode() + b"\n" + rest


def _decode(content: bytes) -> Snapshot:
    line, _, rest = content.partition(b"\n")
    head = json.loads(line)
    end = head["watched"] * _WIDTH * 8
    stamps = array("q", rest[:end])
    paths = rest[end : end + head["paths_bytes"]].decode("utf-8", "surrogateescape").split("\0")
    manifest = rest[end + head["paths_bytes"] :]
    tree = Tree(**head["tree"] | {"manifest": Blob(**head["tree"]["manifest"])})
    watched = dict(zip(paths, zip(*[iter(stamps)] * _WIDTH, strict=True), strict=True))
    largest = tuple((str(path), int(size)) for path, size in head["largest"])
    return Snapshot(
        manifest,
        tree,
        tuple(head["warnings"]),
        largest,
        dict(head["followed"]),
        watched,
        tuple(map(str, head["left_out"])),
        tuple(map(str, head["targets"])),
    )


def _sweep(folder: Path) -> None:
    """Remove the oldest files above the limit, and temporary files of killed processes."""
    with os.scandir(folder) as listing:
        entries = list(listing)
    if len(entries) <= _MOST_SNAPSHOTS:
        return
    with suppress(OSError):
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns)[:-_MOST_SNAPSHOTS]:
            os.unlink(entry.path)
