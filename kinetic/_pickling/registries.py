"""Libraries' registries of classes and functions: JAX's pytrees, Keras's custom objects, Flax's
state dicts.

A class that a host rebuilds from its parts is not registered there. `describe` records how an
object is registered here, and `register` repeats that on the host. To support another library, add
a row to `_REGISTRIES`.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any

from kinetic._core.values import dataclass
from kinetic._pickling.uses import list_closed_over

Registration = tuple[str, tuple[Any, ...]]
"""Name of a registry, and the arguments of its `register` after the object."""


@dataclass(frozen=True)
class Registry:
    """The registry of a library.

    Attributes:
        list_objects: Lists all registered objects; none if the library is not imported.
        describe: Returns the arguments with which an object is registered. If its second argument
            is False, functions of the script cannot be sent, and the result is None if one is
            needed.
        register: Registers an object with these arguments.
    """

    list_objects: Callable[[], Iterable[Any]]
    describe: Callable[[Any, bool], tuple[Any, ...] | None]
    register: Callable[..., None]


def list_registered() -> list[Any]:
    """Return all objects that are registered in this process, each once."""
    registries = (registry.list_objects() for registry in _REGISTRIES.values())
    return list({id(obj): obj for obj in itertools.chain(*registries)}.values())


def describe(obj: Any, *, with_functions: bool = True) -> tuple[Registration, ...]:
    """Return the registrations of a class or function.

    Args:
        obj: The class or function.
        with_functions: Allow functions of the script in the result.
    """
    described = [
        (name, registry.describe(obj, with_functions))
        for name, registry in _REGISTRIES.items()
        if any(obj is other for other in registry.list_objects())
    ]
    return tuple((name, args) for name, args in described if args is not None)


def register(obj: Any, registrations: Iterable[Registration]) -> None:
    """Register an object with libraries that are installed here and do not know it yet."""
    for name, args in registrations:
        with suppress(ImportError):
            _REGISTRIES[name].register(obj, *args)


# -- JAX: the registry of `jax.tree_util` is in a private module -----------------------------------

_WITH_KEYS = "tree_flatten_with_keys"


def _read_pytrees() -> dict[type, Any]:
    pytrees: dict[type, Any] = getattr(sys.modules.get("jax._src.tree_util"), "_registry", {})
    return pytrees


def is_pytree(obj: type) -> bool:
    """True if JAX has a class registered as a pytree node."""
    return obj in _read_pytrees()


def _describe_pytree(obj: type, with_functions: bool) -> tuple[Any, ...] | None:
    """Return the name of the function of `jax.tree_util` that registers this class, and its
    arguments: field names or functions. A single string names a method of the class."""
    flatten, unflatten = _read_pytrees()[obj]
    variables = list_closed_over(flatten) if isinstance(flatten, FunctionType) else {}
    if variables.keys() >= {"data_fields", "meta_fields"}:
        data, meta = variables["data_fields"], variables["meta_fields"]
        fields = getattr(obj, "__dataclass_fields__", {})
        dropped = {name for name, field in fields.items() if field.init} - {*data, *meta}
        return "register_dataclass", data, meta, *([tuple(dropped)] if dropped else [])
    with_keys = variables.get("flatten_with_keys")
    flatten = None if with_keys else flatten
    if not with_keys and hasattr(obj, _WITH_KEYS):
        with_keys = operator.methodcaller(_WITH_KEYS)
    is_own = getattr(unflatten, "__self__", None) is obj
    is_plain = is_own and type(with_keys or flatten) is operator.methodcaller
    if not (with_functions or is_plain):
        return None
    unflatten = unflatten.__name__ if is_own else unflatten
    if with_keys:
        return "register_pytree_with_keys", with_keys, unflatten, flatten
    return "register_pytree_node", flatten, unflatten


def _register_pytree(obj: type, function: str, *args: Any) -> None:
    add = getattr(importlib.import_module("jax.tree_util"), function)
    if not is_pytree(obj):
        add(obj, *(_call_own(obj, arg) if isinstance(arg, str) else arg for arg in args))


def _call_own(obj: type, name: str) -> Callable[..., Any]:
    """Return a function that calls the class's method, which may be set after this call."""

    def call(*args: Any) -> Any:
        return getattr(obj, name)(*args)

    return call


# -- Keras -----------------------------------------------------------------------------------------


def _read_custom_objects() -> dict[str, Any]:
    read = getattr(sys.modules.get("keras.saving"), "get_custom_objects", dict)
    custom_objects: dict[str, Any] = read()
    return custom_objects


def _describe_custom_object(obj: Any, with_functions: bool) -> tuple[Any, ...]:
    return tuple(
        name for name, custom_object in _read_custom_objects().items() if custom_object is obj
    )


def _register_custom_object(obj: Any, *names: str) -> None:
    keras = importlib.import_module("keras")
    for registered in names:
        package, _, name = registered.rpartition(">")
        if _read_custom_objects().get(registered) is obj:
            continue
        if package:
            keras.saving.register_keras_serializable(package, name)(obj)
        else:
            _read_custom_objects()[name] = obj


# -- Flax: `flax.serialization`, for `flax.struct` and `to_state_dict` -----------------------------


def _read_state_dicts() -> dict[type, Any]:
    state_dicts: dict[type, Any] = getattr(
        sys.modules.get("flax.serialization"), "_STATE_DICT_REGISTRY", {}
    )
    return state_dicts


def _describe_state_dict(obj: type, with_functions: bool) -> tuple[Any, ...] | None:
    return tuple(_read_state_dicts()[obj]) if with_functions else None


def _register_state_dict(obj: type, *functions: Any) -> None:
    serialization = importlib.import_module("flax.serialization")
    if obj not in _read_state_dicts():
        serialization.register_serialization_state(obj, *functions)


_REGISTRIES = {
    "jax": Registry(_read_pytrees, _describe_pytree, _register_pytree),
    "keras": Registry(
        lambda: _read_custom_objects().values(), _describe_custom_object, _register_custom_object
    ),
    "flax": Registry(_read_state_dicts, _describe_state_dict, _register_state_dict),
}
