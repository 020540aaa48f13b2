"""What can be decorated, and how a function and its wrong uses are named.

In: functions. Out: names, the ends of sentences.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

from kinetic.errors import UsageTypeError

_ELSEWHERE = dict.fromkeys(("map", "starmap"), "run_async_map(inputs) submits a job for each input")
_ELSEWHERE |= dict.fromkeys(("delay", "remote", "spawn", "submit"), "run_async(...) submits a job")
"""What other libraries call the methods of a decorated function."""


def check_function(func: Any) -> None:
    """Refuse what cannot run on a host, with a message that says what to do instead."""
    if hasattr(func, "cache_clear") and hasattr(func, "cache_info"):
        raise UsageTypeError(
            "@kinetic.run cannot take a cached function: its cache stays here. Put @lru_cache "
            "above @kinetic.run."
        )
    if not callable(func):
        raise UsageTypeError(f"@kinetic.run takes a function; {func!r} cannot be called.")
    body = (
        func
        if inspect.isroutine(func) or isinstance(func, functools.partial | type)
        else type(func).__call__
    )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise UsageTypeError(
            f"{name_of(func)} is a generator, and a generator cannot be brought back: return a "
            "list."
        )


def name_of(func: Any) -> str:
    """Return the display name of a function, also of one without a name of its own."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, MethodType):
        func = func.__func__
    return str(getattr(func, "__qualname__", None) or type(func).__qualname__)


def instead_of(attribute: str) -> str:
    """Return the end of a sentence about a method that a decorated function does not have."""
    return f"; {_ELSEWHERE[attribute]}" if attribute in _ELSEWHERE else ""


def wrong_keyword(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Say which keyword the function does not take, as Python does, which `bind` only does once no
    argument is missing; "" if it takes them all."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
    ]
    wrong = next((name for name in kwargs if name not in names), None)
    if wrong is None:
        return ""
    import difflib  # Only an error needs it.

    near = difflib.get_close_matches(wrong, names, n=1)
    return f"got an unexpected keyword argument {wrong!r}" + (
        f" (did you mean {near[0]!r}?)" if near else ""
    )
