"""Folders beside the project that the caller's interpreter imports from as well: packages that are
installed editable, and what PYTHONPATH names.

In: site folders and their `.pth` files, the finders of build backends, sys.path, PYTHONPATH. Out:
`ImportFolder`, where modules are imported from; `EditablePart`, what is shipped for it.

An editable installation is a line in a `.pth` file (setuptools' `develop` and src layouts,
hatchling, uv, Poetry, flit, maturin), or a finder that leads from names to folders (setuptools,
`editables`). Finders that build on import (meson-python, scikit-build-core) come before any folder,
so their packages are imported from where they are.
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
_OF_HOSTS = {
    *("click", "cloudpickle", "cryptography", "google", "grpc", "jax", "jaxlib", "kinetic"),
    *("markdown_it", "mdurl", "pygments", "rich", "setproctitle"),
}
"""Hosts have these before anything is unpacked."""
_DESCRIBING = ("METADATA", "entry_points.txt", "top_level.txt")
_PACKAGE = os.path.realpath(os.path.dirname(version.__file__))


@dataclass(frozen=True)
class ImportFolder:
    """A folder from which modules are imported.

    Attributes:
        folder: its real path.
        names: what is imported from there, if not everything.
    """

    folder: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class EditablePart:
    """A folder that is shipped beside the project.

    Attributes:
        root: the folder of the package's own project, whose ignore files count.
        only: paths in it that are shipped, if not everything.
        places: folders in it from which modules are imported.
    """

    root: str
    only: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """A package that is installed editable.

    Attributes:
        name: as the package index has it.
        folder: its project's real path.
        requires: its dependencies, without those of extras.
    """

    name: str
    folder: str
    requires: tuple[str, ...] = ()


def packages(folders: Collection[str]) -> list[Package]:
    """Return the packages that are imported from these folders, which are real paths."""
    from importlib import metadata  # not needed for slices on this machine

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
            # Some build backends add what their finder needs.
            requires = (
                text
                for text in distribution.requires or ()
                if "extra ==" not in text and not text.startswith("editables")
            )
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            imported.append(Package(name, project, tuple(requires)))
    return imported


def _editable_project(text: str | None) -> str:
    """Return the folder that an installation's `direct_url.json` names; "" if it is not
    editable."""
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
    """Yield what `importlib.metadata` reads about packages that are imported from these folders:
    the folder, and a file of the package's `.dist-info`."""
    for about, project in _editable():
        inside = [each for each in folders if f"{each}/".startswith(f"{project}/")]
        if inside:
            files = (about.with_name(name) for name in _DESCRIBING)
            yield from ((min(inside), str(file)) for file in files if file.is_file())


def find_hooked(folders: Collection[str]) -> list[str]:
    """Return the packages that are installed editable, but imported from none of these folders:
    their build backend finds them by a hook of its own."""
    return sorted(
        about.parent.name.partition("-")[0]
        for about, project in _editable()
        if not any(f"{each}/".startswith(f"{project}/") for each in folders)
        and not any(Path(project, name, "__init__.py").is_file() for name in _OF_HOSTS)
    )


def _editable() -> Iterator[tuple[Path, str]]:
    """Yield the `direct_url.json` of each editable installation but kinetic's, and its folder."""
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

    Reads the files once, until one comes or goes: the interpreter itself reads them at its start.
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
    """Return where modules are imported from besides the interpreter's own folders.

    Args:
        search: sys.path.
        python_path: the variable.
        never: real paths of folders that hold anything: home, `/`, those for temporary files.
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
        # What a system or an editor adds is not the caller's work.
        is_hidden = any(part.startswith(".") for part in folder.split(os.sep))
        is_own = not is_hidden and os.access(folder, os.W_OK)
        if folder in active and is_own and _is_source(folder, never):
            by_folder[folder] = set()
    whole = set(by_folder)
    for folder, name in _find_redirections():
        if folder not in whole and name not in _OF_HOSTS and _is_source(folder, never):
            by_folder.setdefault(folder, set()).add(name)
    return [ImportFolder(folder, tuple(sorted(names))) for folder, names in by_folder.items()]


def parts(places: Sequence[ImportFolder], never: Collection[Path]) -> list[EditablePart]:
    """Return what is shipped for these places: one part for each project, in which ignore files
    are looked for."""
    by_root: dict[str, list[ImportFolder]] = {}
    for place in places:
        by_root.setdefault(_project_of(place.folder, never), []).append(place)
    editable_parts = []
    for root, inside in by_root.items():
        only: set[str] = set()
        for place in inside:
            rel = os.path.relpath(place.folder, root)
            only |= {os.path.normpath(os.path.join(rel, name)) for name in place.names or ("",)}
        shipped = () if "." in only else tuple(sorted(only))
        editable_parts.append(EditablePart(root, shipped, tuple(place.folder for place in inside)))
    return editable_parts


def _find_redirections() -> Iterator[tuple[str, str]]:
    """Yield what the finders of editable installations find: the folder, and the name in it that is
    imported."""
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


def _is_source(folder: str, never: Collection[Path]) -> bool:
    """Return whether a folder may hold modules of the caller's own; not where packages are
    installed, and not what hosts have by themselves."""
    parts_of = folder.split(os.sep)
    own = (os.path.realpath(f"{prefix}/lib") for prefix in (sys.prefix, sys.base_prefix))
    return (
        os.path.isdir(folder)
        and Path(folder) not in never
        and _INSTALLED.isdisjoint(parts_of)
        and not any(f"{folder}/".startswith(f"{each}/") for each in own)
        and not _is_kinetic(folder)
        and not any(os.path.isfile(f"{folder}/{name}/__init__.py") for name in _OF_HOSTS)
    )


def _project_of(folder: str, never: Collection[Path]) -> str:
    """Return the nearest folder that something marks as a project, or else the folder itself."""
    for candidate in (Path(folder), *Path(folder).parents):
        if candidate in never:
            break
        if any((candidate / marker).exists() for marker in (*MARKERS, OWN_MARKER)):
            return str(candidate)
    return folder
