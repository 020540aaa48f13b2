"""Which large libraries a function uses: read from its code, which is not run.

In: a function. Out: modules that can be imported on its hosts before it begins. A guess: what it
misses is imported by the function itself, and what it adds costs time once.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from kinetic._pickling import origin

_MODULES = {
    "keras": "keras",
    "Checkpointer": "orbax.checkpoint",
    "orbax": "orbax.checkpoint",
    "flax": "flax",
    "equinox": "equinox",
}
"""Module by a name in code that uses it. They take long to import, and start neither a thread nor a
JAX backend when they are."""
_INSTALLED = ("site-packages", "dist-packages")


def list_libraries(func: Callable[..., Any]) -> tuple[str, ...]:
    """Return the modules that this function will probably import, of those that are worth importing
    once for all hosts."""
    while isinstance(func, functools.partial):
        func = func.func
    names = set(_names_in(func, set())) if isinstance(func, FunctionType) else set()
    found = dict.fromkeys(module for name, module in _MODULES.items() if name in names)
    return tuple(module for module in found if _is_installed(module.partition(".")[0]))


def _names_in(func: FunctionType, seen: set[int]) -> Iterator[str]:
    """The names that a function uses, also in functions of its module that it calls."""
    seen.add(id(func))
    for name in {name for code in origin.walk_code(func.__code__) for name in code.co_names}:
        yield name.partition(".")[0]
        called = func.__globals__.get(name)
        if (
            isinstance(called, FunctionType)
            and called.__globals__ is func.__globals__
            and id(called) not in seen
        ):
            yield from _names_in(called, seen)


def _is_installed(name: str) -> bool:
    """Whether this is an installed library, not a module of the user's with that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # `sys.modules` may hold None or anything else.
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(part in place for place in places for part in _INSTALLED)
