"""Merge the scan of a project with scans of the other folders that are sent with it.

In: the project's scan, the other folders that modules are imported from. Out: a `Scan` whose paths
are relative to a folder that contains all of them.
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
class Companions:
    """Folders that are sent together with a project, such as editable packages.

    Attributes:
        places: folders outside the project that modules are imported from.
        never: real paths of folders that are never source, such as home and `/`.
        exclude: real paths that are always left out.
    """

    places: tuple[ImportFolder, ...] = ()
    never: tuple[Path, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def imported(self) -> tuple[str, ...]:
        """The folders from which modules are imported."""
        return tuple(place.folder for place in self.places)


def find_top(root: str, places: Iterable[ImportFolder]) -> str:
    """Return the folder that contains the project and all these folders."""
    return os.path.commonpath([root, *(place.folder for place in places)])


def scan_with_companions(
    root: str, own: Scan, companions: Companions, options: ScanOptions
) -> Scan:
    """Return the project's scan merged with scans of its companions.

    Args:
        root: the project's folder.
        own: the project's scan.
        companions: the other folders to ship.
        options: the options of the project's scan.
    """
    top = find_top(root, companions.places)
    merged = Scan(without_git=own.without_git)
    _add(merged, own, root, top)
    missing = [
        place
        for place in companions.places
        if options.only is not None
        or not (_is_inside(place.folder, root) and _is_decided(place, root, own))
    ]
    options = dataclasses.replace(options, exclude=options.exclude.union(companions.exclude))
    for part in editable.parts(missing, companions.never):
        _add_part(merged, part, root, top, options)
    _add_descriptions(merged, companions, top)
    return merged


def _add_descriptions(merged: Scan, companions: Companions, top: str) -> None:
    """Add the metadata files of each package, which tell its version, to the folder from which the
    package is imported."""
    shipped = [
        folder
        for folder in companions.imported
        if folder == top or _rebase_path("", folder, top) in merged.folders
    ]
    for folder, path in editable.descriptions(shipped):
        info = os.stat(path)
        above, name = path.rsplit("/", 2)[1:]
        rel = _rebase_path(f"{above}/{name}", folder, top)
        merged.folders.setdefault(rel.rpartition("/")[0], 0o755)
        merged.files.setdefault(
            rel, FoundFile(path, info.st_mode & 0o777, info.st_size, walk.stamp_of(info))
        )
        merged.watched[path] = walk.stamp_of(info)
        merged.foreign.add(rel)


def _add_part(merged: Scan, part: EditablePart, root: str, top: str, options: ScanOptions) -> None:
    others = {root} if not _is_inside(part.root, root) else set()
    part_options = dataclasses.replace(
        options,
        exclude=options.exclude | others,
        sparing=True,
        most=(walk.MOST_FILES, walk.MOST_BYTES),
        only=part.only,
        asks_git=True,
        imported=part.places,
    )
    try:
        scanned = walk.scan(part.root, part_options)
    except walk.TooMuch as error:
        merged.watched |= error.watched
        merged.too_large.append(part.root)
        return
    before = set(merged.files)
    _add(merged, scanned, part.root, top)
    merged.without_git += scanned.without_git
    merged.foreign |= merged.files.keys() - before


def _add(merged: Scan, scanned: Scan, root: str, top: str) -> None:
    """Add a scan to the merged one, except for paths that the merged scan has. Such a path may be a
    link in one scan and a folder in another, which has followed the link."""
    folders = {_rebase_path(rel, root, top): rel for rel in ("", *scanned.folders)}
    occupied = tuple(f"{path}/" for path in folders if path in merged.files or path in merged.links)

    def is_free(path: str, *kinds: Mapping[str, object]) -> bool:
        return not f"{path}/".startswith(occupied) and not any(path in kind for kind in kinds)

    for path, rel in folders.items():
        if path and is_free(path, merged.folders):
            for depth in range(path.count("/")):
                merged.folders.setdefault("/".join(path.split("/")[: depth + 1]), 0o755)
            merged.folders[path] = scanned.folders.get(rel, 0o755)
    for rel, file in scanned.files.items():
        path = _rebase_path(rel, root, top)
        if is_free(path, merged.folders, merged.links):
            merged.files.setdefault(path, file)
    for rel, target in scanned.links.items():
        path = _rebase_path(rel, root, top)
        if is_free(path, merged.folders, merged.files):
            merged.links.setdefault(path, target)
    merged.watched |= scanned.watched
    merged.targets |= scanned.targets
    for name in _LISTS:
        getattr(merged, name).extend(_rebase_path(rel, root, top) for rel in getattr(scanned, name))


def _rebase_path(rel: str, root: str, top: str) -> str:
    """Convert a path relative to the root to one relative to `top`; "" if it is not below `top`."""
    path = os.path.normpath(os.path.join(root, rel))
    return os.path.relpath(path, top) if path != top and _is_inside(path, top) else ""


def _is_inside(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def _is_decided(place: ImportFolder, root: str, own: Scan) -> bool:
    """True if the project's scan has the folder, or the project's `.kineticignore` omits it."""
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
        rules.decide(folder, folder.rpartition("/")[2], is_folder=True) is True for folder in above
    )
