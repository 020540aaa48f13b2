"""Unpickling of a call on a host. The script's functions get the host's `__main__` as globals.

Code objects name files of the caller's machine. The names are changed to files of the host's tree,
so that breakpoints work and tracebacks show source lines.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import pickle
import struct
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO, NewType, NoReturn

from kinetic._core.tracebacks import hide_frames
from kinetic._pickling import upstream
from kinetic._pickling.origin import MAIN, map_path
from kinetic.errors import SetupFailed, UsageError


def _make_without_hooks(
    make: Callable[..., type], metaclass: Any, name: str, bases: tuple[type, ...], *rest: Any
) -> type:
    """Make an empty class without calling hooks of the script, such as `__init_subclass__`. The
    hooks ran on the caller, and the pickle has their effects."""
    if getattr(metaclass, "__module__", None) in MAIN:
        foreign = next(kind for kind in metaclass.__mro__ if kind.__module__ not in MAIN)
        kind, metaclass = (
            metaclass,
            lambda name, bases, fields: foreign.__new__(kind, name, bases, fields),
        )
    base: Any = bases[0] if bases and bases[0].__module__ in MAIN else None
    if base is None:
        return make(metaclass, name, bases, *rest)
    hook = vars(base).get("__init_subclass__")
    base.__init_subclass__ = classmethod(lambda cls: None)
    try:
        return make(metaclass, name, bases, *rest)
    finally:
        if hook is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = hook


def script_namespace(package: str | None, file: str | None) -> dict[str, Any]:
    """Return new globals for a script's functions. If `CallUnpickler` has an argument `main`, it
    uses that instead."""
    file_entry = {} if file is None else {"__file__": file}
    return {
        "__name__": "__main__",
        "__package__": package,
        "__builtins__": __builtins__,
    } | file_entry


def module_namespace(name: str) -> dict[str, Any]:
    """Return the globals of a module."""
    return vars(import_module(name))


def identity(obj: Any) -> Any:
    """Return the argument."""
    return obj


def fill_module(module: ModuleType, content: Mapping[str, Any]) -> None:
    """Set the content of a module in place: functions may already refer to its globals."""
    vars(module).update(content)


def import_module(name: str, *submodules: str) -> ModuleType:
    """Import a module by its full name, as pickle does, and the submodules that can be imported."""
    __import__(name)
    import_if_possible(*submodules)
    return sys.modules[name]


def import_if_possible(*modules: str) -> None:
    """Import modules that the function may not need; skip those that cannot be imported here."""
    for name in modules:
        with contextlib.suppress(Exception):
            import_module(name)


def make_descriptor(kind: Any, base: Any, *parts: Any) -> Any:
    """Return a descriptor of a script's own class, such as a subclass of `property`, without
    calling its constructor."""
    descriptor = base.__new__(kind)
    base.__init__(descriptor, *parts)
    return descriptor


def lru_cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Wrap a function by `functools.lru_cache` with these parameters; the cache is empty."""
    return functools.lru_cache(**parameters)(function)


def new_type(name: str, of: Any, module: str) -> Any:
    """Return a `typing.NewType` of a script."""
    make: Any = NewType
    new = make(name, of)
    new.__module__ = module
    return new


def type_alias(name: str, module: str, holder: list[Any]) -> Any:
    """Return the alias that `type name = …` makes. Its value is the first item of `holder`, which
    `fill_alias` adds later."""
    namespace: dict[str, Any] = {"__name__": module, "held": holder}
    exec(f"type {name} = held[0]", namespace)
    return namespace[name]


def fill_alias(alias: object, state: tuple[list[Any], Any]) -> None:
    """Set the value of a type alias."""
    holder, value = state
    holder.append(value)


def generic_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Return the alias that `type name[…] = …` makes."""
    make: Any = getattr(typing, "TypeAliasType", None)  # from Python 3.12 on
    return make(name, value, type_params=parameters)


def find_undecorated(module: str, qualname: str, depth: int) -> Any:
    """Return a module's function or class without its `depth` outermost decorators."""
    func = operator.attrgetter(qualname)(import_module(module))
    for _ in range(depth):
        func = func.__wrapped__
    return func


_CALLER_METHODS = ("run_async", "run_async_map", "with_options", "plan", "aio")


def strip_decorated(pick: Callable[[Any], Any], args: tuple[Any, ...]) -> Any:
    """Return the function that kinetic's decorator wraps. Methods that work only on the caller,
    such as `run_async`, raise an error that says so."""
    func = pick(*args)
    name = getattr(func, "__name__", "it")
    attributes = {method: functools.partial(_refuse, method, name) for method in _CALLER_METHODS}
    for attribute, value in (attributes | {"local": func}).items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(func, attribute, value)
    return func


def _refuse(method: str, name: str, *args: object, **kwargs: object) -> NoReturn:
    with hide_frames:
        raise UsageError(
            f"{name}.{method} was called inside a job, and a job cannot submit other jobs. Call "
            f"{name}(...) to run the function on this host."
        )


def write_memo(number: int) -> bytes:
    """Return a pickle that loads the first `number` objects of `CallUnpickler`'s `memo` into the
    unpickler's memo. To assign that memo does not work: CPython loses the content of a dict."""
    objects = (
        pickle.BININT + struct.pack("<i", ~index) + pickle.BINPERSID + pickle.MEMOIZE + pickle.POP
        for index in range(number)
    )
    return pickle.PROTO + b"\x05" + b"".join(objects) + pickle.NONE + pickle.STOP


class CallUnpickler(pickle.Unpickler):
    """An unpickler of calls.

    Args:
        file: The pickle.
        main: Globals for the script's functions, those of the host's `__main__`; None for a new
            dict.
        source_map: (folder on the caller, folder on this host): file names of code are moved
            from the first to the second.
        external: Objects that replace those left out of the pickle.
        memo: Objects to which the pickle refers as if it had loaded them. The pickle must begin
            with `write_memo` of their number.
    """

    def __init__(
        self,
        file: BinaryIO,
        main: dict[str, Any] | None = None,
        source_map: tuple[str, str] | None = None,
        external: Sequence[object] = (),
        memo: Sequence[object] = (),
    ) -> None:
        super().__init__(file)
        self._external = external
        self._memo = memo
        self._main = main
        self._source_map = source_map

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that the pickle names; pickle calls this."""
        value = super().find_class(module, name)
        if module == __name__ and name == "script_namespace" and self._main is not None:
            return self._namespace
        if not module.startswith("cloudpickle"):
            return value
        if name == upstream.MAKE_CLASS:
            return lambda *parts: self._bind_class(_make_without_hooks(value, *parts))
        if name == upstream.MAKE_ENUM:
            return lambda *parts: self._bind_class(value(*parts))
        if name == upstream.MAKE_FUNCTION:
            return lambda code, *parts: self._bind_function(value(code, *parts), code)
        if self._source_map and name == upstream.FIND_BUILTIN_TYPE:
            return lambda kind: self._make_code if kind == "CodeType" else value(kind)
        return value

    def _bind_class(self, cls: type) -> type:
        """Add a class of the script to the host's `__main__`, so that objects of this class in the
        result can be pickled."""
        if cls.__module__ in MAIN:
            self._bind_name(cls.__qualname__, cls)
        return cls

    def _bind_function(self, func: FunctionType, code: CodeType) -> FunctionType:
        if func.__globals__ is self._main and func.__name__ == code.co_name:
            self._bind_name(code.co_qualname, func)
        return func

    def _bind_name(self, name: str, value: object) -> None:
        if self._main is not None and name.isidentifier() and not hasattr(builtins, name):
            self._main.setdefault(name, value)

    def persistent_load(self, pid: Any) -> object:
        """Return the object that was left out of the pickle under this number."""
        if -len(self._memo) <= pid < 0:
            return self._memo[~pid]
        if not 0 <= pid < len(self._external):
            raise SetupFailed(
                f"The data of a kinetic.Data in the call (number {pid}) is missing on this host. "
                "Submit the job again."
            )
        return self._external[pid]

    def _namespace(self, package: str | None, file: str | None) -> dict[str, Any]:
        assert self._main is not None
        self._main["__package__"] = package
        if file is not None:
            self._main["__file__"] = map_path(file, self._source_map)
        return self._main

    def _make_code(self, *parts: Any) -> CodeType:
        code = CodeType(*parts)
        return code.replace(co_filename=map_path(code.co_filename, self._source_map))
