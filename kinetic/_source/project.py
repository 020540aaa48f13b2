"""The project of a function: the folder to ship, and the folders in it that hosts need.

In: the folder of the function's file, and the state of the process (cwd, home, sys.path). Out:
`Project`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic.errors import UsageError

MARKERS = ("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg", ".git")
WORDS, MODULES = "__kinetic_words__", "__kinetic_modules__"
"""Attributes of the module by which `kinetic run` represents a program: its command line, and the
names of modules that it runs."""
OWN_MARKER = ".kineticignore"
_INSTALLED = frozenset({"site-packages", "dist-packages", ".venv", "venv"})


@dataclass(frozen=True)
class Project:
    """A source tree and the relevant folders in it.

    Attributes:
        root: real path of the folder that is shipped; None if there is none.
        entry_rel: folder of the function's file, relative to the root; "" is the root.
        cwd_rel: the caller's working directory, relative to the root, or None when it lies outside.
        sys_path_rel: entries of the caller's sys.path inside the root, relative to it, in order; ""
            is the root.
        marked: True if a file marks the folder as a project; otherwise it may hold anything.
        shared: True if the folder is home, `/` or one for temporary files, none of which is ever a
            project.
        editable_rel: folders of editable packages that the caller imports from, relative to the
            root.
    """

    root: Path | None
    entry_rel: str = ""
    cwd_rel: str | None = None
    sys_path_rel: tuple[str, ...] = ()
    marked: bool = True
    shared: bool = False
    editable_rel: tuple[str, ...] = ()

    def rebase_below(self, top: Path, editable: Sequence[str]) -> Project:
        """Return the project with all its folders relative to one of the root's parents.

        Args:
            top: the new root.
            editable: real paths of editable packages that the caller imports from.
        """
        assert self.root is not None

        def rebase_path(rel: str) -> str:
            return _relative(Path(self.root or "", rel), top) or ""

        places = tuple(map(rebase_path, self.sys_path_rel))
        rels = (_relative(Path(folder), top) for folder in editable)
        return dataclasses.replace(
            self,
            root=top,
            entry_rel=rebase_path(self.entry_rel),
            cwd_rel=None if self.cwd_rel is None else rebase_path(self.cwd_rel),
            sys_path_rel=places,
            editable_rel=tuple(rel for rel in rels if rel is not None and rel not in places),
        )


def current_folder() -> Path:
    """Return the working directory.

    Raises:
        UsageError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError:
        raise UsageError(
            "The working directory no longer exists. Change to a folder that exists."
        ) from None


def find_project(
    entry: Path | None,
    *,
    cwd: Path,
    home: Path,
    sys_path: Sequence[str],
    package_root: str | None = None,
    temporary: Sequence[Path] = (),
) -> Project:
    """Find the project of a function.

    Args:
        entry: the function's file or its folder; None in a notebook or at a prompt, for the working
            directory.
        cwd: the working directory.
        home: the user's home; never a project, unless the search starts in it.
        sys_path: the interpreter's search path.
        package_root: the folder to ship instead of the detected project.
        temporary: shared folders for temporary files; like home, never a project.

    Raises:
        UsageError: `package_root` does not exist or does not contain the entry.
    """
    cwd = Path(os.path.realpath(cwd))
    place = Path(os.path.realpath(entry or cwd))
    start = place.parent if place.is_file() else place
    shared = {Path(os.path.realpath(path)) for path in (home, Path(home.anchor), *temporary)}
    root, marked = (
        (_from_setting(package_root, cwd, home, start), True)
        if package_root
        else _search(start, shared)
    )
    places = _search_path(sys_path, cwd, root)
    return Project(
        root,
        _relative(start, root) or "",
        _relative(cwd, root),
        places,
        marked,
        not package_root and root in shared,
    )


def _from_setting(package_root: str, cwd: Path, home: Path, start: Path) -> Path:
    text = (
        str(home) + package_root[1:]
        if package_root == "~" or package_root.startswith("~/")
        else package_root
    )
    root = Path(os.path.realpath(cwd / text))
    if not root.is_dir():
        raise UsageError(
            f"KINETIC_PACKAGE_ROOT is {package_root!r}, which is not a folder. Set it to the "
            "folder of your project."
        )
    if not start.is_relative_to(root):
        raise UsageError(
            f"KINETIC_PACKAGE_ROOT is {package_root!r}, but the function's file is in {start}, "
            "outside it. Set the variable to a folder that contains the file, or unset it."
        )
    return root


def _search(start: Path, shared: Collection[Path]) -> tuple[Path, bool]:
    """Return the project's folder, and True if it has a marker.

    Begin in the folder around the outermost package of `start`, and go up to the first folder with
    one of `MARKERS`; if there is none, up to the first with a `.kineticignore`. Stop below the
    folders `shared`, which belong to no single project. Without either, return the folder where the
    search began, and False."""
    outside = start
    while (
        (outside / "__init__.py").is_file()
        and outside.parent not in shared
        and outside not in shared
    ):
        outside = outside.parent
    folders = [outside]
    while folders[-1].parent not in {folders[-1], *shared}:
        folders.append(folders[-1].parent)
    for markers in (MARKERS, (OWN_MARKER,)):
        for folder in folders:
            if any((folder / marker).exists() for marker in markers):
                return folder, True
    return outside, False


def _relative(path: Path, root: Path) -> str | None:
    if not path.is_relative_to(root):
        return None
    relative = path.relative_to(root).as_posix()
    return "" if relative == "." else relative


def _search_path(sys_path: Sequence[str], cwd: Path, root: Path) -> tuple[str, ...]:
    folders: dict[str, None] = {}
    for entry in sys_path:
        place = Path(os.path.realpath(cwd / entry))
        relative = _relative(place, root)
        if relative is not None and not _INSTALLED & set(relative.split("/")) and place.is_dir():
            folders[relative] = None
    return tuple(folders)
