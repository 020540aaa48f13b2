"""One scan of a project and of what is shipped beside it.

In: the project's scan, where else modules are imported from. Out: a `Scan` whose paths are relative
to a folder that contains all of them.
"""

# ruff: noqa: PTH116, PTH118

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic._source import editable, ignore, walk
from kinetic._source.editable import EditablePart, ImportFolder
from kinetic._source.project import OWN_MARKER
from kinetic._source.walk import FoundFile, Scan, ScanOptions
from kinetic._store import files

_LISTS = ("broken", "unreadable", "loops", "special", "secrets", "kept_back")


@dataclass(frozen=True)
class Beside:
    """What is shipped with a project.

    Attributes:
        places: where modules are imported from besides the project.
        never: real paths of folders that hold anything.
        exclude: real paths, always left out.
    """

    places: tuple[ImportFolder, ...] = ()
    never: tuple[Path, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def imported(self) -> tuple[str, ...]:
        """The folders from which modules are imported."""
        return tuple(place.folder for place in self.places)


def find_top(root: str, places: Iterable[ImportFolder]) -> str:
    """Return the folder that contains the project and all places."""
    return os.path.commonpath([root, *(place.folder for place in places)])


def scan(root: str, own: Scan, beside: Beside, options: ScanOptions) -> Scan:
    """Return the project's scan with what lies beside it.

    Args:
        root: the project's folder.
        own: the project's scan.
        beside: what else is shipped.
        options: of the project's scan.
    """
    around = find_top(root, beside.places)
    found = Scan(without_git=own.without_git)
    _add(found, own, root, around)
    missing = [
        place
        for place in beside.places
        if options.only or not (_is_inside(place.folder, root) and _is_decided(place, root, own))
    ]
    options = dataclasses.replace(options, exclude=options.exclude.union(beside.exclude))
    for part in editable.parts(missing, beside.never):
        _add_part(found, part, root, around, options)
    _add_descriptions(found, beside, around)
    return found


def _add_descriptions(found: Scan, beside: Beside, around: str) -> None:
    """Add what a package asks for about itself, such as its version, to the folder that it is
    imported from."""
    shipped = [
        folder
        for folder in beside.imported
        if folder == around or _rebase_path("", folder, around) in found.folders
    ]
    for folder, path in editable.descriptions(shipped):
        info = os.stat(path)
        above, name = path.rsplit("/", 2)[1:]
        rel = _rebase_path(f"{above}/{name}", folder, around)
        found.folders.setdefault(rel.rpartition("/")[0], 0o755)
        found.files.setdefault(
            rel, FoundFile(path, info.st_mode & 0o777, info.st_size, walk.stamp_of(info))
        )
        found.watched[path] = walk.stamp_of(info)
        found.beside.add(rel)


def _add_part(
    found: Scan, part: EditablePart, root: str, around: str, options: ScanOptions
) -> None:
    others = {root} if not _is_inside(part.root, root) else set()
    theirs = dataclasses.replace(
        options,
        exclude=options.exclude | others,
        sparing=True,
        most=(walk.MOST_FILES, walk.MOST_BYTES),
        only=part.only,
        asks_git=True,
        imported=part.places,
    )
    try:
        scanned = walk.scan(part.root, theirs)
    except walk.TooMuch as error:
        found.watched |= error.watched
        found.too_large.append(part.root)
        return
    before = set(found.files)
    _add(found, scanned, part.root, around)
    found.without_git += scanned.without_git
    found.beside |= found.files.keys() - before


def _add(found: Scan, scanned: Scan, root: str, around: str) -> None:
    """Add a scan; what is there already stays, also if it was taken as another kind: one scan
    follows a link that stays one for another."""
    folders = {_rebase_path(rel, root, around): rel for rel in ("", *scanned.folders)}
    known = tuple(f"{path}/" for path in folders if path in found.files or path in found.links)

    def is_free(path: str, *kinds: Mapping[str, object]) -> bool:
        return not f"{path}/".startswith(known) and not any(path in kind for kind in kinds)

    for path, rel in folders.items():
        if path and is_free(path, found.folders):
            for depth in range(path.count("/")):
                found.folders.setdefault("/".join(path.split("/")[: depth + 1]), 0o755)
            found.folders[path] = scanned.folders.get(rel, 0o755)
    for rel, file in scanned.files.items():
        path = _rebase_path(rel, root, around)
        if is_free(path, found.folders, found.links):
            found.files.setdefault(path, file)
    for rel, target in scanned.links.items():
        path = _rebase_path(rel, root, around)
        if is_free(path, found.folders, found.files):
            found.links.setdefault(path, target)
    found.watched |= scanned.watched
    found.targets |= scanned.targets
    for name in _LISTS:
        getattr(found, name).extend(
            _rebase_path(rel, root, around) for rel in getattr(scanned, name)
        )


def _rebase_path(rel: str, root: str, around: str) -> str:
    """Return a path that is relative to the root as one that is relative to the folder around it;
    "" for what lies above."""
    path = os.path.normpath(os.path.join(root, rel))
    return os.path.relpath(path, around) if path != around and _is_inside(path, around) else ""


def _is_inside(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def _is_decided(place: ImportFolder, root: str, own: Scan) -> bool:
    """Whether the project's scan has the folder, or the project's `.kineticignore` leaves it
    out."""
    if place.folder == root:
        return True
    rel = os.path.relpath(place.folder, root)
    if rel in own.folders:
        return True
    try:
        rules = ignore.kinetic_rules(files.content(Path(root, OWN_MARKER)))
    except OSError:
        return False
    parts = rel.split("/")
    above: Sequence[str] = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(
        rules.decide(each, each.rpartition("/")[2], is_folder=True) is True for each in above
    )
