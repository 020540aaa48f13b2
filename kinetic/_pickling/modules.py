"""The loaded modules that a host cannot import. Only these are pickled by value.

If a module were pickled by value although the host can import it, the host would have it twice: its
classes would not match in `isinstance` and `except`, and registries (JAX, Keras, an ABC) would know
only one of the two.

cloudpickle has one registry of modules per process. Several threads may register the same module,
so entries are counted, and the last thread removes them. The user's registrations stay.
"""

# ruff: noqa: PTH113, PTH116, PTH120

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any

from kinetic._core.values import dataclass
from kinetic._pickling.origin import MAIN
from kinetic._source import editable, manifest

_LOCK = threading.Lock()
_USES: Counter[str] = Counter()
_INSTALLED = ("/site-packages/", "/dist-packages/")
_UNEDITED: dict[str, tuple[object, os.stat_result]] = {}
"""Cache of modules that match their file, by path. The module's spec, which a reload replaces, and
the file's `stat` tell if an entry is still valid."""
_PYC_HEADER_BYTES = 16


@dataclass(frozen=True)
class Shipped:
    """Folders from which a host can import modules that are not installed.

    Attributes:
        root: The folder that is sent, or None.
        search: Folders at the start of the host's `sys.path`, in order, relative to the root; ""
            is the root.
        manifest: Manifest of the tree, as in `Bundle`.
        python_path: PYTHONPATH of the host's interpreter, with only the entries that are the same
            folders there as here.
    """

    root: Path | None = None
    search: tuple[str, ...] = ()
    manifest: bytes = b""
    python_path: str = ""


@dataclass(frozen=True)
class LoadedModules:
    """The caller's loaded modules, sorted by the way in which a host gets them.

    Attributes:
        by_value: Modules that the host cannot import.
        imported: Names of modules that the host imports from the tree.
        edited: Names of the imported modules whose file has changed since this process read it.
    """

    by_value: tuple[ModuleType, ...] = ()
    imported: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()

    def warn_of_edited(self) -> tuple[str, ...]:
        """Return a warning about modules that do not match their files."""
        if not self.edited:
            return ()
        names = f"{', '.join(self.edited)} {'has' if len(self.edited) == 1 else 'have'}"
        return (
            f"{names} changed since the import, and hosts import the file as it is now. Reload the "
            "module (importlib.reload, %autoreload) or restart this program.",
        )


def classify(shipped: Shipped) -> LoadedModules:
    """Find out which loaded modules a host can import."""
    uninstalled = list(_list_uninstalled())
    paths = _locate_in_tree(shipped, uninstalled)
    in_tree = manifest.files_among(shipped.manifest, paths.values()) if paths else set()
    by_value, edited, imported = [], [], []
    is_outside = functools.cache(lambda top: _is_outside_tree(top, shipped.python_path))
    for module, file in uninstalled:
        name = module.__name__
        if paths.get(name) in in_tree:
            imported.append(name)
            if _is_edited(module, file):
                edited.append(name)
        elif not is_outside(name.partition(".")[0]):
            by_value.append(module)
    return LoadedModules(tuple(by_value), tuple(imported), tuple(edited))


@contextmanager
def by_value(modules: Sequence[ModuleType], registry: Any) -> Iterator[None]:
    """Pickle these modules by value within the context. `registry` is the cloudpickle module."""
    ours: list[ModuleType] = []
    try:
        with _LOCK:
            theirs = registry.list_registry_pickle_by_value() - _USES.keys()
            for module in modules:
                if module.__name__ not in theirs:
                    registry.register_pickle_by_value(module)
                    _USES[module.__name__] += 1
                    ours.append(module)
        yield
    finally:
        with _LOCK:
            for module in ours:
                _unregister(module, registry)


def _list_uninstalled() -> Iterator[tuple[ModuleType, str]]:
    """Yield loaded modules that are not installed, each with its file, but never kinetic itself."""
    for name, module in list(sys.modules.items()):
        if name in MAIN or name.partition(".")[0] == "kinetic":
            continue
        if not isinstance(module, ModuleType) or type(module) is util._LazyModule:  # type: ignore[attr-defined]
            continue  # A lazy module: reading an attribute would load it.
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or module.__name__ != name:
            continue
        if not _is_installed_file(file):
            yield module, file


def _is_installed_file(file: str) -> bool:
    return file.startswith(_list_installed_folders()) or any(part in file for part in _INSTALLED)


@functools.cache
def _list_installed_folders() -> tuple[str, ...]:
    """Return the folders of this interpreter's installed packages."""
    return tuple(
        f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


def _locate_in_tree(shipped: Shipped, modules: Sequence[tuple[ModuleType, str]]) -> dict[str, str]:
    """Return the path of each module that a host imports from the sent files, by module name."""
    if shipped.root is None or not shipped.manifest:
        return {}
    real = functools.cache(os.path.realpath)  # Cached: called once per folder.
    root = real(str(shipped.root))
    entries = [(f"{entry}/" if entry else "") for entry in shipped.search]
    paths: dict[str, str] = {}
    for module, file in modules:
        name = module.__name__
        top = name.partition(".")[0]
        folder, _, base = file.rpartition("/")
        own = f"{real(folder)}/{base}"
        stem = name.replace(".", "/")
        inner = (
            f"{stem}/{base}" if base.startswith("__init__.") else f"{stem}{base[base.find('.') :]}"
        )
        for entry in entries:
            above, _, last = f"{root}/{entry}{inner}".rpartition("/")
            if f"{real(above)}/{last}" == own:
                # The host may already have loaded a standard module of this name.
                if top not in sys.stdlib_module_names:
                    is_inside = own.startswith(f"{root}/")
                    paths[name] = own[len(root) + 1 :] if is_inside else entry + inner
                break
            if _is_module(f"{root}/{entry}{top}"):
                break  # The host would import this module of the same name instead.
    return paths


def _is_module(stem: str) -> bool:
    return os.path.isfile(f"{stem}.py") or os.path.isfile(f"{stem}/__init__.py")


def _is_outside_tree(top: str, python_path: str) -> bool:
    """True if the host's interpreter can find the top-level module outside the sent files: through
    PYTHONPATH, a `.pth` file or an editable installation."""
    folders = (*python_path.split(os.pathsep), *editable.pth_entries())
    if any(_is_module(f"{os.path.realpath(folder)}/{top}") for folder in folders if folder):
        return True
    for finder in sys.meta_path:
        # Editable installations: all build backends put "editable" into these names.
        if "editable" in str(getattr(finder, "__module__", "")):
            with suppress(Exception):  # A finder is third-party code.
                if finder.find_spec(top, None) is not None:
                    return True
    return False


def _unregister(module: ModuleType, registry: Any) -> None:
    name = module.__name__
    _USES[name] -= 1
    if not _USES[name]:
        del _USES[name]
        with suppress(ValueError):  # The user unregistered it.
            registry.unregister_pickle_by_value(module)


def _is_edited(module: ModuleType, file: str) -> bool:
    """True if the file has changed since this module was imported or reloaded. False
    with %autoreload, which reloads changed modules itself."""
    if "IPython.extensions.autoreload" in sys.modules:
        return False
    spec = module.__spec__
    try:
        now = os.stat(file)
    except OSError:
        return False
    known_spec, before = _UNEDITED.get(file, (None, now))
    if spec is not None and known_spec is spec:
        return (before.st_mtime_ns, before.st_size) != (now.st_mtime_ns, now.st_size)
    if _is_newer_than_its_code(spec, now):
        return True
    _UNEDITED[file] = spec, now
    return False


def _is_newer_than_its_code(spec: machinery.ModuleSpec | None, source: os.stat_result) -> bool:
    """True if the module's cached byte code was compiled from an earlier content of the file."""
    if spec is None or type(spec.loader) is not machinery.SourceFileLoader or not spec.cached:
        return False
    if sys.dont_write_bytecode or not os.access(os.path.dirname(spec.cached), os.W_OK):
        return False
    try:
        with open(spec.cached, "rb") as cached:
            header = cached.read(_PYC_HEADER_BYTES)
    except OSError:
        return False
    numbers = (int(source.st_mtime), source.st_size)
    expected = b"".join((number & 0xFFFFFFFF).to_bytes(4, "little") for number in numbers)
    return header[:8] == util.MAGIC_NUMBER + bytes(4) and header[8:] != expected
