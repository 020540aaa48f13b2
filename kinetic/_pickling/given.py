"""What the statement of a class is given when it is executed again, instead of what it would find
or compute then: bases, if their names stand for other classes by now, and defaults of fields that
a library keeps where they cannot be set later (pydantic, msgspec). Only plain values are given:
scalars, arrays, what the standard library has for values, and groups of them.

In: a class and its statement. Out: these by name of the global that has them there, and a
statement that takes defaults from there; whether an expression may give another value when it is
evaluated again, as `uuid4()` and `rng.normal(size=2)` do.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kinetic._pickling import statements

_PREFIX = "_kinetic_default_"
_MAKE_FIELDS = ("field", "Field", "PrivateAttr")
_LITERALS = (type(None), bool, int, float, complex, str, bytes, list, dict, set, tuple)
_GROUPS = (
    list,
    dict,
    set,
    tuple,
    frozenset,
    collections.Counter,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)
_VALUES_OF = ("array", "datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid")
"""Modules, which are not imported for this; of `random` and NumPy some classes are none."""
_NAMED = (
    "random.Random",
    "numpy.ndarray",
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
)


def find_bases(made: type, node: statements.Made, namespace: Mapping[str, Any]) -> dict[str, type]:
    """Return the bases whose names stand for other classes by now."""
    nodes = getattr(node, "bases", ())
    if len(nodes) != len(made.__bases__):
        return {}  # It got others from a decorator, or from what stood there.
    named = {
        each.id: base
        for each, base in zip(nodes, made.__bases__, strict=True)
        if isinstance(each, ast.Name)
    }
    now = {name: namespace.get(name) for name in named}
    return {
        name: base
        for name, base in named.items()
        if isinstance(now[name], type) and now[name] not in made.__mro__
    }


def find_defaults(made: type, node: statements.Made) -> dict[str, Any]:
    """Return the plain defaults that the statement may compute anew."""
    in_body = _find_expressions(node)
    whole = statements.find_assignments(node)
    return {
        f"{_PREFIX}{name}": value
        for name, value, has_more in _list_kept(made)
        if name in in_body
        and may_differ(value, in_body[name])
        and not (has_more and in_body[name] is whole[name] and isinstance(whole[name], ast.Call))
    }


def put_defaults(text: str, given: Collection[str]) -> ast.Module:
    """Return the class in a text as one that takes defaults from these globals."""
    tree = ast.parse(text)
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef))
    places = {id(place): f"{_PREFIX}{name}" for name, place in _find_expressions(node).items()}

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            name = places.get(id(node))
            if name not in given:
                return self.generic_visit(node)
            return ast.copy_location(ast.Name(str(name), ast.Load()), node)

    Put().visit(node)
    return tree


def _list_kept(made: type) -> Iterator[tuple[str, Any, bool]]:
    """Yield the defaults of a class with their names, and whether their fields say more, as a
    function of the script may have made them say."""
    of = vars(made)
    fields = {**of.get("__pydantic_fields__", {}), **of.get("__private_attributes__", {})}
    for name, field in fields.items():
        told = set(getattr(field, "_attributes_set", ()))
        has_more = bool(getattr(field, "metadata", ())) or not told <= {"annotation", "default"}
        yield name, getattr(field, "default", None), has_more
    names, values = (getattr(made, f"__struct_{each}__", ()) for each in ("fields", "defaults"))
    for name, value in zip(names[len(names) - len(values) :], values, strict=True):
        yield name, value, False


def _find_expressions(node: statements.Made) -> dict[str, ast.expr]:
    """Return the expressions for defaults in the body of a class: of `Field(default=…)` the
    argument."""
    return {
        name: _find_argument(made_by) or made_by
        for name, made_by in statements.find_assignments(node).items()
    }


def _find_argument(made_by: ast.expr) -> ast.expr | None:
    if not isinstance(made_by, ast.Call) or statements.last_name(made_by.func) not in _MAKE_FIELDS:
        return None
    named = [each.value for each in made_by.keywords if each.arg == "default"]
    return next(iter([*named, *made_by.args]), None)


def may_differ(value: object, made_by: ast.expr) -> bool:
    """Whether an expression, evaluated again, may give another value than this plain one."""
    if type(value) not in _LITERALS:
        return is_plain(value)
    try:
        return bool(value != ast.literal_eval(made_by))
    except Exception:  # noqa: BLE001 - not a literal, or a comparison of arrays
        return is_plain(value)


def is_plain(value: Any, deepest: int = 4) -> bool:
    """Whether a value consists of scalars, arrays and the like."""
    kind = type(value)
    if kind in _GROUPS:
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        return deepest > 0 and all(is_plain(each, deepest - 1) for each in parts)
    module = kind.__module__.partition(".")[0]
    return kind in _SCALARS or module in _VALUES_OF or _is_of_arrays(value, module)


def _is_of_arrays(value: Any, module: str) -> bool:
    """Whether this is an array, one of its scalars, or what draws random ones. Arrays of objects
    are none, nor are those that JAX has only in part here, or no longer."""
    kind = type(value)
    if module in ("jax", "jaxlib"):
        is_array = kind.__name__ in ("ArrayImpl", "PRNGKeyArray")
        return is_array and value.is_fully_addressable and not value.is_deleted()
    is_scalar = any(
        f"{each.__module__}.{each.__name__}" == "numpy.generic" for each in kind.__mro__
    )
    is_named = is_scalar or f"{kind.__module__}.{kind.__name__}" in _NAMED
    return is_named and not getattr(getattr(value, "dtype", None), "hasobject", False)
