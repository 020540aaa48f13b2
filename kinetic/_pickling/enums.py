"""Enumerations of a script, made again from their members as they are here.

In: an enumeration, or a member. Out: what pickle needs to make it again.

cloudpickle knows names and values only: members that have more (aliases, composite flags,
attributes that `__init__` sets, a data type, a `__new__` that computes) would be others there.
"""

from __future__ import annotations

import copyreg
import enum
import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from kinetic._pickling import class_bodies, upstream

_MADE_ANEW = (
    *("_member_names_", "_member_map_", "_member_type_", "_value2member_map_"),
    *("_unhashable_values_", "_unhashable_values_map_", "_hashable_values_"),
)
_OF_ALL_MEMBERS = ("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_")
_State = tuple[Callable[[Any, Any], Any], Any, type, Mapping[str, Any]]


def reduce_class(cls: Any) -> Any:
    """Return how to make an enumeration again, or NotImplemented if its module is there."""
    if upstream.should_pickle_by_reference(cls):
        return NotImplemented
    members = cls.__members__
    attributes, slots = upstream.read_class_state(cls)
    attributes = attributes | class_bodies.list_repeated(cls)
    omitted = {*members, *_MADE_ANEW}
    state = {name: value for name, value in attributes.items() if name not in omitted}
    parts = {name: (_read_arguments(each), each._value_) for name, each in members.items()}
    of_members = {name: _read_attributes(each) for name, each in members.items()}
    body = {"__new__": make_member, "__init__": noop_init} | parts
    tracker = upstream.track_class(cls)
    return (
        upstream.make_enum,
        (cls.__bases__, cls.__name__, cls.__qualname__, body, cls.__module__, tracker, None),
        (upstream.set_class_state, (state, slots), type(cls), of_members),
        None,
        None,
        complete,
    )


def reduce_member(member: Any) -> Any:
    """Return how to find a member of an enumeration that is made again: by its name, because its
    value may be equal to no other. NotImplemented for all others."""
    kind = type(member)
    is_named = kind._member_map_.get(member._name_) is member
    is_usual = getattr(kind.__reduce_ex__, "__module__", None) == enum.__name__
    if not (is_named and is_usual) or upstream.should_pickle_by_reference(kind):
        return NotImplemented
    return operator.getitem, (kind, member._name_)


def _read_arguments(member: Any) -> tuple[Any, ...]:
    """Return what the data type needs to make a member: 3.0 for a `float` of this value."""
    kind = type(member)._member_type_
    try:
        make, args, *more = kind.__reduce_ex__(member, 2)
    except Exception:  # noqa: BLE001 - a class may refuse
        return ()
    if make is copyreg.__newobj__ and not any(more[1:]):  # type: ignore[attr-defined]
        return tuple(args[1:])
    if kind.__new__ is object.__new__ or isinstance(kind.__new__, FunctionType):
        return ()
    is_whole = all(each is None or type(each) is dict for each in more)
    return tuple(args) if make is type(member) and is_whole else (member._value_,)


def _read_attributes(member: Any) -> dict[str, Any]:
    """Return the attributes that a member has besides those that each has."""
    state: Any = object.__getstate__(member)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: value for part in parts if part for name, value in part.items()}
    return {name: value for name, value in attributes.items() if name not in _OF_ALL_MEMBERS}


def make_member(cls: Any, *parts: Any) -> Any:
    """Make a member with its value; stands for `__new__` while an enumeration is made."""
    args, value = parts if len(parts) == 2 else parts[0]  # Those of tuples come as one.
    member = cls._member_type_.__new__(cls, *args) if args else object.__new__(cls)
    member._value_ = value
    return member


def noop_init(*parts: object) -> None:
    """Stand for `__init__`: the attributes are set when the enumeration is there."""


def complete(cls: Any, state: _State) -> None:
    """Give an enumeration its state, and if it is made anew, its members theirs."""
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
