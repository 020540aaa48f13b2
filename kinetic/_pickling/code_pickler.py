"""How code is pickled by value: as cloudpickle does it, with the name of its file, the qualified
names of classes, and parts of classes that cloudpickle cannot send.

In: live objects. Out: a pickle. Tracebacks, debuggers and notebook cells need a file's name; from
version 3.1.3 on cloudpickle writes another in its place, so that pickles do not depend on where a
function was defined. By its qualified name a class is told from another one of its module.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import typing
import weakref
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO, ClassVar

import cloudpickle

from kinetic._pickling import class_bodies, enums, unpickler
from kinetic._pickling.annotations import CODE, IS_LAZY, read_annotations
from kinetic._pickling.origin import MAIN, list_closed_over

_FILE = 10
"""The place of `filename` among the arguments of `CodeType`, in Python 3.11 and later."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, (*parts[:_FILE], code.co_filename, *parts[_FILE + 1 :])


_CACHED = type(functools.cache(len))


def _reduce_type_parameter(made: Any) -> Any:
    is_there = made.__module__ not in MAIN and find_named(made.__module__, made.__name__) is made
    return made.__name__ if is_there else (type(made), (made.__name__,))


def _reduce_new_type(made: Any) -> Any:
    is_ours = made.__module__ in MAIN
    parts = made.__name__, made.__supertype__, made.__module__
    return (unpickler.new_type, parts) if is_ours else made.__reduce__()


def _reduce_alias(made: Any) -> Any:
    """Of `type Name = …` (PEP 695), which may name itself: its value comes after it."""
    if made.__module__ not in MAIN:
        return made.__reduce__()
    try:
        value = made.__value__
    except NameError:  # It is for type checkers alone.
        value = Any
    if made.__type_params__:
        return unpickler.generic_alias, (made.__name__, value, made.__type_params__)
    held: list[Any] = []
    parts = made.__name__, made.__module__, held
    return unpickler.type_alias, parts, (held, value), None, None, unpickler.fill_alias


class _Absent:
    """Stands for a class that this Python does not have."""


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    CodeType: _reduce_code,
    # Dataclasses know these two by identity.
    type(dataclasses.MISSING): lambda _: "MISSING",
    type(dataclasses.KW_ONLY): lambda _: "KW_ONLY",
    functools.cached_property: lambda found: (
        unpickler.cached_property,
        (found.func, found.attrname),
    ),  # has a lock
    _CACHED: lambda found: (
        unpickler.lru_cached,
        (found.__wrapped__, found.cache_parameters()),
    ),
    typing.NewType: _reduce_new_type,
    getattr(typing, "TypeAliasType", _Absent): _reduce_alias,
    typing.ParamSpec: _reduce_type_parameter,
    typing.TypeVarTuple: _reduce_type_parameter,
    weakref.WeakKeyDictionary: lambda found: (weakref.WeakKeyDictionary, (dict(found),)),
    weakref.WeakValueDictionary: lambda found: (weakref.WeakValueDictionary, (dict(found),)),
}


class CallOnLoad:
    """A function call that happens when it is unpickled."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._done = function, args

    def __reduce__(self) -> Any:
        return self._done


class Circular(Exception):
    """The definition of a class needs the class itself, which must be rebuilt from its parts."""

    def __init__(self, made: object) -> None:
        super().__init__()
        self.made = made


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file, and classes with their qualified names."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child(_REDUCERS)

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.cells: dict[int, tuple[CellType, CellType]] = {}
        """By the id of a closure's cell: it, and the empty one that stands for it."""
        self.carries_functions = False
        """Whether functions that register classes with JAX are sent with these."""
        self.has_carried = False
        self.sendable: dict[int, tuple[object, float]] = {}
        """By id, the size in bytes of what was tried, infinite if it cannot be sent."""

    def can_be_sent(self, value: object, *, at_most_bytes: int = sys.maxsize) -> bool:
        """Whether an object can be pickled, and is no larger than that; it is tried once."""
        if id(value) not in self.sendable:
            self.sendable[id(value)] = value, 0  # Until it is known: it may hold itself.
            file = BytesIO()
            trial = self._make_another(file)
            trial.sendable = self.sendable
            try:
                trial.dump(value)
            except Circular:
                pass
            except Exception:  # noqa: BLE001 - pickling runs the user's code
                self.sendable[id(value)] = value, math.inf
            else:
                self.sendable[id(value)] = value, file.tell()
        return self.sendable[id(value)][1] <= at_most_bytes

    def _make_another(self, file: BinaryIO) -> CodePickler:
        return type(self)(file)

    def reducer_override(self, obj: Any) -> Any:
        """Decide how an object is pickled."""
        if isinstance(obj, type) and (found := find_renamed(obj)) is not None:
            return unpickler.find_undecorated, (*found, 0)
        if type(obj) is _CACHED and find_named(str(obj.__module__), obj.__qualname__) is obj:
            return obj.__qualname__
        if holds_weakly(obj) and obj.__globals__.get("__name__", "").startswith("jaxtyping."):
            obj = vars(obj).get("__wrapped__", obj)
        if isinstance(obj, enum.Enum):
            return enums.reduce_member(obj)
        if isinstance(obj, enum.EnumMeta):
            return enums.reduce_class(obj, self.can_be_sent)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, arguments, *rest = reduced
            if make.__name__ == "_make_skeleton_class":
                metaclass, name, bases, fields, *more = arguments
                fields = {**fields, "__qualname__": obj.__qualname__}
                if class_bodies.is_struct(obj):
                    metaclass = class_bodies.find_struct_maker(obj)
                if class_bodies.is_registered(obj) and not self.is_registered_there(obj):
                    fields = class_bodies.make_registered_body(obj) | fields
                    rest = self._register_again(obj, *rest)
                if IS_LAZY:
                    rest = _annotate(obj, *rest)
                return make, (metaclass, name, bases, fields, *more), *rest
        return reduced

    def is_registered_there(self, made: type) -> bool:
        """Whether a class of the script is registered with JAX where it arrives: the caller has
        those that a host returns."""
        return find_named(made.__module__, made.__qualname__) is made

    def _register_again(self, made: type, state: Any, *rest: Any) -> list[Any]:
        """Send, with the state of a class, what registers it with JAX."""
        how = class_bodies.describe_registration(made, with_functions=self.carries_functions)
        if how is None:
            return [state, *rest]
        self.has_carried = True
        attributes, slots = state
        again = CallOnLoad(unpickler.register_pytree, (made, *how))
        return [(attributes, slots | {"registered": again}), *rest]

    def _function_getnewargs(self, func: FunctionType) -> Any:
        """Let functions share there what they share here (`nonlocal`): cloudpickle gives each its
        own cells. They are filled after the function, which may be in them, is made."""
        *parts, _ = super()._function_getnewargs(func)
        if func.__closure__ is None:
            return (*parts, None)
        return (
            *parts,
            tuple(self.cells.setdefault(id(c), (c, CellType()))[1] for c in func.__closure__),
        )

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Send annotations as they are known here: cloudpickle evaluates them."""
        code = getattr(func, CODE, None) if IS_LAZY else None
        if code is None:
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


def _annotate(made: type, state: tuple[dict[str, Any], Any], *rest: Any) -> Any:
    """Send a class's annotations, which cloudpickle leaves to the code that it leaves out."""
    attributes, slots = state
    kept = {name: value for name, value in attributes.items() if name != "__annotations_cache__"}
    if found := read_annotations(made):
        kept["__annotations__"] = found
    return (kept, slots), *rest


def holds_weakly(made: object) -> bool:
    """Whether a decorator has left weak references around a function, as jaxtyping does: such a
    closure cannot be sent, but its statement can, or the function in it."""
    held = list_closed_over(made).values() if type(made) is FunctionType else ()
    inner = [each for one in held for each in (one if type(one) is list else [one])]
    return any(isinstance(each, weakref.ReferenceType) for each in inner)


def find_renamed(obj: Any) -> tuple[str, str] | None:
    """Return module and name of a class that its module has under the last part of its name alone,
    as `jax.Array`, which calls itself jaxlib._jax.Array. A class that a function has made is none:
    the module of a host need not have it."""
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
    """Whether hosts do not have this module, or a package that it is in."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


def find_named(module: str, qualname: str) -> Any:
    """Return what a module has under a qualified name, without running code; None for nothing."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if isinstance(found, ModuleType | type) else None
    return found


class NamingPickler(CodePickler):
    """Names classes and functions of the script in place of sending them: the caller has them."""

    def reducer_override(self, obj: Any) -> Any:
        """Decide how an object is pickled."""
        is_code = isinstance(obj, type | FunctionType) and obj.__module__ in MAIN
        if is_code and find_named(obj.__module__, obj.__qualname__) is obj:
            return obj.__qualname__
        return super().reducer_override(obj)


def dump(value: object, file: BinaryIO) -> None:
    """Pickle a value into a file that can be sought. What of the script cannot be sent is named."""
    start = file.tell()
    try:
        CodePickler(file).dump(value)
    except MemoryError:  # Of a file in memory, nothing is left.
        raise
    except Exception:
        file.seek(start)
        file.truncate()
        with suppress(Exception):
            NamingPickler(file).dump(value)
            return
        raise
