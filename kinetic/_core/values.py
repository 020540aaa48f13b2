"""Frozen values: `dataclass(frozen=True)` of the standard library, with classes that are quick to
make.

In: a class with annotated fields. Out: a frozen dataclass.

The standard library compiles six methods for each class, four of them for `frozen`, and a process
of a job makes fifty such classes before it can begin. Here only `__init__` is compiled; the other
methods are the same functions for all classes. `replace`, `fields`, `asdict` and type checkers see
a dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass

__all__ = ["dataclass"]

T = TypeVar("T")


def _frozen(*, frozen: bool, repr: bool = True) -> Callable[[type[T]], type[T]]:
    assert frozen, "values are frozen"

    def made(cls: type[T]) -> type[T]:
        own = {name for name in _METHODS if name in vars(cls)}
        kind: type[T] = dataclasses.dataclass(repr=False, eq=False)(cls)
        for name, method in _METHODS.items():
            if name not in own and (repr or name != "__repr__"):
                setattr(kind, name, method)
        return kind

    return made


def _compared(value: Any) -> tuple[Any, ...]:
    known = type(value).__dataclass_fields__.values()
    return tuple([getattr(value, field.name) for field in known if field.compare])


def _repr(self: Any) -> str:
    known = type(self).__dataclass_fields__.values()
    shown = [f"{field.name}={getattr(self, field.name)!r}" for field in known if field.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _setattr(self: Any, name: str, value: Any) -> None:
    """Take each field once, from `__init__`."""
    if name in self.__dict__ or name not in type(self).__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


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
    dataclass = _frozen
