"""Name the files of a project that hide modules of the standard library.

In: the import path. Out: a warning for each such file.

With a `secrets.py` beside the script, every library that imports `secrets` gets that file, and
fails with an error that does not name it. This module is imported before any other of kinetic, so
it uses only what the interpreter has loaded by then.
"""

# ruff: noqa: PTH100, PTH110, PTH118, PTH120 (pathlib imports what may be hidden)

import _imp
import _warnings
import os
import sys

_UNUSED_BY_LIBRARIES = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtle", "turtledemo"}
_LIBRARY = os.path.dirname(os.__file__)


def warn_of_hidden_modules() -> None:
    """Warn once of each file in a folder that comes before the standard library on the import path
    and has the name of one of its modules, unless that module is loaded already."""
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
                    f"{path} hides Python's own module {name!r} from every library, also on the "
                    "hosts of a job: rename it.",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _can_be_hidden(name: str) -> bool:
    loaded = getattr(sys.modules.get(name), "__file__", None) or ""
    is_found_first = name in sys.builtin_module_names or _imp.is_frozen(name)
    return not (is_found_first or name in _UNUSED_BY_LIBRARIES or loaded.startswith(_LIBRARY))
