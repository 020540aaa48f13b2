"""Enumerations of a script, rebuilt from their members.

cloudpickle sends only names and values of members. That loses aliases, composite flags, attributes
set in `__init__`, data types, and the effects of a `__new__`.
"""

from __future__ import annotations

import copyreg
import enum
import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from kinetic._pickling import class_bodies, upstream

_DERIVED_ATTRIBUTES = (
    *("_member_names_", "_member_map_", "_member_type_", "_value2member_map_"),
    *("_unhashable_values_", "_unhashable_values_map_", "_hashable_values_"),
)
_MEMBER_ATTRIBUTES = ("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_")
_State = tuple[Callable[[Any, Any], Any], Any, type, Mapping[str, Any]]


def reduce_class(cls: Any) -> Any:
    """Return the tuple that pickles an enumeration; NotImplemented if the host can import it."""
    if upstream.should_pickle_by_reference(cls):
        return NotImplemented
    members = cls.__members__
    attributes, slots = upstream.read_class_state(cls)
    attributes = attributes | class_bodies.list_repeated(cls)
    omitted = {*members, *_DERIVED_ATTRIBUTES}
    state = {name: value for name, value in attributes.items() if name not in omitted}
    parts = {name: (_read_arguments(member), member._value_) for name, member in members.items()}
    attributes_of = {name: _read_attributes(member) for name, member in members.items()}
    body = {"__new__": make_member, "__init__": noop_init} | parts
    tracker = upstream.track_class(cls)
    return (
        upstream.make_enum,
        (cls.__bases__, cls.__name__, cls.__qualname__, body, cls.__module__, tracker, None),
        (upstream.set_class_state, (state, slots), type(cls), attributes_of),
        None,
        None,
        complete,
    )


def reduce_member(member: Any) -> Any:
    """Return the tuple that pickles a member by name, if its enumeration is sent by value; else
    NotImplemented. Not by value: a value such as NaN is not equal to itself."""
    kind = type(member)
    is_named = kind._member_map_.get(member._name_) is member
    is_usual = getattr(kind.__reduce_ex__, "__module__", None) == enum.__name__
    if not (is_named and is_usual) or upstream.should_pickle_by_reference(kind):
        return NotImplemented
    return operator.getitem, (kind, member._name_)


def _read_arguments(member: Any) -> tuple[Any, ...]:
    """Return the arguments that the data type needs to make a member, such as 3.0 for a `float`."""
    kind = type(member)._member_type_
    try:
        make, args, *more = kind.__reduce_ex__(member, 2)
    except Exception:  # noqa: BLE001 - a class may refuse
        return ()
    if make is copyreg.__newobj__ and not any(more[1:]):  # type: ignore[attr-defined]
        return tuple(args[1:])
    if kind.__new__ is object.__new__ or isinstance(kind.__new__, FunctionType):
        return ()
    is_plain = all(part is None or type(part) is dict for part in more)
    return tuple(args) if make is type(member) and is_plain else (member._value_,)


def _read_attributes(member: Any) -> dict[str, Any]:
    """Return a member's attributes, except those that `enum` sets on every member."""
    state: Any = object.__getstate__(member)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: value for part in parts if part for name, value in part.items()}
    return {name: value for name, value in attributes.items() if name not in _MEMBER_ATTRIBUTES}


def make_member(cls: Any, *parts: Any) -> Any:
    """Make a member from its value; replaces `__new__` while the enumeration is made."""
    args, value = parts if len(parts) == 2 else parts[0]  # Tuple types pass one argument.
    member = cls._member_type_.__new__(cls, *args) if args else object.__new__(cls)
    member._value_ = value
    return member


def noop_init(*parts: object) -> None:
    """Do nothing: replaces `__init__` while an enumeration is made; `complete` sets attributes."""


def complete(cls: Any, state: _State) -> None:
    """Set an enumeration's attributes and methods and, if it is new, those of its members."""
    set_state, own, metaclass, attributes = state
    if vars(cls).get("__init__") is noop_init:
        for name in ("__init__", "__new_member__", "_new_member_", "_use_args_"):
            type.__delattr__(cls, name)
        if type(cls) is not metaclass:
            cls.__class__ = metaclass
        for name, values in attributes.items():
            for attribute, value in values.items():
                object.__setattr__(cls._member_map_[name], attribute, value)
    set_state(cls, own)
