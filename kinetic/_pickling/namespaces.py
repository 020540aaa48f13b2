"""What stands for the globals of functions in a pickle.

In: live functions. Out: objects that are pickled in place of their globals: hosts have the
`__main__` of the call, and the modules that they import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from kinetic._pickling import unpickler, upstream
from kinetic._pickling.code_pickler import is_by_value
from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import list_globals, sets_globals


class ScriptNamespace(dict[str, Any]):
    """Stands for the globals of `__main__`."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        super().__init__(__name__="__main__")
        self._of = namespace

    def __reduce__(self) -> Any:
        return unpickler.script_namespace, (self._of.get("__package__"), self._of.get("__file__"))


class ModuleNamespace(dict[str, Any]):
    """Stands for the globals of a module that the host imports."""

    def __init__(self, module: str) -> None:
        super().__init__(__name__=module)

    def __reduce__(self) -> Any:
        return unpickler.module_namespace, (self["__name__"],)


class _EmptyCopy:
    """Stands for a module that is sent by value, without what is in it."""

    def __init__(self, module: ModuleType) -> None:
        names = ("__package__", "__path__", "__file__")
        self._named = {name: vars(module)[name] for name in names if name in vars(module)}
        self._name = module.__name__

    def __reduce__(self) -> Any:
        return upstream.make_module, (self._name, self._named)


class CopiedNamespace(dict[str, Any]):
    """Stands for the globals of a module that is sent by value, whether the module itself is sent
    or functions of it alone."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(__name__=module.__name__)
        self._copy = _EmptyCopy(module)

    def __reduce__(self) -> Any:
        return vars, (self._copy,)

    def reduce_module(self, module: ModuleType) -> Any:
        """Return how the module is pickled, with what is in it."""
        content = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return unpickler.identity, (self._copy,), content, None, None, unpickler.fill_module


def find_own(func: FunctionType) -> ModuleType | None:
    """Return the module whose globals the function has."""
    module = sys.modules.get(str(func.__globals__.get("__name__")))
    is_its = isinstance(module, ModuleType) and vars(module) is func.__globals__
    return module if is_its else None


def find_needed_module(func: FunctionType) -> ModuleType | None:
    """Return the module whose globals the function has, if the host can import it, and the function
    changes globals or uses one that is more than a name for something that is found elsewhere.

    Any other function is rebuilt without its module, which may take long to import on a host, or
    need something that only the caller has.
    """
    module = find_own(func)
    # A decorator may have copied `__module__` from a function of the script. Who has set it to
    # "__main__" by hand wants a copy.
    is_by_hand = func.__module__ in MAIN and "__wrapped__" not in vars(func)
    if module is None or is_by_hand or getattr(module, "__spec__", None) is None:
        return None
    if module.__name__ in MAIN or is_by_value(module.__name__):
        return None
    needs_it = sets_globals(func) or any(map(_is_state, list_globals(func).values()))
    return module if needs_it else None


def _is_state(value: object) -> bool:
    return not isinstance(
        value, ModuleType | FunctionType | type | str | bytes | int | float | complex | None
    ) and not (callable(value) and hasattr(value, "__module__") and hasattr(value, "__qualname__"))
