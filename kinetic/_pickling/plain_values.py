"""Plain values: scalars, arrays, what the standard library has for values, and groups of them.

In: the attribute of a class, and the expression that made it. Out: whether that may give another
value when it is evaluated again, as `uuid4()` and `rng.normal(size=2)` do.
"""

from __future__ import annotations

import ast
import collections
from typing import Any

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
