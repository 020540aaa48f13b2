"""Default arguments and dataclass fields of a class that is executed again on a host: what its
statement computes (`hidden: int = HIDDEN`) may have changed in the script since.

In: a class. Out: its plain defaults, by function and parameter, and a class that has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

Defaults = dict[str, dict[str, Any]]
"""By function; of dataclass fields below ""."""


def find(made: type, is_sent: Callable[[str, object], bool]) -> Defaults:
    """Return the defaults of a class; `is_sent` says of a name and its value whether it is one that
    may differ."""
    fields = {
        name: field.default for name, field in vars(made).get("__dataclass_fields__", {}).items()
    }
    found = {"": fields} | {name: _defaults_of(each) for name, each in _functions_of(made)}
    chosen = {
        function: {name: value for name, value in values.items() if is_sent(name, value)}
        for function, values in found.items()
    }
    return {function: values for function, values in chosen.items() if values}


def restore(made: type, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a class the defaults that it had."""
    for name, field in vars(made).get("__dataclass_fields__", {}).items():
        field.default = defaults.get("", {}).get(name, field.default)
    for name, function in _functions_of(made):
        now = _defaults_of(function) | dict(defaults.get(name, {}))
        if function.__defaults__:
            positional = list(now)[: len(function.__defaults__)]
            function.__defaults__ = tuple(now[each] for each in positional)
        if function.__kwdefaults__:
            function.__kwdefaults__ = {each: now[each] for each in function.__kwdefaults__}


def _functions_of(made: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield its own functions, from under decorators; libraries hide `__init__` in descriptors."""
    for name, value in vars(made).items():
        bare = getattr(value, "__func__", value)
        if name == "__init__":
            with contextlib.suppress(Exception):  # A metaclass may refuse it.
                bare = getattr(made, name)
        if isinstance(bare, FunctionType):
            yield name, unwrap(bare)


def unwrap(function: FunctionType) -> FunctionType:
    """Return the function below decorators that have wrapped it, as far as those are functions."""
    seen = [function]
    inner = vars(function).get("__wrapped__")
    while isinstance(inner, FunctionType) and inner not in seen:
        seen.append(inner)
        inner = vars(inner).get("__wrapped__")
    return seen[-1]


def _defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return default values by parameter, positional ones first."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
