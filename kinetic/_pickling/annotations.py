"""Annotations of functions and classes, also of those that cannot be evaluated here.

In: a function or a class. Out: its annotations by name. From Python 3.14 on they are code that runs
when somebody asks (PEP 649), and may name what is only there for type checkers, or comes later.
"""

from __future__ import annotations

import sys
import typing
from types import FunctionType
from typing import Any

CODE = "__annotate__"
"""The name of that code."""
IS_LAZY = sys.version_info >= (3, 14)


def read_annotations(made: FunctionType | type) -> dict[str, Any]:
    """Return what each annotation stands for; those that cannot be evaluated are text."""
    if not IS_LAZY:
        own = vars(made) if isinstance(made, type) else {"__annotations__": made.__annotations__}
        found: dict[str, Any] = own.get("__annotations__", {})
        return found
    from annotationlib import Format, get_annotations  # type: ignore[import-not-found,unused-ignore]

    try:
        found = get_annotations(made, format=Format.FORWARDREF)
        if any(map(_is_unknown, found.values())):
            text = get_annotations(made, format=Format.STRING)
            found = {name: text[name] if _is_unknown(of) else of for name, of in found.items()}
    except Exception:  # noqa: BLE001 - it is the user's code
        return {}
    return found


def list_annotated(cls: type) -> set[str] | None:
    """Return the names of the attributes that a class itself annotates; None if it says nothing."""
    if not IS_LAZY:
        found = vars(cls).get("__annotations__")
        return None if found is None else set(found)
    return set(read_annotations(cls)) or None


def _is_unknown(value: object) -> bool:
    """Whether there is an unresolved name in it, other than in text."""
    if isinstance(value, typing.ForwardRef):
        return getattr(value, "__owner__", None) is not None or not value.__forward_arg__
    return any(map(_is_unknown, typing.get_args(value)))
