"""Enumerations of a script, made again from their members as they are here.

In: an enumeration, or a member. Out: what pickle needs to make it again.

cloudpickle knows names and values only: members that have more (aliases, composite flags,
attributes of their own, a data type, a `__new__` that computes) would be others there.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from cloudpickle.cloudpickle import (
    _class_getstate,
    _class_setstate,
    _get_or_create_tracker_id,
    _make_skeleton_enum,
    _should_pickle_by_reference,
)

_MADE_ANEW = ("_member_names_", "_member_map_", "_member_type_", "_value2member_map_")
_UNHASHABLE = ("_unhashable_values_", "_unhashable_values_map_", "_hashable_values_")
_OF_MEMBERS = ("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_")
_FILLED = (list, dict, set, bytearray, collections.deque)
"""Types whose `__init__` fills them."""
_State = tuple[Callable[[Any, Any], Any], Any, type, Mapping[str, Any]]


def reduce_class(made: Any, can_be_sent: Callable[[object], bool]) -> Any:
    """Return how to make an enumeration again, or NotImplemented if its module is there. Attributes
    of members that cannot be sent are left out."""
    if _should_pickle_by_reference(made):
        return NotImplemented
    members = made.__members__
    leaving = {*members, *_MADE_ANEW, *_UNHASHABLE}
    attributes, slots = _class_getstate(made)
    kept = {name: value for name, value in attributes.items() if name not in leaving}
    parts = {name: (_arguments_of(each), each._value_) for name, each in members.items()}
    return (
        _make_skeleton_enum,
        (
            made.__bases__,
            made.__name__,
            made.__qualname__,
            {"__new__": make_member, "__init__": leave_member} | parts,
            made.__module__,
            _get_or_create_tracker_id(made),
            None,
        ),
        (
            _class_setstate,
            (kept, slots),
            type(made),
            {
                name: {k: v for k, v in _attributes_of(each).items() if can_be_sent(v)}
                for name, each in members.items()
            },
        ),
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
    if not (is_named and is_usual) or _should_pickle_by_reference(kind):
        return NotImplemented
    return operator.getitem, (kind, member._name_)


def _arguments_of(member: Any) -> tuple[Any, ...]:
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


def _attributes_of(member: Any) -> dict[str, Any]:
    """Return the attributes that a member has besides those that each has."""
    state: Any = object.__getstate__(member)
    parts = state if isinstance(state, tuple) else (state,)
    found = {name: value for each in parts if each for name, value in each.items()}
    return {name: value for name, value in found.items() if name not in _OF_MEMBERS}


def make_member(cls: Any, *given: Any) -> Any:
    """Make a member with its value; stands for `__new__` while an enumeration is made."""
    args, value = given if len(given) == 2 else given[0]  # Those of tuples come as one.
    made = cls._member_type_.__new__(cls, *args) if args else _find_bare_new(cls)(cls)
    if args and isinstance(made, _FILLED):
        cls._member_type_.__init__(made, *args)
    made._value_ = value
    return made


def _find_bare_new(cls: type) -> Any:
    """Return the `__new__` below those of the script."""
    found: Iterator[Any] = (base.__new__ for base in cls.__mro__)
    return next(each for each in found if not isinstance(each, FunctionType))


def leave_member(*given: object) -> None:
    """Stand for `__init__`: the attributes are set when the enumeration is there."""


def complete(made: Any, state: _State) -> None:
    """Give an enumeration its state, and if it is made anew, its members theirs."""
    set_state, own, metaclass, attributes = state
    if vars(made).get("__init__") is leave_member:
        for name in ("__init__", "__new_member__", "_new_member_", "_use_args_"):
            type.__delattr__(made, name)
        if type(made) is not metaclass:
            made.__class__ = metaclass
        for name, values in attributes.items():
            for attribute, value in values.items():
                object.__setattr__(made._member_map_[name], attribute, value)
    set_state(made, own)
