"""The script that a function comes from, and where an object has its name.

In: functions. Out: globals, classes, paths.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from kinetic._pickling.uses import unwrap

MAIN = ("__main__", "__mp_main__")
"""The script; the second is its name in a process that multiprocessing has spawned."""
_NAMESPACES: dict[int, dict[str, Any]] = {}
"""By id, the globals of the scripts that were seen."""


def map_path(file: str, source_map: tuple[str, str] | None) -> str:
    """Return the name of a file that lies in the second folder as it does in the first."""
    if source_map and file.startswith(source_map[0].rstrip("/") + "/"):
        return source_map[1].rstrip("/") + file[len(source_map[0].rstrip("/")) :]
    return file


def see(func: object) -> None:
    """Remember the globals of the function's script."""
    namespace = find_namespace(func)
    _NAMESPACES[id(namespace)] = namespace


def list_namespaces() -> list[dict[str, Any]]:
    """Return the globals of `__main__`, and of the scripts that were seen."""
    return [vars(sys.modules["__main__"]), *_NAMESPACES.values()]


def find_namespace(func: object) -> dict[str, Any]:
    """Return the globals of the script that a function comes from, or else of `__main__`. They are
    not always those of the module: with `python -m cProfile`, for example."""
    space = getattr(unwrap(func), "__globals__", None)
    if type(space) is dict and space.get("__name__") in MAIN:
        return space
    return vars(sys.modules["__main__"])


def find_class_of(obj: Any) -> type | None:
    """Return the class that has the object in a `classmethod`. Since Python 3.13 the object is not
    told which class it is called on: https://docs.python.org/3.13/library/functions.html#classmethod
    """
    owner: Any = sys.modules.get(obj.__module__)
    *parents, name = obj.__qualname__.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    method = vars(owner).get(name) if isinstance(owner, type) else None
    return owner if isinstance(method, classmethod) and method.__func__ is obj else None


def is_found(obj: Any) -> bool:
    """Whether the object is what its module has under its name, as pickle wants it of functions."""
    named: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        named = getattr(named, name, None)
    return named is obj


def is_cloudpickle(caller: FrameType) -> bool:
    """Whether an object is asked by cloudpickle how it is pickled: for a process that may lack the
    script, so that a name would not do."""
    return str(caller.f_globals.get("__name__")).startswith(("cloudpickle", __package__))
