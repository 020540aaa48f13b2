"""Parsing a stored JSON document that may be damaged: pure.

In: bytes. Out: an object, or the one error for any damage.
"""

from __future__ import annotations

import json
from typing import Any

from kinetic.errors import CorruptRecord


def load(data: bytes) -> Any:
    """Return what the bytes hold.

    Raises:
        CorruptRecord: they are not JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"it is not JSON: {error}") from error


def parse(data: bytes) -> dict[str, Any]:
    """Return the object that the bytes hold.

    Raises:
        CorruptRecord: they are not JSON, nested too deeply, or not an object.
    """
    document = load(data)
    if not isinstance(document, dict):
        raise CorruptRecord("it is not a JSON object")
    return document
