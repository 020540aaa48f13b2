"""Warnings of project files that hide modules of the standard library.

With a `secrets.py` in the script's folder, every library that imports `secrets` gets that file, and
fails with an error that does not name it. This module is imported before all others of kinetic, so
it may import only modules that the interpreter has loaded already.
"""

# ruff: noqa: PTH100, PTH110, PTH118, PTH120 (pathlib imports modules that may be hidden)

import _imp
import _warnings
import os
import sys

_UNUSED_BY_LIBRARIES = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtle", "turtledemo"}
_LIBRARY = os.path.dirname(os.__file__)


def warn_of_hidden_modules() -> None:
    """Warn of each file or package that is imported instead of a module of the standard library,
    because its folder comes first on the import path. Modules that are loaded already are not
    affected."""
    for folder in sys.path:
        if folder == _LIBRARY or folder.endswith(".zip"):
            return
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            name, _, suffix = entry.partition(".")
            is_module = suffix == "py" or os.path.exists(os.path.join(folder, name, "__init__.py"))
            if name in sys.stdlib_module_names and is_module and _can_be_hidden(name):
                path = os.path.join(os.path.abspath(folder), entry)
                _warnings.warn(
                    f"{path} hides Python's own module {name!r} from all libraries, also on the "
                    "hosts of a job. Rename it.",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _can_be_hidden(name: str) -> bool:
    loaded = getattr(sys.modules.get(name), "__file__", None) or ""
    is_found_first = name in sys.builtin_module_names or _imp.is_frozen(name)
    return not (is_found_first or name in _UNUSED_BY_LIBRARIES or loaded.startswith(_LIBRARY))
