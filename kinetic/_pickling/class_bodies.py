"""What classes need in their bodies when they are made again from their parts, and cloudpickle sets
too late or leaves out: slots, what makes a `TypedDict`, the fields of a `msgspec.Struct`.

In: a class, and how cloudpickle would make it. Out: how to make it with these.
"""

from __future__ import annotations

import enum
import functools
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

from kinetic._pickling.annotations import list_annotated

_NONE = object()


def complete(made: type, reduced: Any) -> Any:
    """Have a class rebuilt with its slots: cloudpickle makes it without, and sets the attribute
    later, when it has no effect. Have a `TypedDict("T", …)` rebuilt as one."""
    is_dict = typing.is_typeddict(made)
    has_slots = "__slots__" in vars(made) and not isinstance(made, enum.EnumMeta)
    if not (is_dict or has_slots) or is_struct(made) or not isinstance(reduced, tuple):
        return reduced
    make, (kind, name, bases, body, *more), (state, slots), *rest = reduced
    if is_dict:
        bases = (typing.TypedDict,) if bases == (dict,) else bases
        return make, (kind, name, bases, body, *more), (state, slots), *rest
    if typing.NamedTuple in bases:  # It has none of its own, and takes none.
        return reduced
    names = vars(made)["__slots__"]
    if isinstance(names, Iterator):  # Making the class has used it up.
        names = tuple(n for n, v in vars(made).items() if isinstance(v, MemberDescriptorType))
    body = body | {"__slots__": names}
    kept = {
        name: value for name, value in state.items() if not isinstance(value, MemberDescriptorType)
    }
    return make, (kind, name, bases, body, *more), (kept, slots), *rest


def is_struct(made: type) -> bool:
    """Whether this is a `msgspec.Struct`, which has its slots from its fields."""
    kind = type(made)
    return kind.__name__ == "StructMeta" and kind.__module__.startswith("msgspec")


def find_struct_maker(made: Any) -> Callable[..., type]:
    """Return what makes a struct in place of its metaclass: with its fields and options."""
    config = made.__struct_config__
    options = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    names, values = made.__struct_fields__, made.__struct_defaults__
    keys = dict(zip(names, made.__struct_encode_fields__, strict=True))
    defaults = dict(zip(names[len(names) - len(values) :], values, strict=True))
    own = [name for name in names if name in (list_annotated(made) or ())]
    options["kw_only"] = not set(own) & set(made.__match_args__)
    fields = {
        name: {"name": keys[name]} | _describe_default(defaults.get(name, _NONE)) for name in own
    }
    return functools.partial(make_struct, options, fields, has_hook="__post_init__" in vars(made))


def _describe_default(default: Any) -> dict[str, Any]:
    """Return a default as `msgspec.field` takes it."""
    kind = type(default).__name__
    if kind == "Factory" and hasattr(default, "factory"):
        return {"default_factory": default.factory}
    return {} if default is _NONE or kind == "NoDefaultType" else {"default": default}


def make_struct(
    options: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Any]],
    name: str,
    bases: tuple[type, ...],
    body: Mapping[str, Any],
    *,
    has_hook: bool,
) -> type:
    """Make a struct; its annotations are set later."""
    msgspec = importlib.import_module("msgspec")
    made_of = {each: msgspec.field(**field) for each, field in fields.items()}
    annotations = {"__annotations__": dict.fromkeys(fields, object)}
    hook = {"__post_init__": call_post_init} if has_hook else {}
    body = {**body, **annotations, **made_of, **hook}
    made: type = type(msgspec.Struct)(name, bases, body, **options)
    return made


def call_post_init(struct: Any) -> None:
    """Call the struct's own function: msgspec keeps the one that is there first."""
    type(struct).__post_init__(struct)
