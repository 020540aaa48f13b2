"""Parse stored JSON documents. Any damage raises `CorruptRecord`."""

from __future__ import annotations

import json
from typing import Any

from kinetic.errors import CorruptRecord


def load(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        CorruptRecord: the bytes are not JSON, or are nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"the record is not JSON ({error})") from error


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CorruptRecord: the bytes are not JSON, are nested too deeply, or are not an object.
    """
    document = load(data)
    if not isinstance(document, dict):
        raise CorruptRecord("the record is not a JSON object")
    return document
