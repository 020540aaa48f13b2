"""A script outside any project: itself, the modules that it imports from around it, and small files
beside it.

In: the script's folder, where to begin. Out: a `Scan` of what belongs to it.

Home, `/tmp` and `/` hold everything else as well, and nothing marks what is the script's. So the
only files taken merely for being there are small ones in the same folder: never folders, dot-files
or what looks like keys. In a folder that all programs use, like `/tmp`, these are only files whose
names occur in the script.
"""

# ruff: noqa: PTH116

from __future__ import annotations

import ast
import os
import stat
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic._source import ignore, walk
from kinetic._source.ignore import leads_to_hidden, looks_secret
from kinetic._source.walk import FoundFile, Scan, stamp_at, stamp_of

NEIGHBOUR_BYTES = 1_000_000
"""The largest file that is taken merely for being there."""
MOST_NEIGHBOURS = 100
MOST_NEIGHBOUR_BYTES = 10_000_000
_MOST_PARSED_BYTES = 2_000_000
_LONGEST_NAME = 256


@dataclass(frozen=True)
class Seeds:
    """Where the search for what belongs to a script begins; paths are relative to its folder.

    Attributes:
        files: the script, files that its command line names, modules that are loaded already.
        modules: names of modules to find, as `-m` names one.
        folders: where modules are looked for: the script's folder and what it has put on sys.path;
            "" is the folder itself.
        crowded: whether all programs use the folder, so that most files in it are not the script's.
    """

    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("",)
    crowded: bool = False


def scan(root: str, seeds: Seeds, *, exclude: Collection[str] = ()) -> Scan:
    """Return what belongs to the script; the root and `exclude` are real paths.

    Raises:
        UsageError: it is implausibly large.
    """
    return _Gathering(root, seeds, frozenset(exclude)).run()


class _Gathering:
    def __init__(self, root: str, seeds: Seeds, exclude: frozenset[str]) -> None:
        self._root = root.rstrip("/")
        self._seeds = seeds
        self._exclude = exclude
        self._found = Scan()
        self._modules: list[str] = []
        self._asked: set[str] = set()
        self._packages: set[str] = set()
        self._mentioned: set[str] = set()
        self._size_bytes = 0

    def run(self) -> Scan:
        for rel in self._seeds.files:
            self._take_with_package(rel)
        self._ask(self._seeds.modules)
        while self._modules:
            self._find(self._modules.pop(), self._seeds.folders)
        self._found.modules = [rel for rel in self._found.files if rel.endswith(".py")]
        self._take_neighbours()
        return self._found

    def _ask(self, names: Sequence[str]) -> None:
        new = set(names) - self._asked
        self._asked |= new
        self._modules += sorted(new)

    def _find(self, name: str, folders: Sequence[str], *, inside: bool = False) -> None:
        """Take the module of this name; `inside` is whether a package without `__init__.py` is
        around it, anywhere on the way."""
        first, _, rest = name.partition(".")
        for folder in folders:
            rel = f"{folder}/{first}" if folder else first
            if self._is_file(f"{rel}.py"):
                self._take(f"{rel}.py")
            elif self._is_file(f"{rel}/__init__.py"):
                self._take_package(rel)
            elif not Path(self._root, rel).is_dir() or not (inside or self._is_free(first)):
                continue
            elif any(entry.endswith(".py") for entry, _ in self._list_folder(rel)):
                self._take_package(rel)
            elif rest:
                self._find(rest, [rel], inside=True)
            return

    def _is_file(self, rel: str) -> bool:
        path = f"{self._root}/{rel}"
        self._found.watched[path] = stamp_at(path)
        return Path(path).is_file()

    def _is_free(self, name: str) -> bool:
        """Whether an import finds nothing of this name elsewhere: a folder without `__init__.py`
        comes last."""
        if name in sys.stdlib_module_names:
            return False
        elsewhere = [place for place in sys.path if os.path.realpath(place or ".") != self._root]
        try:
            spec = PathFinder.find_spec(name, elsewhere)
        except (ImportError, ValueError):
            return True
        return spec is None or spec.loader is None

    def _take_with_package(self, rel: str) -> None:
        """Take a file and the package that it belongs to, in which relative imports may lead
        anywhere."""
        folder = rel.rpartition("/")[0]
        top = ""
        while folder and self._is_file(f"{folder}/__init__.py"):
            folder, top = folder.rpartition("/")[0], folder
        if top:
            self._take_package(top)
        self._take(rel)

    def _take_package(self, rel: str) -> None:
        if rel in self._packages:
            return
        self._packages.add(rel)
        for name, is_folder in self._list_folder(rel):
            inside = f"{rel}/{name}"
            if is_folder:
                self._take_package(inside)
            elif name.endswith(".py"):
                self._take(inside)
            else:
                self._take(inside, most_bytes=NEIGHBOUR_BYTES)

    def _list_folder(self, rel: str) -> Iterator[tuple[str, bool]]:
        """Yield the names in a folder and whether each is a folder, without links to folders and
        what is not source."""
        path = f"{self._root}/{rel}" if rel else self._root or "/"
        self._found.watched[path] = stamp_at(path)
        try:
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            return
        if rel and ignore.is_not_source({entry.name for entry in entries}, default_excludes=True):
            return
        for entry in entries:
            if (
                entry.name.startswith(".")
                or entry.name in ignore.ALWAYS | ignore.DEFAULTS
                or entry.path in self._exclude
            ):
                continue
            is_folder = entry.is_dir()
            if not (is_folder and entry.is_symlink()):
                yield entry.name, is_folder

    def _take(self, rel: str, *, most_bytes: int | None = None, mine: bool = False) -> bool:
        path = f"{self._root}/{rel}"
        if rel in self._found.files or path in self._exclude:
            return False
        try:
            info = os.stat(path)
        except OSError:
            return False
        self._found.watched[path] = stamp_of(info)
        if not stat.S_ISREG(info.st_mode) or (most_bytes is not None and info.st_size > most_bytes):
            return False
        if mine and info.st_uid != os.getuid():
            return False
        real = os.path.realpath(path)
        if real != path:
            self._found.targets.add(real)
        if real in self._exclude:
            return False
        if looks_secret(rel.rpartition("/")[2]) or (
            real != path and leads_to_hidden(self._root, real)
        ):
            self._found.kept_back.append(rel)
            return False
        self._add(rel, path, info)
        if rel.endswith(".py"):
            text = read(path)
            self._ask(text.modules)
            self._mentioned |= text.words
        return True

    def _add(self, rel: str, path: str, info: os.stat_result) -> None:
        parts = rel.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            self._found.folders.setdefault("/".join(parts[:depth]), 0o755)
        mode = stat.S_IMODE(info.st_mode) & 0o777
        self._found.files[rel] = FoundFile(
            os.path.realpath(path), mode, info.st_size, stamp_of(info)
        )
        self._found.watched[self._found.files[rel].path] = stamp_of(info)
        self._size_bytes += info.st_size
        walk.check_size(self._root, len(self._found.files), self._size_bytes)

    def _take_neighbours(self) -> None:
        """Take the smallest files beside the script, up to a limit in number and size; never
        another user's."""
        sizes: list[tuple[int, str]] = []
        for name, is_folder in self._list_folder(""):
            if not is_folder and name not in self._found.files:
                path = f"{self._root}/{name}"
                stamp = stamp_at(path)
                self._found.watched[path] = stamp
                if (
                    stamp
                    and stamp[2] <= NEIGHBOUR_BYTES
                    and (name in self._mentioned or not self._seeds.crowded)
                ):
                    sizes.append((stamp[2], name))
        total = 0
        for size, name in sorted(sizes):
            if (
                len(self._found.neighbours) >= MOST_NEIGHBOURS
                or total + size > MOST_NEIGHBOUR_BYTES
            ):
                break
            if self._take(name, most_bytes=NEIGHBOUR_BYTES, mine=True):
                self._found.neighbours.append(name)
                total += size


@dataclass(frozen=True)
class Text:
    """What a Python file mentions: modules that it imports, at any depth, and its short strings."""

    modules: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()


def read(path: str) -> Text:
    """Parse a Python file; empty for anything else."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About its syntax: Python shows them when it runs.
            nodes = list(ast.walk(ast.parse(file.read(_MOST_PARSED_BYTES))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return Text()
    modules = [
        name for node in nodes for name in _find_imports(node) if name and not name.startswith(".")
    ]
    words = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return Text(
        tuple(modules),
        frozenset(word.removeprefix("./") for word in words if len(word) < _LONGEST_NAME),
    )


def _find_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = ["", *(f".{alias.name}" for alias in node.names)]
        return [f"{node.module}{name}" for name in names] if node.level == 0 and node.module else []
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []
