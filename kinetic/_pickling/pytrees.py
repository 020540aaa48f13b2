"""Classes that JAX takes apart, made again from their parts: without more, JAX would take their
instances for leaves there, and say nothing.

In: a class, and what JAX's registry has of it. Out: the body that a library's metaclass or
`__init_subclass__` needs to register it again, or the call that does.
"""

from __future__ import annotations

import dataclasses
import sys
from types import FunctionType
from typing import Any

from kinetic._pickling.origin import MAIN, list_closed_over

_NOT_OF_LIBRARIES = (*MAIN, "abc", "enum", "typing")
_KEPT = (bool, int, str, type(None))
"""Of a field's metadata: whether it is static, for example."""


def is_registered(made: type) -> bool:
    """Whether somebody has registered a class with JAX, in whatever way."""
    return made in _registry("_registry")


def describe(made: type, *, with_functions: bool) -> tuple[Any, ...] | None:
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


def make_body(made: type) -> dict[str, Any]:
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
