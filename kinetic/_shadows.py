"""Project files with the name of a library's module (`secrets.py`, `types.py`, `click.py`): each
side imports its own.

In: the user's folders that come first on the import path. Out: an `__import__` that decides by who
imports.

Python takes the first module of a name on its path: with a `secrets.py` beside the script, the
standard library's `secrets` cannot be imported. A script that needs neither is not affected, and
must not be affected by kinetic either, which imports more than the script does. The rules:

1. If the folders hold no such file, nothing is changed and nothing is slower.
2. An import statement of the standard library, of an installed package or of kinetic gets the
   library's module.
3. An import statement anywhere else gets what plain Python gives it: the user's file.
4. A module that was imported before kinetic stays what it is, as in plain Python.
5. A lookup by name (`importlib.import_module`, modules in C, pickle) gives the user's module once
   the user's code has imported it, and the library's before; but unpickling on hosts always gives
   the user's, because that is what the caller pickled by name.

This module is imported before any other, so it may itself need only what is built in or frozen.
"""

# ruff: noqa: PTH100, PTH116, PTH118, PTH120 (pathlib imports what may be shadowed)

import _imp
import _thread
import builtins
import os
import sys
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OTHERS = {
    "cloudpickle",
    "click",
    "rich",
    "pygments",
    "markdown_it",
    "mdurl",
    "grpc",
    "google",
    "setproctitle",
}
"""What kinetic needs beyond the standard library, before the user's code runs."""
INDISPENSABLE = {
    *("cloudpickle", "collections", "copyreg", "dataclasses", "datetime", "enum", "functools"),
    *("importlib", "linecache", "threading", "traceback", "typing", "warnings", "weakref"),
}
"""Names whose library classes are in most pickles."""
_PICKLING = ("cloudpickle", "copyreg", "kinetic._pickling.", "pickle")
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def guard(entries: "Sequence[str] | None" = None) -> None:
    """Resolve the names in these folders by who imports them; by default those in folders that come
    before the standard library.

    Args:
        entries: the user's folders. By default modules that are imported already stay (rule 4).
    """
    folders = _before_the_library() if entries is None else list(entries)
    names = {name for folder in folders for name in _names_in(folder)} & sys.stdlib_module_names
    # Further down it is PYTHONPATH, by which packages are replaced.
    for folder in folders[: 1 if entries is None else None]:
        names |= _names_in(folder) & OTHERS if not _is_library(f"{folder}{os.sep}") else set()
    names = {
        name for name in names if name not in sys.builtin_module_names and not _imp.is_frozen(name)
    }
    if entries is None:
        names -= {
            name
            for name in names
            if name in sys.modules and _is_library(_file(vars(sys.modules[name])))
        }
    if names:
        _Shadows.install(
            names, folders, unpickled=set() if entries is None else names - INDISPENSABLE
        )


def _before_the_library() -> "list[str]":
    found = []
    for entry in sys.path:
        if f"{entry}{os.sep}" == _LIBRARY or entry.endswith(".zip"):
            break
        found.append(entry)
    return found


def _names_in(folder: str) -> "set[str]":
    """Modules and packages that can be imported from the folder."""
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return set()
    found = {name.partition(".")[0] for name in entries if name.endswith((".py", ".so"))}
    return found | {
        n
        for n in entries
        if n in OTHERS | sys.stdlib_module_names and _is_package(os.path.join(folder, n))
    }


def _is_package(folder: str) -> bool:
    try:
        os.stat(os.path.join(folder, "__init__.py"))
    except OSError:
        return False
    return True


def _file(names: "Mapping[str, Any]") -> str:
    file = names.get("__file__")
    return file if isinstance(file, str) else ""


def _is_library(file: str) -> bool:
    return file.startswith((_LIBRARY, _OWN)) or any(part in file for part in _INSTALLED)


def _library_asks() -> bool:
    """Whether the innermost frame outside the import machinery is a library's, and not one that
    unpickles."""
    frame: Any = sys._getframe(2)
    while frame is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    names = {} if frame is None else frame.f_globals
    return _is_library(_file(names)) and not str(names.get("__name__")).startswith(_PICKLING)


class _Shadows:
    """The names that a library and the user both have: a finder on `sys.meta_path`, and the
    function behind `__import__`."""

    current: "_Shadows | None" = None

    def __init__(self) -> None:
        self._original_import = builtins.__import__
        self._names: set[str] = set()
        self._unpickled: set[str] = set()
        self._folders: set[str] = set()
        self._families: dict[str, dict[str, ModuleType]] = {}
        self._loading: set[str] = set()
        self._renew_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """A thread of the process that was forked may hold the one before."""
        self._lock = _thread.RLock()

    @classmethod
    def install(
        cls, names: "Iterable[str]", folders: "Iterable[str]", *, unpickled: "Iterable[str]"
    ) -> None:
        """Add these names; those in `unpickled` mean the user's module when unpickling (rule 5)."""
        if cls.current is None:
            cls.current = shadows = cls()
            sys.meta_path.insert(0, shadows)
            builtins.__import__ = shadows.import_
        cls.current._add(set(names), set(folders), set(unpickled))

    def _add(self, names: "set[str]", folders: "set[str]", unpickled: "set[str]") -> None:
        self._folders |= folders
        self._unpickled |= unpickled
        for name in names:
            self._families.setdefault(name, {})
            if self._has_library(name):
                self._families[name] = self._take_family(name)
                sys.modules.update(self._families[name])
        self._names |= names

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: object = None
    ) -> "ModuleSpec | None":
        """Find the library's module when a library imports it, also from C, where no import
        statement is run."""
        if (
            path is not None
            or fullname not in self._names
            or not (fullname in self._loading or _library_asks())
        ):
            return None
        spec = PathFinder.find_spec(
            fullname, [entry for entry in sys.path if entry not in self._folders]
        )
        # Of another system, or left out of this Python.
        if spec is None and fullname in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return spec

    def import_(
        self,
        name: str,
        globals: "Mapping[str, Any] | None" = None,
        locals: "Mapping[str, Any] | None" = None,
        fromlist: "Sequence[str] | None" = (),
        level: int = 0,
    ) -> "ModuleType":
        """Take the place of `builtins.__import__`."""
        try:
            return self._import(name, globals, locals, fromlist, level)
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            # As the import system does with its own frames. `raise` adds none for this one.
            error.with_traceback(trace)  # Assigning fails where the class is frozen.
            raise

    def _import(
        self,
        name: str,
        globals: "Mapping[str, Any] | None",
        locals: "Mapping[str, Any] | None",
        fromlist: "Sequence[str] | None",
        level: int,
    ) -> "ModuleType":
        top = (name if not level else str((globals or {}).get("__package__") or "")).partition(".")[
            0
        ]
        is_statement = fromlist is None or (isinstance(fromlist, tuple) and bool(fromlist))
        if top not in self._names:
            return self._original_import(name, globals, locals, fromlist or (), level)
        if not is_statement:
            return self._look_up(top, name, globals or {}, locals, fromlist or (), level)
        if not _is_library(_file(globals or {})):
            return self._import_theirs(top, name, globals, locals, fromlist or (), level)
        family = self._families[top]
        found = family.get(name)
        if found is not None and not level and top not in self._loading:
            if not fromlist:
                return family[top]
            if all(hasattr(found, each) for each in fromlist):
                return found
        return self._import_ours(top, name, globals, locals, fromlist or (), level)

    def _look_up(
        self, top: str, name: str, globals: "Mapping[str, Any]", *how: "Any"
    ) -> "ModuleType":
        """Import by name, as pickle and modules in C do, which then read `sys.modules`."""
        if top in self._unpickled and str(globals.get("__name__")).startswith(_PICKLING):
            return self._import_theirs(top, name, globals, *how)
        if top not in sys.modules and _is_library(_file(globals)):
            return self._import_ours(top, name, globals, *how)
        return self._original_import(name, globals, *how)

    def _import_theirs(self, top: str, *how: "Any") -> "ModuleType":
        with self._lock:
            if top in self._loading or not self._has_library(top):
                return self._original_import(*how)
            ours = self._take_family(top)
            try:
                return self._original_import(*how)
            except BaseException:
                sys.modules.update(ours)
                raise
            finally:
                self._families[top] = ours

    def _import_ours(self, top: str, *how: "Any") -> "ModuleType":
        with self._lock:
            if top in self._loading:
                return self._original_import(*how)
            has_library = self._has_library(top)
            theirs = self._take_family(top)
            if has_library:
                self._families[top], theirs = theirs, {}
            sys.modules.update(self._families[top])
            self._loading.add(top)
            try:
                return self._original_import(*how)
            finally:
                self._loading.discard(top)
                self._families[top] = self._take_family(top)
                sys.modules.update(theirs or self._families[top])

    @staticmethod
    def _has_library(top: str) -> bool:
        """Whether it is the library's module that is loaded under the name."""
        found = sys.modules.get(top)
        return found is not None and (not _file(vars(found)) or _is_library(_file(vars(found))))

    @staticmethod
    def _take_family(top: str) -> "dict[str, ModuleType]":
        """Take a module and those below it from among the loaded ones."""
        below = [name for name in sys.modules if name == top or name.startswith(f"{top}.")]
        return {name: sys.modules.pop(name) for name in below}
