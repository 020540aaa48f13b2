"""Decorated functions whose module was executed anew, by `%autoreload` or `importlib.reload`: a
name that was imported before still has the old object.

In: a decorated function. Out: the one that has taken its place.
"""

from __future__ import annotations

import sys
from typing import Any

from kinetic._pickling import origin


def find_execution(module_name: str) -> tuple[Any, Any]:
    """Return the module, and what is another object each time it is executed."""
    module = sys.modules.get(module_name)
    return module, getattr(module, "__spec__", None)


def find_successor(made: Any, made_in: tuple[Any, Any]) -> Any | None:
    """Return what the object's module has under its name now, if the module was executed again
    since it made the object; None if it was not, or has no such object any more."""
    module, execution = find_execution(made.__module__)
    if execution is made_in[1] or module is not made_in[0] or made.__module__ in origin.MAIN:
        return None
    *owners, name = made.__qualname__.split(".")
    for owner in owners:
        module = vars(module).get(owner)
        if not isinstance(module, type):
            return None
    found = vars(module).get(name)
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    is_alike = type(found) is type(made) and found.__qualname__ == made.__qualname__
    return found if is_alike and found.__module__ == made.__module__ else None


def find_namesakes(made: Any) -> list[Any]:
    """Return what else the module has of this kind and name: the function with other options, or
    another function that was defined before it."""
    name = made.__module__, made.__qualname__
    return [
        each
        for each in vars(sys.modules[made.__module__]).values()
        if type(each) is type(made)
        and each is not made
        and (each.__module__, each.__qualname__) == name
    ]
