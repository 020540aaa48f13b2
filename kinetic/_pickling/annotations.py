"""Annotations of functions and classes, also of those that cannot be evaluated here."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

IS_LAZY = sys.version_info >= (3, 14)
"""Whether annotations are code that runs when somebody asks (PEP 649). It may name what is only
there for type checkers."""


def read_annotations(made: FunctionType | type) -> dict[str, Any]:
    """Return an object's own annotations by name; as text if one of them cannot be evaluated."""
    if not IS_LAZY:
        own = vars(made) if isinstance(made, type) else {"__annotations__": made.__annotations__}
        known: dict[str, Any] = own.get("__annotations__", {})
        return known
    from annotationlib import Format, get_annotations  # type: ignore[import-not-found,unused-ignore]

    for form in (Format.VALUE, Format.STRING):
        try:
            return dict(get_annotations(made, format=form))
        except Exception:  # noqa: BLE001 - it is the user's code
            continue
    return {}
