"""The caller's files that a call sends: the project's folder, without what is left out.

In: the function, and the state of the process (cwd, home, sys.path, sys.modules). Out: `Project`,
`Bundle`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kinetic._core.values import dataclass
from kinetic._source import bundle, editable, outputs, project, standalone
from kinetic._source.bundle import Bundle
from kinetic._source.companions import Companions
from kinetic._source.project import MODULES, WORDS, Project

_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class SourceSettings:
    """Settings of the caller's machine that decide what is sent.

    Attributes:
        store: root of kinetic's own store, never source.
        cache_dir: the user's cache folder, never source.
        package_root: the folder to ship instead of the detected project.
        default_excludes: whether virtual environments, caches and the like are left out.
        temporary: folders for temporary files, never source.
        python_path: the interpreter's PYTHONPATH.
    """

    store: Path
    cache_dir: Path
    package_root: str | None = None
    default_excludes: bool = True
    temporary: tuple[Path, ...] = ()
    python_path: str = ""


def of(
    func: Callable[..., Any],
    settings: SourceSettings,
    *,
    data: Sequence[Path] = (),
    output_dir: str | None = None,
) -> tuple[Project, Bundle | None]:
    """List and hash the files that a call sends. Writes only a snapshot in the cache.

    Args:
        func: the function.
        settings: settings of the caller's machine.
        data: paths of declared data, which is sent separately.
        output_dir: the folder to which this call returns files.

    Raises:
        UsageError: the tree cannot be shipped.
    """
    cwd = project.current_folder()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    own = editable.interpreter_folders()
    tree = project.find_project(
        entry_dir(func, cwd),
        cwd=cwd,
        home=home,
        sys_path=[
            entry for entry in sys.path if not f"{os.path.realpath(entry or '.')}/".startswith(own)
        ],
        package_root=settings.package_root,
        temporary=settings.temporary,
    )
    if tree.root is None:
        return tree, None
    output_dirs = [] if output_dir is None or "://" in output_dir else [output_dir]
    exclude = _without_code(tree, [settings.store, settings.cache_dir, *data])
    also = _find_companions(
        tree, settings, home, [settings.store, settings.cache_dir, *data, *output_dirs]
    )
    is_project = tree.marked and not tree.shared
    packed = bundle.build(
        tree.root,
        exclude=exclude,
        outputs=_without_code(tree, output_dirs),
        default_excludes=settings.default_excludes,
        sparing=Path(os.path.realpath(home)).is_relative_to(tree.root),
        also=also,
        script=None if is_project else _find_script(func, tree, cwd),
        whole=not tree.shared,
        cache_dir=settings.cache_dir,
    )
    for folder in output_dirs:
        mixed = _warn_of_output(folder, tree)
        packed = dataclasses.replace(packed, warnings=(*packed.warnings, *mixed))
    return tree.rebase_below(packed.root, also.imported), packed


def _find_companions(
    tree: Project, settings: SourceSettings, home: Path, own: Sequence[str | Path]
) -> Companions:
    """Return the folders outside the project that the caller imports from. `own` are kinetic's
    folders and declared data, which are not source."""
    assert tree.root is not None
    shared = (home, Path(tree.root.anchor), *settings.temporary)
    never = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in shared))
    places = editable.find(sys.path, settings.python_path, never)
    if not places:
        return bundle.NOTHING
    ancestors = {
        str(folder)
        for place in places
        for folder in (Path(place.folder), *Path(place.folder).parents)
    }
    exclude = sorted({os.path.realpath(folder) for folder in own} - ancestors)
    return Companions(tuple(places), never, tuple(exclude))


def _find_script(func: Callable[..., Any], tree: Project, cwd: Path) -> tuple[str, ...]:
    """Return the paths to send for a function outside any project: its file, modules of its folder,
    and files that the program's command line names."""
    assert tree.root is not None
    module = sys.modules.get(_module_of(func))
    words = (part for word in getattr(module, WORDS, ()) for part in (word, word.partition("=")[2]))
    named = filter(os.path.isfile, (str(cwd / word) for word in words if word))
    files = [getattr(module, "__file__", None), *named, *_list_loaded_files()]
    inside = f"{str(tree.root).rstrip('/')}/"
    real = dict.fromkeys(os.path.realpath(file) for file in files if isinstance(file, str))
    own = [path.removeprefix(inside) for path in real if path.startswith(inside)]
    folders = {path: path.split("/")[:-1] for path in own}
    return standalone.list_paths(
        tree.root,
        # Installed packages and hidden folders are not the caller's source.
        [
            path
            for path, parts in folders.items()
            if not any(part in _INSTALLED or part.startswith(".") for part in parts)
        ],
        getattr(module, MODULES, ()),
        dict.fromkeys((tree.entry_rel, *tree.sys_path_rel)),
    )


def _list_loaded_files() -> list[str]:
    """Return the files of all loaded modules, without those of the interpreter and of kinetic."""
    own = editable.interpreter_folders()
    files: list[str] = []
    for name, module in list(sys.modules.items()):
        # Use vars(): reading an attribute would load a lazy module.
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if (
            isinstance(file, str)
            and not file.startswith(own)
            and name.partition(".")[0] != "kinetic"
        ):
            files.append(file)
    return files


def _warn_of_output(folder: str, tree: Project) -> tuple[str, ...]:
    """Warn if an output folder holds code, which later calls send, or files that are not sent."""
    assert tree.root is not None
    real = Path(os.path.realpath(folder))
    if real in _list_code_folders(tree):
        return (
            f"The output folder {folder} also holds code, so later calls send the files that jobs "
            "leave in it. Choose another folder.",
        )
    if not real.is_relative_to(tree.root) or not outputs.holds_files(folder):
        return ()
    return (
        f"The output folder {folder} holds files that may not come from jobs. Calls with this "
        "output folder do not send them, but other calls do. If the function needs them, choose "
        f"another output folder or write !{real.name}/ in .kineticignore; if they are results, "
        f"write {real.name}/ there.",
    )


def _without_code(tree: Project, places: Sequence[str | Path]) -> list[Path]:
    """Return the real paths of those folders that contain none of the project's code."""
    # Not strict: the store itself reports links that form a loop.
    real = dict.fromkeys(Path(os.path.realpath(place)) for place in places)
    code = _list_code_folders(tree)
    return [path for path in real if path not in code]


def _list_code_folders(tree: Project) -> set[Path]:
    """Return the folders above the function's file and above each entry of sys.path, up to the
    project's root."""
    assert tree.root is not None
    code = [tree.root / rel for rel in (tree.entry_rel, *tree.sys_path_rel)]
    return {
        folder
        for path in code
        for folder in (path, *path.parents)
        if folder.is_relative_to(tree.root)
    }


def entry_dir(func: Callable[..., Any], cwd: Path) -> Path:
    """Return the folder in which the search for the function's project begins: the folder of its
    file, or the working directory in a notebook.

    A function of an installed package, of a console script or of kinetic itself does not make its
    folder the project.
    """
    file = getattr(sys.modules.get(_module_of(func)), "__file__", None)
    # `python <(…)` reads its program from a pipe, whose folder is /dev/fd.
    if not isinstance(file, str) or file.startswith("<") or Path(file).is_fifo():
        return cwd
    folder = Path(file).resolve().parent
    foreign = [Path(__file__).resolve().parents[1], Path(os.__file__).resolve().parent]
    scripts = {Path(place, "bin").resolve() for place in (sys.prefix, sys.base_prefix)}
    if (
        _INSTALLED & set(folder.parts)
        or folder in scripts
        or any(folder.is_relative_to(f) for f in foreign)
    ):
        return cwd
    return folder if folder.is_dir() else cwd


def _module_of(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    module = getattr(func, "__module__", None) or type(func).__module__
    return module if isinstance(module, str) else "__main__"
