"""Pickling of code by value: like cloudpickle, plus file names and completed classes.

Tracebacks, debuggers and notebook cells need the name of a function's file. cloudpickle 3.1.3 and
later replace it, so that pickles do not depend on where a function was defined.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import typing
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO, ClassVar

import cloudpickle

from kinetic._pickling import class_bodies, enums, registries, unpickler
from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import HAS_LAZY_ANNOTATIONS, is_checked_by_jaxtyping, read_annotations

_FILE = 10
"""Position of `filename` among the arguments of `CodeType`, in Python 3.11 and later."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, (*parts[:_FILE], code.co_filename, *parts[_FILE + 1 :])


_CACHED = type(functools.cache(len))


class Unsuitable(Exception):
    """An object could be pickled but not unpickled. The message says why, and what to do."""


def _reduce_type_parameter(obj: Any) -> Any:
    is_of_module = obj.__module__ not in MAIN
    if is_of_module and find_named(obj.__module__, obj.__name__) is obj:
        return obj.__name__
    return type(obj), (obj.__name__,)


def _reduce_alias(obj: Any) -> Any:
    """Pickle the alias of a `type Name = …` statement (PEP 695). Its value is set once the alias
    exists, because the value may refer to the alias."""
    if obj.__module__ not in MAIN:
        return obj.__reduce__()
    try:
        value = obj.__value__
    except NameError:  # It uses a name that only type checkers import.
        value = Any
    if obj.__type_params__:
        return unpickler.generic_alias, (obj.__name__, value, obj.__type_params__)
    holder: list[Any] = []
    parts = obj.__name__, obj.__module__, holder
    return unpickler.type_alias, parts, (holder, value), None, None, unpickler.fill_alias


class _Absent:
    """Placeholder in `_REDUCERS` for a class that this version of Python lacks."""


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    CodeType: _reduce_code,
    # Dataclasses test for these two objects with `is`.
    type(dataclasses.MISSING): lambda _: "MISSING",
    type(dataclasses.KW_ONLY): lambda _: "KW_ONLY",
    functools.cached_property: lambda obj: (  # It holds a lock before Python 3.12.
        unpickler.make_descriptor,
        (functools.cached_property, functools.cached_property, obj.func),
        {"attrname": obj.attrname},
    ),
    _CACHED: lambda obj: (unpickler.lru_cached, (obj.__wrapped__, obj.cache_parameters())),
    typing.NewType: lambda obj: (
        (unpickler.new_type, (obj.__name__, obj.__supertype__, obj.__module__))
        if obj.__module__ in MAIN
        else obj.__reduce__()
    ),
    getattr(typing, "TypeAliasType", _Absent): _reduce_alias,
    typing.ParamSpec: _reduce_type_parameter,
    typing.TypeVarTuple: _reduce_type_parameter,
    weakref.WeakKeyDictionary: lambda obj: (weakref.WeakKeyDictionary, (dict(obj),)),
    weakref.WeakValueDictionary: lambda obj: (weakref.WeakValueDictionary, (dict(obj),)),
}


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file, and classes with everything they need.

    Attributes:
        sends_functions: True if a class's registration may include functions of the script.
    """

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child(_REDUCERS)
    sends_functions = False

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.plain_types: set[type] = set()  # Types that need no reducer of ours.
        self.cells: dict[int, tuple[CellType, CellType]] = {}
        """Cells of closures, by id, each with the empty cell that is pickled in its place."""

    def reducer_override(self, obj: Any) -> Any:
        """Choose how an object is pickled; pickle calls this."""
        if type(obj) in self.plain_types:
            return NotImplemented
        if isinstance(obj, type) and (name := find_renamed(obj)) is not None:
            return unpickler.find_undecorated, (*name, 0)
        if type(obj) is _CACHED and find_named(str(obj.__module__), obj.__qualname__) is obj:
            return obj.__qualname__
        if type(obj) is FunctionType and is_checked_by_jaxtyping(obj):
            obj = vars(obj).get("__wrapped__", obj)
        if isinstance(obj, enum.Enum):
            return enums.reduce_member(obj)
        if isinstance(obj, enum.EnumMeta):
            return enums.reduce_class(obj)
        if not issubclass(type(obj), FunctionType | type):
            return self.reduce_object(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            if type(obj).__name__ == "StructMeta" and type(obj).__module__.startswith("msgspec"):
                raise Unsuitable(
                    f"Hosts cannot rebuild the msgspec.Struct {obj.__name__} of a script: move it "
                    "into a module of the project."
                )
            return class_bodies.complete(obj, reduced, self.list_registrations(obj))
        return reduced

    def reduce_object(self, obj: Any) -> Any:
        """Return the tuple that pickles an object, as from `__reduce__`; else NotImplemented.

        Raises:
            Unsuitable: The object could not be unpickled.
        """
        kind: Any = type(obj)
        own = kind.__reduce_ex__, kind.__reduce__
        if own == (object.__reduce_ex__, object.__reduce__) and kind not in self.dispatch_table:
            for base in (property, classmethod, staticmethod):
                if issubclass(kind, base):
                    _, parts = self.dispatch_table[base](obj)
                    return unpickler.make_descriptor, (kind, base, *parts), vars(obj)
            _check_bare(obj)
        if not callable(obj):
            self.plain_types.add(kind)
        return NotImplemented

    def list_registrations(self, obj: type) -> tuple[registries.Registration, ...]:
        """Return the registrations to repeat when a class is unpickled. None are needed in a result
        if the class is found in its module: the caller has registered it already."""
        if find_named(obj.__module__, obj.__qualname__) is obj and not self.sends_functions:
            return ()
        return registries.describe(obj, with_functions=self.sends_functions)

    def _function_getnewargs(self, func: FunctionType) -> Any:
        """Keep the cells that several functions share (`nonlocal`); cloudpickle would give each
        function new ones. Cells are filled once all functions exist, because a cell may hold a
        function."""
        *parts, _ = super()._function_getnewargs(func)
        if func.__closure__ is None:
            return (*parts, None)
        return (
            *parts,
            tuple(self.cells.setdefault(id(c), (c, CellType()))[1] for c in func.__closure__),
        )

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Send annotations as `read_annotations` returns them; cloudpickle might fail on them."""
        if not HAS_LAZY_ANNOTATIONS or getattr(func, "__annotate__", None) is None:
            return super()._dynamic_function_reduce(func)
        bare = FunctionType(
            func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__
        )
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
            setattr(bare, name, getattr(func, name))
        vars(bare).update(vars(func))
        make, args, (attributes, slots), *rest = super()._dynamic_function_reduce(bare)
        slots["__annotations__"] = read_annotations(func)
        return make, args, (attributes, slots), *rest


def _check_bare(obj: Any) -> None:
    """Check that `__getattr__` works on an instance without attributes: unpickling makes such an
    instance first, and looks up its `__setstate__`.

    Raises:
        Unsuitable: `__getattr__` fails, so the object could not be unpickled.
    """
    kind: Any = type(obj)
    has_state = hasattr(kind, "__getattr__") and obj.__reduce_ex__(2)[2] is not None
    try:
        if has_state and kind.__new__ is object.__new__:
            getattr(object.__new__(kind), "__setstate__", None)
    except Exception as error:
        raise Unsuitable(
            f"Unpickling makes an empty {kind.__name__} first, on which its __getattr__ fails "
            f'({type(error).__name__}). Begin __getattr__ with `if name.startswith("__"): raise '
            f"AttributeError(name)`, or give {kind.__name__} a __reduce__."
        ) from error


def find_renamed(obj: Any) -> tuple[str, str] | None:
    """Return module and name of a class that its module has only under the last part of its
    qualified name, such as `jax.Array`. None for other classes, and for a class made by a
    function, which the host's module may lack."""
    name, module = obj.__qualname__.rpartition(".")[2], sys.modules.get(obj.__module__ or "")
    if (
        name == obj.__qualname__
        or "<locals>" in obj.__qualname__
        or obj.__module__ in MAIN
        or module is None
        or is_by_value(obj.__module__)
    ):
        return None
    return (obj.__module__, name) if vars(module).get(name) is obj else None


def is_by_value(module: str) -> bool:
    """True if a module, or a package that contains it, is registered for pickling by value."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


def find_named(module: str, qualname: str) -> Any:
    """Return the object that a module has under a qualified name, or None. Runs no code."""
    named: Any = sys.modules.get(module)
    for name in qualname.split("."):
        named = vars(named).get(name) if isinstance(named, ModuleType | type) else None
    return named


class NamingPickler(CodePickler):
    """Pickles results: classes and functions of the script by name, because the caller has it."""

    def reducer_override(self, obj: Any) -> Any:
        """Choose how an object is pickled; pickle calls this."""
        is_code = isinstance(obj, type | FunctionType) and obj.__module__ in MAIN
        if is_code and find_named(obj.__module__, obj.__qualname__) is obj:
            return obj.__qualname__
        return super().reducer_override(obj)


def dump(value: object, file: BinaryIO) -> None:
    """Pickle a value into a seekable file. If that fails, pickle the script's classes and functions
    by name instead of by value."""
    start = file.tell()
    try:
        CodePickler(file).dump(value)
    except MemoryError:  # The file may be in memory, and damaged.
        raise
    except Exception:
        file.seek(start)
        file.truncate()
        with suppress(Exception):
            NamingPickler(file).dump(value)
            return
        raise
