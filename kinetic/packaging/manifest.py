"""The list of what a source tree holds: its digest is the tree's digest.

In: entries, or the bytes of a manifest. Out: the other. Called by `bundle`; pure.

Canonical JSON: the same content gives the same bytes on every machine, so it holds no times and no owners. Sorted by path:

    ["d", path, mode]                   folder
    ["f", path, mode, size, digest]     regular file
    ["l", path, target]                 symbolic link to another entry, the target relative to the link's folder
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kinetic.errors import CorruptRecord

SCHEMA = 1
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MODES = 0o777


@dataclass(frozen=True)
class Folder:
    """A folder."""

    path: str
    mode: int


@dataclass(frozen=True)
class File:
    """A regular file."""

    path: str
    mode: int
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Link:
    """A symbolic link to another entry of the tree."""

    path: str
    target: str


Entry = Folder | File | Link


def encode(entries: Iterable[Entry]) -> bytes:
    """Return the manifest of these entries, in whatever order they come."""
    rows = sorted((_row(entry) for entry in entries), key=lambda row: row[1])
    return json.dumps({"schema": SCHEMA, "entries": rows}, separators=(",", ":")).encode()


def decode(data: bytes) -> list[Entry]:
    """Read a manifest and verify that unpacking it cannot write outside its folder.

    Raises:
        CorruptRecord: it is no manifest, or one that no builder wrote.
    """
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA:
            raise CorruptRecord(f"The manifest has schema {document['schema']!r}; this kinetic reads {SCHEMA}.")
        entries = [_entry(*row) for row in document["entries"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptRecord(f"The manifest of the source tree is damaged: {error!r}.") from error
    _verify(entries)
    return entries


def _row(entry: Entry) -> tuple[str | int, ...]:
    if isinstance(entry, File):
        return ("f", entry.path, entry.mode, entry.size_bytes, entry.digest)
    if isinstance(entry, Folder):
        return ("d", entry.path, entry.mode)
    return ("l", entry.path, entry.target)


def _entry(kind: str, path: str, *rest: object) -> Entry:
    if not isinstance(path, str) or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is no path inside the tree")
    made: Entry
    match kind, *rest:
        case "d", int(mode):
            made = Folder(path, mode)
        case "f", int(mode), int(size_bytes), str(digest) if size_bytes >= 0 and _DIGEST.match(digest):
            made = File(path, mode, size_bytes, digest)
        case "l", str(target) if target and "\0" not in target:
            return Link(path, target)
        case _:
            raise ValueError(f"{path!r} is not described as a file, a folder or a link")
    if isinstance(mode, bool) or not 0 <= mode <= _MODES:
        raise ValueError(f"{path!r} has mode {mode!r}")
    return made


def _verify(entries: list[Entry]) -> None:
    kinds: dict[str, type] = {"": Folder} | {entry.path: type(entry) for entry in entries}
    if len(kinds) != len(entries) + 1:
        raise CorruptRecord("The manifest of the source tree is damaged: it names a path twice.")
    for entry in entries:
        # A parent is a real folder of the tree, never a link: nothing is written through a link.
        parent = entry.path.rpartition("/")[0]
        if kinds.get(parent) is not Folder:
            raise CorruptRecord(f"The manifest of the source tree is damaged: {entry.path!r} lies in no folder of the tree.")
        if isinstance(entry, Link) and kinds.get(_resolved(parent, entry.target)) not in (Folder, File):
            raise CorruptRecord(f"The manifest of the source tree is damaged: link {entry.path!r} leads to no entry of the tree.")


def _resolved(parent: str, target: str) -> str:
    """Return the path in the tree that the target means, or one that no entry has."""
    if target.startswith("/"):
        return target
    path = posixpath.normpath(posixpath.join(parent, target))
    return "" if path == "." else path
