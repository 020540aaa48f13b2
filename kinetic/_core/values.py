"""A replacement for `dataclasses.dataclass(frozen=True)` that creates classes quickly.

The standard library compiles six methods for each class, four of them for `frozen`, and a process
of a job creates fifty such classes before it can start. This module compiles nothing: the methods
are the same functions for all classes. `replace`, `fields`, `asdict` and type checkers see a
dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass

__all__ = ["dataclass"]

T = TypeVar("T")


def _make_dataclass(*, frozen: bool, repr: bool = True) -> Callable[[type[T]], type[T]]:
    assert frozen, "values are frozen"

    def decorate(cls: type[T]) -> type[T]:
        own = {name for name in ("__init__", *_METHODS) if name in vars(cls)}
        kind: type[T] = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        if "__init__" not in own:
            setattr(kind, "__init__", _make_initializer(kind))  # noqa: B010 - mypy forbids the assignment
        for name, method in _METHODS.items():
            if name not in own and (repr or name != "__repr__"):
                setattr(kind, name, method)
        return kind

    return decorate


def _make_initializer(kind: type[Any]) -> Callable[..., None]:
    """Return an `__init__` that takes the fields of a class by position and by name."""
    fields, missing = dataclasses.fields(kind), dataclasses.MISSING
    names = tuple([field.name for field in fields])
    allowed, count = frozenset(names), len(names)
    defaults = {field.name: field.default for field in fields if field.default is not missing}
    call = f"{kind.__qualname__}.__init__()"
    factories = {
        field.name: field.default_factory
        for field in fields
        if field.default_factory is not missing
    }

    def init(self: Any, /, *args: Any, **named: Any) -> None:
        state = self.__dict__
        state.update(zip(names, args))  # noqa: B905 - counted below; this is called often
        if not named and len(args) == count:
            return
        state.update(named)
        if len(state) != len(args) + len(named) or not allowed.issuperset(named):
            raise TypeError(f"{call} {_describe_misfit(names, args, named)}")
        if len(state) == count:
            return
        for name in names:
            if name in state:
                continue
            if name in defaults:
                state[name] = defaults[name]
            elif name in factories:
                state[name] = factories[name]()
            else:
                raise TypeError(f"{call} missing 1 required positional argument: {name!r}")

    return init


def _describe_misfit(names: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return Python's error text for arguments that do not fit the fields."""
    if len(args) > len(names):
        return f"takes {len(names)} values, but {len(args)} were given"
    for name in named:
        if name not in names:
            return f"got an unexpected keyword argument {name!r}"
    twice = [name for name in names[: len(args)] if name in named]
    return f"got multiple values for argument {twice[0]!r}"


def _make_key(value: Any) -> tuple[Any, ...]:
    fields = type(value).__dataclass_fields__.values()
    return tuple([getattr(value, field.name) for field in fields if field.compare])


def _repr(self: Any) -> str:
    fields = type(self).__dataclass_fields__.values()
    parts = [f"{field.name}={getattr(self, field.name)!r}" for field in fields if field.repr]
    return f"{type(self).__qualname__}({', '.join(parts)})"


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _make_key(self) == _make_key(other)


def _hash(self: Any) -> int:
    return hash(_make_key(self))


def _setattr(_self: Any, name: str, _value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS: dict[str, Callable[..., Any]] = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
}

if not TYPE_CHECKING:
    dataclass = _make_dataclass
