"""Checks of the functions that users decorate, and words for errors about them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

from kinetic.errors import UsageTypeError

_ELSEWHERE = dict.fromkeys(("map", "starmap"), "run_async_map(inputs) submits a job for each input")
_ELSEWHERE |= dict.fromkeys(("delay", "remote", "spawn", "submit"), "run_async(...) submits a job")
"""Advice for the names that other libraries give to the methods of a decorated function."""


def check_function(func: Any) -> None:
    """Refuse an object that cannot run as a function on a host.

    Raises:
        UsageTypeError: the object is wrapped in `functools.cache` or `lru_cache`, is not callable,
            or is a generator function.
    """
    if hasattr(func, "cache_clear") and hasattr(func, "cache_info"):
        raise UsageTypeError(
            "@kinetic.run cannot take a cached function, because the cache would stay on this "
            "machine. Put @lru_cache above @kinetic.run."
        )
    if not callable(func):
        raise UsageTypeError(f"@kinetic.run must decorate a function; got {func!r}.")
    body = (
        func
        if inspect.isroutine(func) or isinstance(func, functools.partial | type)
        else type(func).__call__
    )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise UsageTypeError(
            f"{name_of(func)} is a generator function, and a host cannot return a generator: "
            "return a list."
        )


def name_of(func: Any) -> str:
    """Return the display name of a function, method, partial or callable object."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, MethodType):
        func = func.__func__
    return str(getattr(func, "__qualname__", None) or type(func).__qualname__)


def instead_of(attribute: str) -> str:
    """Return advice, as the end of a sentence, on the replacement for a method that decorated
    functions lack."""
    return f"; {_ELSEWHERE[attribute]}" if attribute in _ELSEWHERE else ""


def wrong_keyword(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Return Python's error text for the first keyword that a function does not take; "" if it
    takes all. `Signature.bind` reports such a keyword only if no argument is missing."""
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
