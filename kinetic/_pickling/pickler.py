"""Pickling of calls: cloudpickle, but without copies of objects that the host has itself.

cloudpickle sends an object by name only if its module has it under that name. This pickler avoids
further copies:

- The function under a decorator (`module.train` is a `RemoteCallable`, a jitted function, a cache)
is sent as a path.
- A closure from a module gets the globals of the host's module, not a copy of some of them.
- Functions of `__main__` share one namespace on the host, its `__main__`.
- `os.environ`, which may hold secrets, and the hidden generators of `random` and NumPy, whose
copies would draw the same numbers in each call, are replaced by the host's own.

Classes and functions of `__main__` are sent in parts. Nothing of a script runs again; `dump_setup`
writes their registrations with libraries.
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

from kinetic._pickling import enums, registries, unpickler, upstream
from kinetic._pickling.code_pickler import CodePickler, find_named, find_renamed, is_by_value
from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import (
    MOST_DECORATORS,
    find_wrapped,
    is_checked_by_jaxtyping,
    list_annotated,
    list_globals,
    list_imports,
    sets_globals,
)

_HOST_OBJECTS = (("os", "environ"), ("random", "_inst"), ("numpy.random.mtrand", "_rand"))
"""Module and name of objects that are replaced by the host's own."""


class _ScriptNamespace(dict[str, Any]):
    """Pickled in place of the globals of `__main__`."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        super().__init__(__name__="__main__")
        self._of = namespace

    def __reduce__(self) -> Any:
        return unpickler.script_namespace, (self._of.get("__package__"), self._of.get("__file__"))


class _ModuleNamespace(dict[str, Any]):
    """Pickled in place of the globals of a module that the host imports."""

    def __init__(self, module: str) -> None:
        super().__init__(__name__=module)

    def __reduce__(self) -> Any:
        return unpickler.module_namespace, (self["__name__"],)


class _EmptyCopy:
    """Pickled in place of a module that is sent by value; arrives as an empty module."""

    def __init__(self, module: ModuleType) -> None:
        names = ("__package__", "__path__", "__file__")
        self._named = {name: vars(module)[name] for name in names if name in vars(module)}
        self._name = module.__name__

    def __reduce__(self) -> Any:
        return upstream.make_module, (self._name, self._named)


class _CopiedNamespace(dict[str, Any]):
    """Pickled in place of the globals of a module that is sent by value, so that the module and its
    functions share one namespace on the host."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(__name__=module.__name__)
        self._copy = _EmptyCopy(module)

    def __reduce__(self) -> Any:
        return vars, (self._copy,)

    def reduce_module(self, module: ModuleType) -> Any:
        """Return the tuple that pickles the module with its content, as from `__reduce__`."""
        content = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return unpickler.identity, (self._copy,), content, None, None, unpickler.fill_module


class CallOnLoad:
    """Pickled as a call of a function, which runs when the pickle is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


class CallPickler(CodePickler):
    """Pickles calls.

    Args:
        file: The file to write to.
        namespace: Globals of the script.

    Attributes:
        external: Objects left out of the pickle; see `ExternalObjectPickler`.
    """

    external: tuple[object, ...] = ()
    sends_functions = True

    def __init__(self, file: BinaryIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        self._namespace = namespace
        self._imports = list_imports(namespace)
        self._host_names = {
            id(value): name
            for module, name in _HOST_OBJECTS
            if (value := getattr(sys.modules.get(module), name, None)) is not None
        }
        self.globals_ref[id(namespace)] = _ScriptNamespace(namespace)

    def reducer_override(self, obj: Any) -> Any:
        """Choose how an object is pickled; pickle calls this for all but the simplest objects."""
        kind = type(obj)
        if id(obj) in self._host_names:
            return self._host_names[id(obj)]
        if kind in self.plain_types:
            return NotImplemented
        if issubclass(kind, FunctionType | type):
            if upstream.should_pickle_by_reference(obj):
                return NotImplemented
            location = _locate(obj)
            if location is not None:
                return unpickler.find_undecorated, location
            if isinstance(obj, FunctionType) and (module := _find_needed_module(obj)) is not None:
                return self._reduce_in_module(obj, module)
            return super().reducer_override(obj)
        if issubclass(kind, ModuleType):
            if upstream.should_pickle_by_reference(obj):
                # The function may use submodules that the script imports as attributes.
                inside = f"{obj.__name__}."
                names = [n for n in self._imports if n.startswith(inside) and n in sys.modules]
                return unpickler.import_module, (obj.__name__, *names)
            return self._copy_namespace(obj).reduce_module(obj)
        return self.reduce_object(obj)

    def reduce_object(self, obj: Any) -> Any:
        """Return the tuple that pickles an object other than a function or class."""
        kind = type(obj)
        if issubclass(kind, enum.Enum):
            return enums.reduce_member(obj)
        if _is_global(obj):
            return obj.__qualname__
        if getattr(kind, "is_plain_in_jobs", False):
            return unpickler.strip_decorated, obj.__reduce__()
        if kind is getattr(sys.modules.get("wrapt"), "FunctionWrapper", None):
            parts = obj.__wrapped__, obj._self_wrapper, obj._self_enabled
            return operator.methodcaller("FunctionWrapper", *parts), (sys.modules["wrapt"],)
        if find_wrapped(obj) is not None and _is_made_of_arguments(kind):
            return object.__new__, (kind,), vars(obj)
        return super().reduce_object(obj)

    def dump_setup(
        self, modules: Sequence[str], settings: object, registered: Iterable[Any]
    ) -> None:
        """Write the setup that a host loads before each call.

        Args:
            modules: Names of modules to import.
            settings: Settings of libraries.
            registered: Classes and functions registered with libraries.
        """
        registrations = [
            CallOnLoad(registries.register, x, registries.describe(x)) for x in registered
        ]
        argv = CallOnLoad(setattr, sys, "argv", [*map(str, sys.argv)])  # Modules may read it.
        imports = CallOnLoad(unpickler.import_if_possible, *modules)
        self.dump(((argv, imports), settings, registrations))

    def dump_more(self, arguments: object, file: BinaryIO) -> CallPickler:
        """Write a second pickle to `file`, and return its pickler. Objects that this pickler has
        written are referred to, so the unpickler must load this pickler's output first. This
        pickler does not change: many second pickles can be made."""
        pickler = self._make_sibling(file)
        pickler.memo = self.memo
        pickler.globals_ref = dict(self.globals_ref)
        pickler.cells = dict(self.cells)
        pickler.dump(arguments)
        return pickler

    def _make_sibling(self, file: BinaryIO) -> CallPickler:
        return CallPickler(file, self._namespace)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Add the globals that cloudpickle misses: those that only a class body inside the function
        or an annotation in quotes names."""
        module = _find_module(func)
        if module is not None and is_by_value(module.__name__):
            self._copy_namespace(module)
        make, args, (attributes, slots), *rest = super()._dynamic_function_reduce(func)
        slots["__globals__"] = list_annotated(func) | list_globals(func) | slots["__globals__"]
        return make, args, (attributes, slots), *rest

    def _copy_namespace(self, module: ModuleType) -> Any:
        return self.globals_ref.setdefault(id(vars(module)), _CopiedNamespace(module))

    def _reduce_in_module(self, func: FunctionType, module: ModuleType) -> Any:
        # Replace the copy of some globals that an earlier function may have registered.
        if not isinstance(self.globals_ref.get(id(func.__globals__)), _ModuleNamespace):
            self.globals_ref[id(func.__globals__)] = _ModuleNamespace(module.__name__)
        make, args, (attributes, slots), *rest = self._dynamic_function_reduce(func)
        return make, args, (attributes, slots | {"__globals__": {}}), *rest


class ExternalObjectPickler(CallPickler):
    """Writes numbers in place of all objects of one class, which are sent separately. It is a
    separate class, because `persistent_id` costs time for every object.

    Args:
        file, namespace: See `CallPickler`.
        kind: The class.
        before: Objects that an earlier pickle has left out, by number.
    """

    def __init__(
        self,
        file: BinaryIO,
        namespace: dict[str, Any],
        kind: type,
        before: Sequence[object] = (),
    ) -> None:
        super().__init__(file, namespace)
        self._kind = kind
        self._number = {id(obj): number for number, obj in enumerate(before)}
        self._omitted = list(before)

    @property
    def external(self) -> tuple[object, ...]:  # type: ignore[override]
        """The objects that were left out, each once, by number."""
        return tuple(self._omitted)

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an object that is left out; None for all others."""
        if not issubclass(type(obj), self._kind):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self._omitted)
            self._omitted.append(obj)  # Also keeps its id from being reused.
        return self._number[id(obj)]

    def _make_sibling(self, file: BinaryIO) -> CallPickler:
        return ExternalObjectPickler(file, self._namespace, self._kind, self._omitted)


def make_pickler(
    file: BinaryIO, namespace: dict[str, Any], external: type | None = None
) -> CallPickler:
    """Return a pickler for a call; without `external`, a faster one that leaves nothing out."""
    if external is None:
        return CallPickler(file, namespace)
    return ExternalObjectPickler(file, namespace, external)


def _locate(obj: Any) -> tuple[str, str, int] | None:
    """Return the module and qualified name from which the host imports a function or class, and how
    many decorators it unwraps; None if the host cannot import it."""
    module = obj.__module__ or ""
    if module not in sys.modules or module in MAIN or is_by_value(module):
        return None
    named = find_named(module, obj.__qualname__)
    for depth in range(MOST_DECORATORS):
        if named is obj:
            return module, obj.__qualname__, depth
        named = find_wrapped(named)
        if named is None:
            break
    renamed = find_renamed(obj) if isinstance(obj, type) else None
    return None if renamed is None else (*renamed, 0)


def _is_global(obj: Any) -> bool:
    """True if an object that wraps a function, such as a jitted one, is found in its module under
    the function's name."""
    if find_wrapped(obj) is None:
        return False
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return False
    return module not in MAIN and not is_by_value(module) and find_named(module, qualname) is obj


def _is_made_of_arguments(kind: type) -> bool:
    """True if the class has its own `__new__` and pickle does not know its arguments, as for
    `jax.custom_vjp`."""
    methods = ("__reduce_ex__", "__reduce__", "__getstate__")
    return isinstance(kind.__new__, FunctionType) and all(
        getattr(kind, name) is getattr(object, name, None) for name in methods
    )


def _find_module(func: FunctionType) -> ModuleType | None:
    """Return the module whose globals the function has."""
    module = sys.modules.get(str(func.__globals__.get("__name__")))
    is_its = isinstance(module, ModuleType) and vars(module) is func.__globals__
    return module if is_its else None


def _find_needed_module(func: FunctionType) -> ModuleType | None:
    """Return the module whose globals the function needs, or None.

    A function needs its module if it sets globals, or uses one that is more than a name for an
    importable object. Any other function is rebuilt without its module, which may be slow to import
    on a host, or need something that only the caller has.
    """
    module = _find_module(func)
    # Users set `__module__` to "__main__" to have a function sent by value. If the function has
    # `__wrapped__`, a decorator may have set both.
    is_by_hand = func.__module__ in MAIN and "__wrapped__" not in vars(func)
    if module is None or is_by_hand or getattr(module, "__spec__", None) is None:
        return None
    if module.__name__ in MAIN or is_by_value(module.__name__) or is_checked_by_jaxtyping(func):
        return None
    plain = ModuleType | FunctionType | type | str | bytes | int | float | complex | None
    has_state = any(
        not isinstance(value, plain)
        and not (
            callable(value) and hasattr(value, "__module__") and hasattr(value, "__qualname__")
        )
        for value in list_globals(func).values()
    )
    return module if has_state or sets_globals(func) else None
