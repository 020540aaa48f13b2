"""What classes need in their bodies when they are made again from their parts, and cloudpickle sets
too late or leaves out: slots, what makes a `TypedDict`, the fields of a `msgspec.Struct`; and what
registers them with JAX, which would take their instances for leaves, and say nothing.

In: a class, and how cloudpickle would make it; what JAX's registry has of it. Out: how to make it
with these; the body that a library's metaclass or `__init_subclass__` needs to register it again,
or the call that does.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType
from typing import Any

from kinetic._pickling.annotations import list_annotated
from kinetic._pickling.origin import MAIN, list_closed_over

_NONE = object()
_NOT_OF_LIBRARIES = (*MAIN, "abc", "enum", "typing")
_KEPT = (bool, int, str, type(None))
"""Of a field's metadata: whether it is static, for example."""


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


def is_registered(made: type) -> bool:
    """Whether somebody has registered a class with JAX, in whatever way."""
    return made in _registry("_registry")


def describe_registration(made: type, *, with_functions: bool) -> tuple[Any, ...] | None:
    """Return the name of the function of JAX that registers a class as it is, and its arguments:
    names of fields, or functions; a name in place of a function is that of the class's own. None
    if that takes functions that are not wanted.

    Args:
        made: a registered class.
        with_functions: whether any function of the script may be among them.
    """
    flatten, unflatten = _registry("_registry")[made]
    fields = list_closed_over(flatten) if isinstance(flatten, FunctionType) else {}
    if fields.keys() >= {"data_fields", "meta_fields"}:
        return "register_dataclass", fields["data_fields"], fields["meta_fields"]
    is_own = getattr(unflatten, "__self__", None) is made
    if not (with_functions or (is_own and type(flatten).__name__ == "methodcaller")):
        return None
    again = unflatten.__name__ if is_own else unflatten
    keyed = _registry("_registry_with_keypaths").get(made)
    if keyed is not None:
        return "register_pytree_with_keys", keyed[0], again, flatten
    return "register_pytree_node", flatten, again


def make_registered_body(made: type) -> dict[str, Any]:
    """Return what a class of equinox or flax has to have when it is made again: it is registered
    then, by its fields, of which cloudpickle knows none yet. All other things are set later."""
    bases = (base for base in made.__mro__[1:-1] if "__init_subclass__" in vars(base))
    hooks = (*bases, *(() if type(made) is type else (type(made),)))
    fields = vars(made).get("__dataclass_fields__", {})
    own = [name for name in vars(made).get("__annotations__", fields) if name in fields]
    kinds = {name: _annotation_of(fields[name]) for name in own}
    if all(hook.__module__ in _NOT_OF_LIBRARIES for hook in hooks) or not any(kinds.values()):
        return {}
    annotations = {name: kind for name, kind in kinds.items() if kind is not None}
    return {name: _bare(fields[name]) for name in annotations} | {"__annotations__": annotations}


def _annotation_of(field: Any) -> Any:
    """Return an annotation that has the same meaning for a dataclass; None for a class variable."""
    kind = field._field_type.name
    if kind == "_FIELD_CLASSVAR":
        return None
    return dataclasses.InitVar[object] if kind == "_FIELD_INITVAR" else object


def _bare(field: Any) -> Any:
    """Return a field as its statement gave it, without values of the script: those may need the
    class."""
    given = {name: getattr(field, name) for name in ("init", "repr", "hash", "compare", "kw_only")}
    given["metadata"] = {k: v for k, v in field.metadata.items() if type(v) in _KEPT}
    missing = dataclasses.MISSING
    if field.default is not missing or field.default_factory is not missing:
        given["default"] = None
    return dataclasses.field(**given)


def _registry(name: str) -> dict[type, Any]:
    found: dict[type, Any] = getattr(sys.modules.get("jax._src.tree_util"), name, {})
    return found
