"""Folders outside the project that the caller's interpreter also imports from: editable packages,
and the entries of PYTHONPATH.

In: site folders and their `.pth` files, the finders of build backends, sys.path, PYTHONPATH. Out:
`ImportFolder`, a folder that modules are imported from; `EditablePart`, the files to ship for it.

An editable installation is a line in a `.pth` file (setuptools' `develop` and src layouts,
hatchling, uv, Poetry, flit, maturin), or a finder that maps names to folders (setuptools,
`editables`). Packages that are built when they are imported (meson-python, scikit-build-core) are
not shipped.
"""

# ruff: noqa: PTH113, PTH118, PTH120, PTH206

from __future__ import annotations

import functools
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kinetic import version
from kinetic._core.values import dataclass
from kinetic._source.project import MARKERS, OWN_MARKER

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_HOST_PACKAGES = {
    *("click", "cloudpickle", "cryptography", "google", "grpc", "jax", "jaxlib", "kinetic"),
    *("markdown_it", "mdurl", "pygments", "rich", "setproctitle"),
}
"""Import names of packages that hosts have before the source tree is unpacked."""
_DESCRIBING = ("METADATA", "entry_points.txt", "top_level.txt")
_PACKAGE = os.path.realpath(os.path.dirname(version.__file__))


@dataclass(frozen=True)
class ImportFolder:
    """A folder from which modules are imported.

    Attributes:
        folder: its real path.
        names: the names that are imported from it; () for all.
    """

    folder: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class EditablePart:
    """A folder that is sent together with the project.

    Attributes:
        root: the folder of the package's own project, whose ignore files apply.
        only: paths in it that are shipped; None for all.
        places: folders in it that modules are imported from.
    """

    root: str
    only: tuple[str, ...] | None
    places: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """A package that is installed editable.

    Attributes:
        name: the normalized name.
        folder: its project's real path.
        requires: its dependencies, without those of extras.
    """

    name: str
    folder: str
    requires: tuple[str, ...] = ()


def packages(folders: Collection[str]) -> list[Package]:
    """Return the editable packages that are imported from these folders. `folders`: real paths."""
    from importlib import metadata  # Slow to import, and often not needed.

    imported = []
    for distribution in metadata.distributions():
        project = _editable_project(distribution.read_text("direct_url.json"))
        if not project:
            location = os.path.realpath(str(distribution.locate_file("")))
            project = location if location in folders else ""
        if (
            project
            and not _is_kinetic(project)
            and any(f"{folder}/".startswith(f"{project}/") for folder in folders)
        ):
            # Some build backends add `editables`, which only their finder needs.
            requires = (
                text
                for text in distribution.requires or ()
                if "extra ==" not in text and not text.startswith("editables")
            )
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            imported.append(Package(name, project, tuple(requires)))
    return imported


def _editable_project(text: str | None) -> str:
    """Return the folder in a `direct_url.json`; "" if the package is not installed editable."""
    from urllib.parse import unquote, urlsplit

    try:
        about = json.loads(text or "{}")
        if about["dir_info"]["editable"]:
            return os.path.realpath(unquote(urlsplit(about["url"]).path))
    except (ValueError, KeyError, TypeError):
        pass
    return ""


def _is_kinetic(folder: str) -> bool:
    return f"{folder}/kinetic" == _PACKAGE


def descriptions(folders: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the metadata files that hosts need for `importlib.metadata`, of packages that are
    imported from these folders: the folder, and the path of a file in a `.dist-info`."""
    for about, project in _list_editable():
        inside = [folder for folder in folders if f"{folder}/".startswith(f"{project}/")]
        if inside:
            files = (about.with_name(name) for name in _DESCRIBING)
            yield from ((min(inside), str(file)) for file in files if file.is_file())


def find_hooked(folders: Collection[str]) -> list[str]:
    """Return the names of editable packages that are imported from none of these folders, but
    through an import hook of their build backend."""
    return sorted(
        about.parent.name.partition("-")[0]
        for about, project in _list_editable()
        if not any(f"{folder}/".startswith(f"{project}/") for folder in folders)
        and not any(Path(project, name, "__init__.py").is_file() for name in _HOST_PACKAGES)
    )


def _list_editable() -> Iterator[tuple[Path, str]]:
    """Yield the `direct_url.json` and the folder of each editable package except kinetic."""
    for site_folder in _site_folders():
        for about in sorted(Path(site_folder).glob("*.dist-info/direct_url.json")):
            with suppress(OSError):
                project = _editable_project(about.read_text())
                if project and not _is_kinetic(project):
                    yield about, project


@functools.cache
def _site_folders() -> list[str]:
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return sorted(folders | ({site.getusersitepackages()} if site.ENABLE_USER_SITE else set()))


def pth_entries() -> tuple[str, ...]:
    """Return the folders that `.pth` files of this interpreter add to the import path.

    The files are read again only when one is added or removed, because the interpreter itself reads
    them only at its start.
    """
    stamps: list[tuple[str, int]] = []
    for folder in _site_folders():
        with suppress(OSError):
            stamps.append((folder, Path(folder).stat().st_mtime_ns))
    return _read_pth_files(tuple(stamps))


@functools.lru_cache(maxsize=8)
def _read_pth_files(stamps: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    folders: list[str] = []
    for folder, _ in stamps:
        with suppress(OSError):
            for pth in sorted(Path(folder).glob("*.pth")):
                lines = pth.read_text(encoding="utf-8-sig", errors="replace").splitlines()
                folders += [
                    os.path.join(folder, line.rstrip())
                    for line in lines
                    if line.strip() and not line.startswith(("#", "import ", "import\t"))
                ]
    return tuple(folders)


def find(search: Sequence[str], python_path: str, never: Collection[Path]) -> list[ImportFolder]:
    """Return the folders from which modules are imported, without those of the interpreter.

    Args:
        search: sys.path.
        python_path: the value of PYTHONPATH.
        never: real paths of folders that may hold anything: home, `/`, folders for temporary files.
    """
    named = [os.path.realpath(entry) for entry in python_path.split(os.pathsep) if entry]
    # As in sys.path.append("../shared"):
    named += [os.path.realpath(entry) for entry in search if ".." in Path(entry).parts]
    linked = [os.path.realpath(entry) for entry in pth_entries()]
    active = {os.path.realpath(entry) for entry in search if entry} if linked or named else set()
    by_folder: dict[str, set[str]] = {}
    for folder in linked:
        if folder in active and _is_source(folder, never):
            by_folder[folder] = set()
    for folder in named:
        # Folders that the system or an editor adds are not the caller's source.
        is_hidden = any(part.startswith(".") for part in folder.split(os.sep))
        is_own = not is_hidden and os.access(folder, os.W_OK)
        if folder in active and is_own and _is_source(folder, never):
            by_folder[folder] = set()
    whole = set(by_folder)
    for folder, name in _find_redirections():
        if folder not in whole and name not in _HOST_PACKAGES and _is_source(folder, never):
            by_folder.setdefault(folder, set()).add(name)
    return [ImportFolder(folder, tuple(sorted(names))) for folder, names in by_folder.items()]


def parts(places: Sequence[ImportFolder], never: Collection[Path]) -> list[EditablePart]:
    """Group these folders by the project that each belongs to, because the ignore files of that
    project apply. Return the part of each project to send."""
    by_root: dict[str, list[ImportFolder]] = {}
    for place in places:
        by_root.setdefault(_find_project(place.folder, never), []).append(place)
    editable_parts = []
    for root, inside in by_root.items():
        only: set[str] = set()
        for place in inside:
            rel = os.path.relpath(place.folder, root)
            only |= {os.path.normpath(os.path.join(rel, name)) for name in place.names or ("",)}
        shipped = None if "." in only else tuple(sorted(only))
        editable_parts.append(EditablePart(root, shipped, tuple(place.folder for place in inside)))
    return editable_parts


def _find_redirections() -> Iterator[tuple[str, str]]:
    """Yield (folder, name) for each module that an import hook finds in a folder."""
    for finder in list(sys.meta_path):
        module = sys.modules.get(str(getattr(finder, "__module__", "")))
        paths: dict[str, str] = {}
        for owner, name in (
            (module, "MAPPING"),
            (module, "_redirections"),
            (finder, "_redirections"),
        ):
            table = getattr(owner, name, None)
            if isinstance(table, Mapping):
                paths |= {str(key): str(value) for key, value in table.items()}
        for name, path in paths.items():
            stem = path.removesuffix(f"{os.sep}__init__.py").removesuffix(".py")
            folder, tail = stem, name.split(".")
            for part in reversed(tail):
                folder, last = os.path.split(folder)
                if last != part:
                    break
            else:
                is_module = not os.path.isdir(stem) and len(tail) == 1
                yield os.path.realpath(folder), f"{name}.py" if is_module else tail[0]


def interpreter_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules. If Python is installed below home, they could be
    taken for the user's."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return tuple(f"{os.path.realpath(prefix)}/lib/" for prefix in prefixes)


def _is_source(folder: str, never: Collection[Path]) -> bool:
    """True if a folder may hold the caller's own modules: neither installed packages nor packages
    that every host has, such as kinetic."""
    names = folder.split(os.sep)
    return (
        os.path.isdir(folder)
        and Path(folder) not in never
        and _INSTALLED.isdisjoint(names)
        and not f"{folder}/".startswith(interpreter_folders())
        and not _is_kinetic(folder)
        and not any(os.path.isfile(f"{folder}/{name}/__init__.py") for name in _HOST_PACKAGES)
    )


def _find_project(folder: str, never: Collection[Path]) -> str:
    """Return the nearest folder marked as a project, or else the folder itself."""
    for candidate in (Path(folder), *Path(folder).parents):
        if candidate in never:
            break
        if any((candidate / marker).exists() for marker in (*MARKERS, OWN_MARKER)):
            return str(candidate)
    return folder
