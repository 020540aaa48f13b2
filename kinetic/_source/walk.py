"""Walks over a source tree: the entries to ship, and everything that the result depends on.

In: the root, the paths to leave out. Out: `Scan`.

A symbolic link stays a link if its target is sent too. In place of other links, their target is
sent, so that the tree is complete on the host.
"""

# A Path for each entry would cost more than the calls themselves.
# ruff: noqa: PTH113, PTH116

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from dataclasses import field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from kinetic._core.values import dataclass
from kinetic._source import git, ignore
from kinetic._source.ignore import leads_to_hidden, looks_secret
from kinetic._source.project import MARKERS, OWN_MARKER
from kinetic._store import files
from kinetic.errors import UsageError

Stamp = tuple[int, ...]
"""Times of content and inode, size, inode, mode and device: differs whenever a file or folder has
changed. Empty if nothing exists at the path."""

_VANISHED = (FileNotFoundError, NotADirectoryError)
"""Errors for a path that was removed after its folder was listed; they are ignored."""
_SIGNED = 0x7FFF_FFFF_FFFF_FFFF  # Inode numbers may need all 64 bits.

_NO_GIT = (
    "git is not installed, so files that it would ignore are sent as well. List the files to leave "
    "out in .kineticignore."
)
MOST_FILES, MOST_BYTES = 20_000, 2_000_000_000
_PROJECT_FACTOR = 10
_EXTENSIONS = tuple(EXTENSION_SUFFIXES)
MODEST_FILES, MODEST_BYTES = 1_000, 100_000_000
"""Largest folder, in files and bytes, to send whole although no file marks it as a project."""


class FoundFile(NamedTuple):
    """A regular file to ship.

    Attributes:
        path: the absolute path to read.
        mode: permission bits.
        size_bytes: size during the walk.
        stamp: stamp during the walk.
    """

    path: str
    mode: int
    size_bytes: int
    stamp: Stamp


@dataclasses.dataclass
class Scan:
    """The result of a walk; paths are relative to the root.

    Attributes:
        folders: mode of each folder.
        files: each regular file.
        links: target of each link that stays a link, relative to the link's folder.
        watched: stamps of all paths that the result depends on, by absolute path.
        broken, unreadable, loops, special, secrets, kept_back: paths to warn about.
        without_git: warnings about git's ignore files that were not read.
        foreign: files from folders outside the project.
        too_large: folders that were left out because of their size.
        targets: real paths outside the root that links in it lead to.
    """

    folders: dict[str, int] = field(default_factory=dict)
    files: dict[str, FoundFile] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    watched: dict[str, Stamp] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    kept_back: list[str] = field(default_factory=list)
    without_git: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)
    too_large: list[str] = field(default_factory=list)
    targets: set[str] = field(default_factory=set)


class TooMuch(Exception):
    """A folder is too large to be shipped whole.

    Attributes:
        watched: stamps by absolute path; the folder stays too large while they are the same.
    """

    def __init__(self, watched: Mapping[str, Stamp]) -> None:
        super().__init__()
        self.watched = watched


@dataclass(frozen=True)
class _Visit:
    """A folder to visit: its path on disk and in the tree, the paths that git ignores in it, and
    the folders above it (device and inode). With `kept_only`, take only files that a "!" rule of
    `.kineticignore` keeps."""

    path: str
    rel: str
    ignored: frozenset[str]
    ancestors: tuple[tuple[int, int], ...]
    kept_only: bool = False


def stamp_of(info: os.stat_result) -> Stamp:
    """Return the stamp of a file or folder."""
    return (
        info.st_mtime_ns,
        info.st_ctime_ns,
        info.st_size,
        info.st_ino & _SIGNED,
        info.st_mode,
        info.st_dev & _SIGNED,
    )


def stamp_at(path: str) -> Stamp:
    """Return the stamp of a path, following links; empty if the path does not exist."""
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return ()


@dataclass(frozen=True)
class ScanOptions:
    """Rules for leaving paths out of a walk.

    Attributes:
        exclude: real paths, always left out.
        outputs: real paths, left out unless an ignore file keeps them ("!results/").
        default_excludes: leave out virtual environments, caches and the like.
        sparing: leave out hidden folders and files that look like keys.
        most: raise `TooMuch` if the folder has more files or bytes than these.
        only: paths to take, relative to the root; None for all.
        imported: real paths of folders that editable packages are imported from. Modules in them
            (also generated ones and extensions built in place) are taken even if git ignores them.
        everything: leave out `exclude` and nothing else: for declared data, to which no ignore
            file, default or limit applies.
        asks_git: leave out paths that git ignores.
    """

    exclude: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    default_excludes: bool = True
    sparing: bool = False
    most: tuple[int, int] | None = None
    only: tuple[str, ...] | None = None
    imported: tuple[str, ...] = ()
    everything: bool = False
    asks_git: bool = True


def scan(root: str, options: ScanOptions) -> Scan:
    """Walk the tree below the root, which must be a real path.

    Raises:
        UsageError: the tree is implausibly large.
        TooMuch: the tree exceeds `most` of the options.
    """
    return _Walk(root, options).run()


def check_size(root: str, files: int, size_bytes: int, factor: int = 1) -> None:
    """Refuse an implausibly large tree: `factor` times the limits for a project."""
    if files > MOST_FILES * factor or size_bytes > MOST_BYTES * factor:
        raise UsageError(
            f"The source tree {root} is too large to be sent: more than {MOST_FILES * factor:,} "
            f"files or {MOST_BYTES * factor // 10**9} GB. Set KINETIC_PACKAGE_ROOT to the folder "
            "of your project, or list files that the function does not need in .kineticignore."
        )


class _Walk:
    def __init__(self, root: str, options: ScanOptions) -> None:
        self._root = root
        self._options = options
        self._inside = root.rstrip("/") + "/"
        self._everything = options.everything
        self._only = options.only
        self._imported = tuple(f"{folder}/" for folder in options.imported)
        self._default_excludes = options.default_excludes and not options.everything
        self._names = ignore.ALWAYS | ignore.DEFAULTS if self._default_excludes else ignore.ALWAYS
        self._scan = Scan()
        self._size_bytes = 0
        self._todo: list[_Visit] = []
        self._links: list[tuple[str, str, bool, _Visit]] = []
        self._factor = (
            _PROJECT_FACTOR
            if any(os.path.lexists(self._inside + m) for m in (*MARKERS, OWN_MARKER))
            else 1
        )
        self._rules = ignore.IgnoreRules(()) if options.everything else self._read_rules()

    def run(self) -> Scan:
        self._todo.append(_Visit(self._root, "", self._ask_git(self._root), ()))
        while self._todo or self._links:
            while self._todo:
                self._visit_folder(self._todo.pop())
            links, self._links = self._links, []
            for rel, target, is_folder, visit in links:
                self._take_link(rel, target, is_folder, visit)
        return self._scan

    def _visit_folder(self, visit: _Visit) -> None:
        try:
            info = os.stat(visit.path)
            self._scan.watched[visit.path] = stamp_of(info)
            with os.scandir(visit.path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self._scan.watched.setdefault(visit.path, ())
            if isinstance(error, _VANISHED) and visit.rel:
                del self._scan.folders[visit.rel]
            else:
                self._scan.unreadable.append(visit.rel or ".")
            return
        names = {entry.name for entry in entries}
        if (
            visit.rel
            and not self._everything
            and ignore.is_not_source(names, default_excludes=self._default_excludes)
            and self._decide(visit.rel, is_folder=True) is not False
        ):
            del self._scan.folders[visit.rel]
            return
        if self._default_excludes and not visit.rel and "pyvenv.cfg" in names:
            entries = [entry for entry in entries if entry.name not in ignore.ENVIRONMENT_PARTS]
        if ".gitignore" in names:  # Watch the file even if it is not sent.
            self._scan.watched[f"{visit.path}/.gitignore"] = stamp_at(f"{visit.path}/.gitignore")
        ignored = self._ask_git(visit.path) if visit.rel and ".git" in names else visit.ignored
        ancestors = (*visit.ancestors, (info.st_dev, info.st_ino))
        inside = _Visit(visit.path, visit.rel, ignored, ancestors, visit.kept_only)
        for entry in entries:
            self._visit_entry(
                entry, f"{visit.rel}/{entry.name}" if visit.rel else entry.name, inside
            )

    def _visit_entry(self, entry: os.DirEntry[str], rel: str, visit: _Visit) -> None:
        name = entry.name
        if entry.path in self._options.exclude or (name in ignore.ALWAYS and not self._everything):
            return
        is_link = entry.is_symlink()
        try:
            is_folder = entry.is_dir()
        except OSError:
            is_folder = False
        if self._is_left_out(entry.path, rel, is_folder, visit):
            if is_folder and not is_link and self._holds_kept(rel):
                self._take_folder(entry.path, rel, visit, kept_only=True)
            return
        if is_link:
            self._defer_link(entry.path, rel, is_folder, visit)
        elif is_folder:
            self._take_folder(entry.path, rel, visit)
        else:
            self._take_file(entry.path, rel)

    def _is_left_out(self, path: str, rel: str, is_folder: bool, visit: _Visit) -> bool:
        if self._everything:
            return False
        name = rel.rpartition("/")[2]
        if self._only is not None and not any(_is_on_the_way(rel, path) for path in self._only):
            return True
        verdict = self._decide(rel, is_folder=is_folder)
        if verdict is not None:
            return verdict
        if visit.kept_only:
            return True
        if path in visit.ignored and not self._is_imported(path, name, is_folder=is_folder):
            return True
        is_hidden = self._options.sparing and is_folder and name.startswith(".")
        return is_hidden or name in self._names or path in self._options.outputs

    def _decide(self, rel: str, *, is_folder: bool) -> bool | None:
        """Apply `.kineticignore` to a path: True to leave it out, False to keep it, None if no rule
        matches."""
        return self._rules.decide(rel, rel.rpartition("/")[2], is_folder=is_folder)

    def _holds_kept(self, rel: str) -> bool:
        """True if `.kineticignore` keeps a path in a folder that is otherwise left out."""
        return (
            any(path.startswith(f"{rel}/") for path in self._rules.kept_paths)
            and self._decide(rel, is_folder=True) is None
            and (self._only is None or any(_is_on_the_way(rel, path) for path in self._only))
        )

    def _is_imported(self, path: str, name: str, *, is_folder: bool) -> bool:
        """True if Python imports this path from an editable package."""
        if self._only is not None and any(
            folder.startswith(f"{path}/") for folder in self._imported
        ):
            return True
        if not path.startswith(self._imported):
            return False
        if is_folder:  # Watch __init__.py: adding it changes the result.
            stamp = self._scan.watched[f"{path}/__init__.py"] = stamp_at(f"{path}/__init__.py")
            return bool(stamp) and stat.S_ISREG(stamp[4])
        in_package = os.path.isfile(f"{path[: -len(name)]}__init__.py")
        return name.endswith(_EXTENSIONS) or (name.endswith(".py") and in_package)

    def _defer_link(self, path: str, rel: str, is_folder: bool, visit: _Visit) -> None:
        self._scan.watched[path] = stamp_at(path)
        try:
            target = os.path.realpath(path, strict=True)
        except OSError:
            self._scan.broken.append(rel)
            return
        if not target.startswith(self._inside):
            self._scan.targets.add(target)
        if target in self._options.exclude or (
            target in self._options.outputs and not self._everything
        ):
            return
        self._links.append((rel, target, is_folder, visit))

    def _take_link(self, rel: str, target: str, is_folder: bool, visit: _Visit) -> None:
        below = f"{target}/"
        inside = target[len(self._inside) :] if below.startswith(self._inside) else None
        if inside == "" or inside in self._scan.folders or inside in self._scan.files:
            self._scan.links[rel] = os.path.relpath(f"/{inside}", f"/{rel.rpartition('/')[0]}")
        elif self._options.sparing and leads_to_hidden(self._root, target):
            self._scan.kept_back.append(rel)
        elif is_folder:
            ignored = self._ask_git(target) if inside is None else visit.ignored
            self._take_folder(target, rel, dataclasses.replace(visit, ignored=ignored))
        else:
            self._take_file(target, rel)

    def _take_folder(self, path: str, rel: str, visit: _Visit, *, kept_only: bool = False) -> None:
        try:
            info = os.stat(path)
        except OSError as error:
            if not isinstance(error, _VANISHED):
                self._scan.unreadable.append(rel)
            return
        if (info.st_dev, info.st_ino) in visit.ancestors:
            self._scan.loops.append(rel)
            return
        self._scan.folders[rel] = stat.S_IMODE(info.st_mode) & 0o777
        self._todo.append(_Visit(path, rel, visit.ignored, visit.ancestors, kept_only))

    def _take_file(self, path: str, rel: str) -> None:
        try:
            info = os.stat(path)
        except OSError:  # It was removed meanwhile: the folder's stamp differs.
            return
        stamp = stamp_of(info)
        self._scan.watched[path] = stamp
        if not stat.S_ISREG(info.st_mode):
            self._scan.special.append(rel)
            return
        if looks_secret(rel.rpartition("/")[2]):
            if self._options.sparing:
                self._scan.kept_back.append(rel)
                return
            self._scan.secrets.append(rel)
        self._scan.files[rel] = FoundFile(
            path, stat.S_IMODE(info.st_mode) & 0o777, info.st_size, stamp
        )
        self._count(info.st_size)

    def _count(self, size_bytes: int) -> None:
        if self._everything:
            return
        self._size_bytes += size_bytes
        count = len(self._scan.files)
        most = self._options.most
        if most is not None and (count > most[0] or self._size_bytes > most[1]):
            raise TooMuch(self._scan.watched)
        check_size(self._root, count, self._size_bytes, self._factor)

    def _read_rules(self) -> ignore.IgnoreRules:
        """Read the project's `.kineticignore`. A missing or unreadable one, a link, or anything but
        a regular file has no rules."""
        path = f"{self._inside}.kineticignore"
        self._scan.watched[path] = stamp_at(path)
        try:
            text = b"" if Path(path).is_symlink() else files.content(path)
        except OSError:
            text = b""
        return ignore.kinetic_rules(text)

    def _ask_git(self, folder: str) -> frozenset[str]:
        """Return the paths that git ignores in a folder; none without git or outside a
        repository."""
        if self._everything or not self._options.asks_git:
            return frozenset()
        repository = git.find_repository(folder)
        for path in (folder, *map(str, Path(folder).parents)):
            self._scan.watched[f"{path}/.git/HEAD"] = stamp_at(f"{path}/.git/HEAD")
            if path == repository:
                break
        if repository is None:
            if os.path.lexists(f"{folder}/.gitignore"):
                self._scan.without_git.append(
                    f"{folder} has a .gitignore, which is not read because the folder is not in a "
                    "git repository. Run `git init`, or list the files to leave out in "
                    ".kineticignore."
                )
            return frozenset()
        answer = git.ask(folder, repository)
        for path in answer.watched:
            self._scan.watched[path] = stamp_at(path)
        if answer.is_missing:
            self._scan.without_git[:] = [_NO_GIT]
        elif answer.error:
            self._scan.without_git.append(
                f"Files in {folder} that git ignores are sent as well, because git failed: "
                f"{answer.error}. List the files to leave out in .kineticignore."
            )
        return answer.ignored


def _is_on_the_way(rel: str, wanted: str) -> bool:
    """True if a path is the wanted path, is inside it, or is a folder above it."""
    return f"{rel}/".startswith(f"{wanted}/") or wanted.startswith(f"{rel}/")
