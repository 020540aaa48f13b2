"""The script that a function comes from, and the name under which an object can be imported."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from kinetic._pickling.uses import unwrap

MAIN = ("__main__", "__mp_main__")
"""Names of the script's module; `__mp_main__` in processes spawned by multiprocessing."""
_NAMESPACES: dict[int, dict[str, Any]] = {}
"""Globals of the scripts of decorated functions, by id."""


def map_path(file: str, source_map: tuple[str, str] | None) -> str:
    """Map a path below the first folder of `source_map` to the second; return others unchanged."""
    if source_map and file.startswith(source_map[0].rstrip("/") + "/"):
        return source_map[1].rstrip("/") + file[len(source_map[0].rstrip("/")) :]
    return file


def remember_namespace(func: object) -> None:
    """Remember the globals of the function's script, to rebuild results with its classes."""
    namespace = find_namespace(func)
    _NAMESPACES[id(namespace)] = namespace


def list_namespaces() -> list[dict[str, Any]]:
    """Return the globals of `__main__` and of all remembered scripts."""
    return [vars(sys.modules["__main__"]), *_NAMESPACES.values()]


def find_namespace(func: object) -> dict[str, Any]:
    """Return the globals of the script if it defines this function, else those of `__main__`. The
    two differ, for example, under `python -m cProfile`."""
    space = getattr(unwrap(func), "__globals__", None)
    if type(space) is dict and space.get("__name__") in MAIN:
        return space
    return vars(sys.modules["__main__"])


def find_class_of(obj: Any) -> type | None:
    """Return the class that has `obj` as a `classmethod`, or None. Since Python 3.13, a
    `classmethod` does not bind a wrapped object to the class:
    https://docs.python.org/3.13/library/functions.html#classmethod"""
    owner: Any = sys.modules.get(obj.__module__)
    *parents, name = obj.__qualname__.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    method = vars(owner).get(name) if isinstance(owner, type) else None
    return owner if isinstance(method, classmethod) and method.__func__ is obj else None


def is_importable(obj: Any) -> bool:
    """True if an object's module has it under its qualified name, so the name can be sent."""
    named: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        named = getattr(named, name, None)
    return named is obj


def is_cloudpickle(caller: FrameType) -> bool:
    """True if cloudpickle, or a pickler of this package, is calling, not plain pickle. Then do not
    send an object of a script by name: the process that unpickles may lack the script."""
    return str(caller.f_globals.get("__name__")).startswith(("cloudpickle", __package__))
