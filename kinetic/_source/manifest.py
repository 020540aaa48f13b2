"""The flat list of a source tree's entries. Its SHA-256 names the tree.

One JSON array a line, sorted by path, without times and owners: the same tree has the same list on
every machine.

    ["d", path, mode]                   folder
    ["f", path, mode, size, digest]     regular file
    ["l", path, target]                 symbolic link to another entry of the tree,
                                        the target relative to the link's folder

`decode` refuses a list that could write outside the folder into which it is unpacked.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MODES = 0o777
_NO_NAMES = frozenset(("", ".", ".."))


@dataclass(frozen=True)
class Folder:
    """A folder."""

    path: str
    mode: int


class File(NamedTuple):
    """A regular file. It is a tuple to save memory: a tree has thousands of files."""

    path: str
    mode: int
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Symlink:
    """A symbolic link to another entry of the tree."""

    path: str
    target: str


Entry = Folder | File | Symlink


def encode(entries: Iterable[Entry]) -> bytes:
    """Return the list of these entries as it is stored."""
    rows = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        if isinstance(entry, File):
            rows.append(json.dumps(("f", *entry), separators=(",", ":")))
        elif isinstance(entry, Folder):
            rows.append(json.dumps(("d", entry.path, entry.mode), separators=(",", ":")))
        else:
            rows.append(json.dumps(("l", entry.path, entry.target), separators=(",", ":")))
    return "\n".join(rows).encode()


@functools.lru_cache(maxsize=4)  # A tree is decoded several times.
def decode(data: bytes) -> tuple[Entry, ...]:
    """Parse a list; folders come before their entries.

    Raises:
        CorruptRecord: the list is malformed, or unpacking it could write outside its folder.
    """
    try:
        entries = [_parse_row(*row) for row in _parse_rows(data.split(b"\n") if data else ())]
        _verify(entries)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRecord(
            f"The stored list of the job's files is damaged: {error!r}. Submit the job again."
        ) from error
    return tuple(entries)


def _parse_rows(lines: Iterable[bytes]) -> list[Any]:
    """Parse all lines at once, which is several times faster than line by line."""
    lines = list(lines)
    rows: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    if len(rows) != len(lines):
        raise ValueError(f"{len(lines)} lines hold {len(rows)} entries")
    return rows


def _parse_row(kind: str, path: str, *row: Any) -> Entry:
    if "\0" in path or not _NO_NAMES.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r} is not a path inside a folder")
    if kind == "f":
        mode, size_bytes, digest = row
        if type(size_bytes) is not int or size_bytes < 0:
            raise ValueError(f"{path!r} has size {size_bytes!r}")
        if not _DIGEST.match(digest):
            raise ValueError(f"{digest!r} is not a digest")
        return File(path, _check_mode(mode), size_bytes, digest)
    (last,) = row
    if kind == "d":
        return Folder(path, _check_mode(last))
    if kind != "l":
        raise ValueError(f"{path!r} is neither a file, a folder nor a link, but {kind!r}")
    if type(last) is not str or not last or "\0" in last:
        raise ValueError(f"{path!r} leads to {last!r}")
    return Symlink(path, last)


def _check_mode(mode: object) -> int:
    if type(mode) is not int or not 0 <= mode <= _MODES:
        raise ValueError(f"{mode!r} is not a mode")
    return mode


def _verify(entries: Sequence[Entry]) -> None:
    """Refuse paths that occur twice, parents that are no folders, links to no entry."""
    folders = {"", *(entry.path for entry in entries if isinstance(entry, Folder))}
    before = ""
    for entry in entries:
        if entry.path <= before:
            raise ValueError(f"{entry.path!r} is not in order, or a duplicate")
        before = entry.path
        if entry.path.rpartition("/")[0] not in folders:
            raise ValueError(f"{entry.path!r} does not lie in a folder of the tree")
    if len(drop_broken_links(entries)) != len(entries):
        raise ValueError("a link leads to no entry of the tree")


def drop_broken_links(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries, but no link to an entry that is missing (removed after the walk)."""
    targets = {entry.path for entry in entries if not isinstance(entry, Symlink)} | {""}
    return [
        entry
        for entry in entries
        if not isinstance(entry, Symlink) or _resolve_link(entry) in targets
    ]


def _resolve_link(link: Symlink) -> str:
    """Return the path in the tree that a link points to; a path of no entry if outside it."""
    if link.target.startswith("/") or link.target != posixpath.normpath(link.target):
        return "/"  # `a/../b` could lead out of the tree if `a` is a link.
    path = posixpath.normpath(posixpath.join(link.path.rpartition("/")[0], link.target))
    return "" if path == "." else path


def list_files(data: bytes) -> list[File]:
    """Return the regular files of a tree."""
    return [entry for entry in decode(data) if isinstance(entry, File)]


def files_among(data: bytes, paths: Iterable[str]) -> set[str]:
    """Return the paths among `paths` that are regular files of a tree."""
    return {file.path for file in list_files(data)}.intersection(paths)


def compare(base: bytes, data: bytes) -> tuple[list[str], list[str]]:
    """Return the paths that only the list `base` has, and the rows that only `data` has."""
    old, new = base.split(b"\n"), data.split(b"\n")
    old_rows, new_rows = frozenset(old), frozenset(new)
    changed = [row for row in new if row and row not in old_rows]
    changed_paths = {row[1] for row in _parse_rows(changed)}
    removed = [row[1] for row in _parse_rows(row for row in old if row and row not in new_rows)]
    return [path for path in removed if path not in changed_paths], [
        row.decode() for row in changed
    ]


def amend(base: bytes, removed: Collection[str], changed: Iterable[str]) -> bytes:
    """Apply the changes that `compare` returned to the base list.

    Raises:
        CorruptRecord: a row is malformed.
    """
    lines = [*filter(None, base.split(b"\n")), *(row.encode() for row in changed)]
    try:
        by_path = {row[1]: line for row, line in zip(_parse_rows(lines), lines, strict=True)}
        for path in removed:
            by_path.pop(path, None)
        return b"\n".join(by_path[path] for path in sorted(by_path))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRecord(f"The stored list of the job's files is damaged: {error!r}.") from error
