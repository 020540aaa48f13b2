"""The entries of a source tree: a list for each folder, named by its digest. The digest of the
root's list is the tree's.

In: entries, or lists. Out: the other.

A list names the lists of the folders inside by their digests, so an unchanged folder keeps its
list. Canonical JSON: the same content gives the same bytes on every machine, without times and
owners. Sorted by name:

    ["d", name, mode, digest]           folder, and its list
    ["f", name, mode, size, digest]     regular file
    ["l", name, target]                 symbolic link to another entry of the tree,
                                        the target relative to the link's folder

A folder of more than 64 entries is listed in parts, by the digits of the names' SHA-256, so that a
change sends one part:

    ["s", digest]                       some of the entries are in that list
"""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

SCHEMA = 2
_WIDE = 64
_MOST_ENTRIES = 5_000_000  # Against a few lists that unfold into any number.
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LISTS_KEPT = 1024
"""A tree is read before and after a change, and most of its lists stay the same."""
_MODES = 0o777
_NO_NAMES = frozenset(("", ".", ".."))
_Row = tuple[str | int, ...]


@dataclass(frozen=True)
class Folder:
    """A folder; `digest` is that of its list, if known."""

    path: str
    mode: int
    digest: str = ""


class File(NamedTuple):
    """A regular file. A tuple, because a tree has thousands of them."""

    path: str
    mode: int
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Symlink:
    """A symbolic link to another entry of the tree."""

    path: str
    target: str


@dataclass(frozen=True)
class ManifestPart:
    """A list with some of the entries of the folder at the path."""

    path: str
    digest: str


Entry = Folder | File | Symlink


def encode(entries: Iterable[Entry]) -> dict[str, bytes]:
    """Return the lists of these entries by digest, each after those that it names; the root's is
    last."""
    inside: dict[str, list[_Row]] = defaultdict(list)
    folders: list[Folder] = []
    for entry in entries:
        folder, _, name = entry.path.rpartition("/")
        if isinstance(entry, File):
            inside[folder].append(("f", name, entry.mode, entry.size_bytes, entry.digest))
        elif isinstance(entry, Symlink):
            inside[folder].append(("l", name, entry.target))
        else:
            folders.append(entry)
    lists: dict[str, bytes] = {}
    for entry in sorted(folders, key=lambda each: (-each.path.count("/"), each.path)):
        folder, _, name = entry.path.rpartition("/")
        inside[folder].append(("d", name, entry.mode, _add(lists, inside[entry.path])))
    _add(lists, inside[""])
    return lists


def _add(lists: dict[str, bytes], rows: list[_Row], depth: int = 0) -> str:
    """Add the list of these rows, and its parts; return its digest."""
    if len(rows) > _WIDE:
        parts: dict[str, list[_Row]] = defaultdict(list)
        for row in rows:
            parts[
                hashlib.sha256(str(row[1]).encode("utf-8", "surrogateescape")).hexdigest()[depth]
            ].append(row)
        rows = [("s", _add(lists, part, depth + 1)) for _, part in sorted(parts.items())]
    else:
        rows = sorted(rows, key=lambda row: row[1])
    data = json.dumps({"schema": SCHEMA, "entries": rows}, separators=(",", ":")).encode()
    digest = hashlib.sha256(data).hexdigest()
    lists[digest] = data
    return digest


def decode(root: str, read: Callable[[Sequence[tuple[str, str]]], Iterable[bytes]]) -> list[Entry]:
    """Read a tree, folders before what is in them, and verify that unpacking it cannot write
    outside its folder.

    Args:
        root: digest of the root's list.
        read: takes (path of the folder, digest) and returns the lists; called once for
            each level of the tree.

    Raises:
        CorruptRecord: a list is malformed.
    """
    entries: list[Entry] = []
    level, seen = [("", root)], 0
    while level:
        below: list[tuple[str, str]] = []
        for (folder, _), data in zip(level, read(level), strict=True):
            found = contents(folder, data)
            below += [
                (each.path, each.digest)
                for each in found
                if isinstance(each, Folder | ManifestPart)
            ]
            entries += [each for each in found if not isinstance(each, ManifestPart)]
            if len(entries) + len(below) + seen > _MOST_ENTRIES:
                raise CorruptRecord(
                    "The manifest of the source tree is damaged: it has more than "
                    f"{_MOST_ENTRIES:,} entries."
                )
        seen += len(level)
        level = below
    _verify(entries)
    return entries


@functools.lru_cache(maxsize=_LISTS_KEPT)
def contents(folder: str, data: bytes) -> tuple[Entry | ManifestPart, ...]:
    """Read the list of one folder.

    Raises:
        CorruptRecord: it is malformed.
    """
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA:
            raise CorruptRecord(
                f"The manifest has schema {document['schema']!r}; this kinetic reads {SCHEMA}."
            )
        inside = f"{folder}/" if folder else ""
        return tuple([_entry(folder, inside, *row) for row in document["entries"]])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptRecord(f"The manifest of the source tree is damaged: {error!r}.") from error


def drop_broken_links(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without links to missing ones, which were removed after they were
    found."""
    there = {entry.path for entry in entries if not isinstance(entry, Symlink)} | {""}
    return [
        each for each in entries if not isinstance(each, Symlink) or _resolve_link(each) in there
    ]


def join(lists: dict[str, bytes]) -> bytes:
    """Return lists as one text, one per line, in order."""
    return b"\n".join(lists.values())


def split(text: bytes) -> dict[str, bytes]:
    """Return the lists of a joined text by digest."""
    return {hashlib.sha256(line).hexdigest(): line for line in text.split(b"\n")}


def unfold(text: bytes) -> list[Entry]:
    """Return the entries of a tree whose lists are given as one text, the root's last."""
    lists = split(text)
    return decode(next(reversed(lists)), lambda level: [lists[digest] for _, digest in level])


def files_among(text: bytes, paths: Iterable[str]) -> set[str]:
    """Return which of these paths are regular files of a tree; only the lists on the way to them
    are read.

    Args:
        text: the tree's lists as one text, the root's last.
        paths: paths relative to the root.
    """
    lists = split(text)
    folders = {"": _rows(lists, "", next(reversed(lists)))}

    def entry(path: str) -> Entry | None:
        above, _, name = path.rpartition("/")
        if above not in folders:
            folder = entry(above)
            folders[above] = (
                _rows(lists, above, folder.digest) if isinstance(folder, Folder) else {}
            )
        return folders[above].get(name)

    return {path for path in paths if isinstance(entry(path), File)}


def _rows(lists: Mapping[str, bytes], folder: str, digest: str) -> dict[str, Entry]:
    """Return the entries of one folder by name."""
    rows: dict[str, Entry] = {}
    for each in contents(folder, lists[digest]):
        rows |= (
            _rows(lists, folder, each.digest)
            if isinstance(each, ManifestPart)
            else {each.path.rpartition("/")[2]: each}
        )
    return rows


def _entry(folder: str, inside: str, kind: str, *row: Any) -> Entry | ManifestPart:
    if kind == "s":
        (digest,) = row
        return ManifestPart(folder, _digest(digest))
    name, *rest = row
    if name in _NO_NAMES or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a name inside a folder")
    path = inside + name
    if kind == "f":
        mode, size_bytes, digest = rest
        if type(size_bytes) is not int or size_bytes < 0:
            raise ValueError(f"{path!r} has size {size_bytes!r}")
        return File(path, _mode(mode), size_bytes, _digest(digest))
    if kind == "d":
        mode, digest = rest
        return Folder(path, _mode(mode), _digest(digest))
    if kind != "l":
        raise ValueError(f"{path!r} is neither a file, a folder nor a link, but {kind!r}")
    (target,) = rest
    if type(target) is not str or not target or "\0" in target:
        raise ValueError(f"{path!r} leads to {target!r}")
    return Symlink(path, target)


def _mode(mode: object) -> int:
    if type(mode) is not int or not 0 <= mode <= _MODES:
        raise ValueError(f"{mode!r} is not a mode")
    return mode


def _digest(text: str) -> str:
    if not _DIGEST.match(text):
        raise ValueError(f"{text!r} is not a digest")
    return text


def _verify(entries: list[Entry]) -> None:
    """Verify what a single list cannot show. That a parent is a real folder, never a link, follows
    from how lists are nested."""
    if len({entry.path for entry in entries} | {""}) != len(entries) + 1:
        raise CorruptRecord("The manifest of the source tree is damaged: it names a path twice.")
    links = [entry for entry in entries if isinstance(entry, Symlink)]
    there = {""}.union(entry.path for entry in entries if links and not isinstance(entry, Symlink))
    for entry in links:
        if _resolve_link(entry) not in there:
            raise CorruptRecord(
                f"The manifest of the source tree is damaged: link {entry.path!r} leads to no "
                "entry of the tree."
            )


def _resolve_link(link: Symlink) -> str:
    """Return the path in the tree that the link points to, or one that no entry has."""
    if link.target.startswith("/") or link.target != posixpath.normpath(link.target):
        return "/"  # Bundles have normalized paths; a detour could lead out through another link.
    path = posixpath.normpath(posixpath.join(link.path.rpartition("/")[0], link.target))
    return "" if path == "." else path
