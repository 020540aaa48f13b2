"""Rebuild classes with the parts that cloudpickle omits or sets too late.

The parts are qualified names, slots, the base of a `TypedDict`, and registrations. `complete` adds
them to the tuple from which cloudpickle rebuilds a class.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from types import MemberDescriptorType
from typing import Any

from kinetic._pickling import registries
from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import HAS_LAZY_ANNOTATIONS, read_annotations

_NONE = object()
_PLAIN_MODULES = (*MAIN, "abc", "enum", "typing")
_SIMPLE_METADATA = (bool, int, str, type(None))
"""Types of values in a field's metadata that are sent, such as equinox's flag "static"."""
_METACLASS_ATTRIBUTES = {"__class__", "__name__", "__bases__", "__mro__"}
"""Names to set in the class body: `setattr(cls, name, …)` would change the class itself."""
_MADE_WITH_A_CLASS = (
    *("__dict__", "__weakref__", "__module__", "__slots__", "_abc_impl"),
    *("__annotate_func__", "__annotations_cache__"),  # since Python 3.14
)


def complete(
    cls: type, reduced: tuple[Any, ...], registrations: Sequence[registries.Registration]
) -> tuple[Any, ...]:
    """Add the missing parts to the tuple with which cloudpickle pickles a class.

    Args:
        cls: The class.
        reduced: cloudpickle's tuple, like the result of `__reduce__`.
        registrations: Registrations of the class with libraries.
    """
    make, (metaclass, name, bases, body, *more), (state, slots), items, pairs, set_state = reduced
    body = {**body, "__qualname__": cls.__qualname__}
    state = state | list_repeated(cls)
    if typing.is_typeddict(cls):
        bases = (typing.TypedDict,) if bases == (dict,) else bases
    elif "__slots__" in vars(cls) and typing.NamedTuple not in bases:
        # Slots must be in the class body; cloudpickle sets them on the finished class.
        body["__slots__"] = vars(cls)["__slots__"]
        state = {
            key: value
            for key, value in state.items()
            if not isinstance(value, MemberDescriptorType)
        }
    body |= {key: state.pop(key) for key in _METACLASS_ATTRIBUTES & state.keys()}
    if registries.is_pytree(cls):
        body = _make_registered_body(cls) | body
    if HAS_LAZY_ANNOTATIONS:
        state.pop("__annotations_cache__", None)
        state |= {"__annotations__": read_annotations(cls)}
    parts = (metaclass, name, bases, body, *more)
    if not registrations:
        return make, parts, (state, slots), items, pairs, set_state
    registered_state = set_state, (state, slots), registrations
    return make, parts, registered_state, items, pairs, set_registered_state


def set_registered_state(
    cls: type,
    registered_state: tuple[Callable[[Any, Any], object], Any, Sequence[registries.Registration]],
) -> None:
    """Set the state of a class, and register it with libraries."""
    set_state, state, registrations = registered_state
    set_state(cls, state)
    registries.register(cls, registrations)


def list_repeated(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are equal to a base class's: cloudpickle omits
    them."""
    return {
        name: value
        for name, value in vars(cls).items()
        if name not in _MADE_WITH_A_CLASS
        and any(vars(base).get(name, _NONE) is value for base in cls.__bases__)
    }


def _make_registered_body(cls: type) -> dict[str, Any]:
    """Return the fields to put into the class body for equinox or flax, which read them there;
    cloudpickle would set them on the finished class."""
    bases = (base for base in cls.__mro__[1:-1] if "__init_subclass__" in vars(base))
    hooks = (*bases, *(() if type(cls) is type else (type(cls),)))
    fields = vars(cls).get("__dataclass_fields__", {})
    own = [name for name in vars(cls).get("__annotations__", fields) if name in fields]
    kinds = {name: _simplify_annotation(fields[name]) for name in own}
    if all(hook.__module__ in _PLAIN_MODULES for hook in hooks) or not any(kinds.values()):
        return {}
    annotations = {name: kind for name, kind in kinds.items() if kind is not None}
    return {name: _strip_field(fields[name]) for name in annotations} | {
        "__annotations__": annotations
    }


def _simplify_annotation(field: Any) -> Any:
    """Return the annotation `object`; for an InitVar, `InitVar[object]`; for a ClassVar, None."""
    kind = field._field_type.name
    if kind == "_FIELD_CLASSVAR":
        return None
    return dataclasses.InitVar[object] if kind == "_FIELD_INITVAR" else object


def _strip_field(field: Any) -> Any:
    """Return a field with the same options, but None as default: to unpickle a value of the script,
    the class may be needed that is just being made."""
    options = {
        name: getattr(field, name) for name in ("init", "repr", "hash", "compare", "kw_only")
    }
    options["metadata"] = {k: v for k, v in field.metadata.items() if type(v) in _SIMPLE_METADATA}
    missing = dataclasses.MISSING
    if field.default is not missing or field.default_factory is not missing:
        options["default"] = None
    return dataclasses.field(**options)
