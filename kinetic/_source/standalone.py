"""Paths to send for a script outside any project, in a folder too large to be sent whole, such as
home or `/tmp`: the script, its modules, and files that its command line names.

In: the folder, files that belong to the script. Out: the paths to send.
"""

from __future__ import annotations

import modulefinder
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def list_paths(
    root: Path, files: Sequence[str], modules: Collection[str], folders: Collection[str]
) -> tuple[str, ...]:
    """Return the paths that belong to a script, relative to the folder: files and whole packages.

    Args:
        root: the folder, a real path.
        files: the script, named files and loaded modules, relative to the folder.
        modules: names of modules to find, as for `python -m`.
        folders: folders that modules are imported from, relative to the folder.
    """
    search = [str(root / folder) for folder in folders]
    scripts = [str(root / file) for file in files if file.endswith(".py")]
    for name in modules:
        path, origin = search, None
        for part in name.split("."):
            spec = PathFinder.find_spec(part, path)
            path = list((spec and spec.submodule_search_locations) or ())
            origin = spec and spec.origin
        if origin:
            scripts.append(origin)
    paths = {*files, *_list_imports(scripts, root, search)}
    return tuple(sorted({_find_package(root, path) for path in paths}))


class _Finder(modulefinder.ModuleFinder):
    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        """Find a module; turn any failure into ImportError, which the scan skips."""
        try:
            return super().find_module(name, path, parent)
        except Exception as error:
            raise ImportError(name) from error


def _list_imports(scripts: Sequence[str], root: Path, search: list[str]) -> Iterator[str]:
    """Yield the paths of the modules in the folder that scripts import, directly or indirectly."""
    for script in scripts:
        finder = _Finder(search)
        with suppress(Exception):  # If it is not Python, running it reports the error.
            finder.run_script(script)
        for module in finder.modules.values():
            path = Path(getattr(module, "__file__", None) or "")
            if path.is_relative_to(root) and path.is_file():
                yield path.relative_to(root).as_posix()


def _find_package(root: Path, path: str) -> str:
    """Return the outermost package that a file belongs to, or else the file. A whole package is
    sent, because its modules may import each other."""
    folder = Path(path).parent
    while (root / folder / "__init__.py").is_file() and folder != Path():
        path, folder = folder.as_posix(), folder.parent
    return path
