"""Unpickling of values from a host, using the classes that this process has.

A class that was sent by value comes back by value. cloudpickle would find the original class in
this process, but replace its methods by the host's, which use other globals. In another process
(`attach`) it would make a new class, which no `except` clause matches. This unpickler uses existing
classes, and existing functions with the same code, and does not change them.

Code of another version of Python is refused: running it would crash the process.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kinetic._pickling import origin, upstream
from kinetic._pickling.uses import list_globals

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class ResultUnpickler(pickle.Unpickler):
    """An unpickler that uses existing classes and does not change them.

    Args:
        data: The pickle.
        python: Version of Python that made the pickle, if not this one.
    """

    def __init__(self, data: bytes | memoryview, python: str = "") -> None:
        super().__init__(io.BytesIO(data))
        self._python = python
        self._unchanged: set[object] = set(upstream.tracked_classes)
        self._own = {
            upstream.MAKE_CLASS: self._skeleton_class,
            upstream.MAKE_ENUM: self._skeleton_enum,
            upstream.SET_CLASS_STATE: lambda cls, state: (
                cls if cls in self._unchanged else upstream.set_class_state(cls, state)
            ),
            upstream.MAKE_FUNCTION: self._make_function,
            upstream.SET_FUNCTION_STATE: self._set_function_state,
            upstream.FIND_BUILTIN_TYPE: self._builtin_type,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that the pickle names; pickle calls this."""
        if module.startswith("cloudpickle") and name in self._own:
            return self._own[name]
        value = super().find_class(module, name)
        is_array = name == "_reconstruct_array" and module.startswith("jax.")
        return self._keep_64_bits(value) if is_array else value

    def _keep_64_bits(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that rebuilds JAX arrays, so that 64-bit types stay. JAX would silently
        truncate them unless this process has enabled 64-bit types, as the host did."""
        try:
            enable = super().find_class("jax", "enable_x64")
        except AttributeError:  # Before JAX 0.8.
            enable = super().find_class("jax.experimental", "enable_x64")

        def rebuild(*parts: Any) -> Any:
            with enable(True):
                return make(*parts)

        return rebuild

    def _skeleton_class(self, *args: Any) -> Any:
        _, name, _, fields, tracker, _ = args
        qualname = fields.get("__qualname__", name)
        return self._find_defined(
            fields.get("__module__"), qualname, tracker
        ) or upstream.make_class(*args)

    def _skeleton_enum(self, *args: Any) -> Any:
        _, _, qualname, _, module, tracker, _ = args
        return self._find_defined(module, qualname, tracker) or upstream.make_enum(*args)

    def _find_defined(self, module: str | None, qualname: str, tracker: str | None) -> type | None:
        """Return the class that this process has sent under cloudpickle's id `tracker`, or else the
        module's class of this name, or None."""
        sent: type | None = upstream.classes_by_tracker.get(tracker)
        if sent is not None:
            return sent
        for cls in _find_all(module, qualname):
            if isinstance(cls, type):
                self._unchanged.add(cls)
                return cls
        return None

    def _make_function(
        self, code: CodeType, namespace: dict[str, Any], name: str, *rest: Any
    ) -> FunctionType:
        func: FunctionType
        for func in _find_all(namespace.get("__name__"), code.co_qualname):
            is_same = isinstance(func, FunctionType) and func.__code__ == code
            if is_same and _has_no_state(func, set()):
                self._unchanged.add(func)
                return func
        func = upstream.make_function(code, namespace, name, *rest)
        return func

    def _set_function_state(self, func: FunctionType, state: Any) -> None:
        if func in self._unchanged:
            func.__dict__.update(state[0])
        else:
            upstream.set_function_state(func, state)

    def _builtin_type(self, name: str) -> Any:
        if self._python and name == "CodeType":
            raise pickle.UnpicklingError(
                f"it holds code of Python {self._python} (a function, or a class of a script)"
            )
        return upstream.find_builtin_type(name)


def _has_no_state(func: FunctionType, visited: set[FunctionType]) -> bool:
    """True if neither a function nor any function of the script that it calls uses a value that a
    host may have changed: it has no closure, its globals are functions, modules and classes, and
    its defaults are plain values. `visited` has the functions that are checked already."""
    if func in visited:
        return True
    visited.add(func)
    defaults = (*(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).values())
    used = list_globals(func).values()
    functions = [value for value in used if isinstance(value, FunctionType)]
    return (
        func.__closure__ is None
        and all(isinstance(value, _PLAIN) for value in defaults)
        and all(isinstance(value, FunctionType | ModuleType | type) for value in used)
        and all(
            inner.__module__ not in origin.MAIN or _has_no_state(inner, visited)
            for inner in functions
        )
    )


def _find_all(module: str | None, qualname: str) -> Iterator[Any]:
    """Yield the objects of this name that a module defines. For `__main__`, search the globals of
    all remembered scripts."""
    if module not in sys.modules:
        return
    names = origin.MAIN if module in origin.MAIN else (module,)
    first, *inner = qualname.split(".")
    spaces = origin.list_namespaces() if module in origin.MAIN else [vars(sys.modules[module])]
    for space in spaces:
        named = space.get(first)
        for name in inner:
            named = getattr(named, name, None)
        if getattr(named, "__module__", None) in names:
            yield named
