"""Google's discovery documents: which requests there are, and what their bodies may have."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

DOCUMENTS = json.loads(lzma.decompress(Path(__file__).with_name("discovery.json.xz").read_bytes()))
COMMON = {"alt", "prettyPrint", "fields", "key"}
"""Query parameters of every method."""
_TYPES = {"string": str, "boolean": bool, "array": list, "object": dict, "number": (int, float)}


class Method:
    """A method of an API."""

    def __init__(self, api: str, row: dict[str, Any]) -> None:
        self.api, self.id = api, row["id"]
        self.http, self.query = row["httpMethod"], set(row["query"]) | COMMON
        self.request, self.response = row["request"], row["response"]
        # The path of serviceusage names its parts "{v1Id}/{v1Id1}".
        path = re.sub(r"\\\{\w+\\\}", "([^/]+)", re.escape(DOCUMENTS[api]["base"] + row["path"]))
        self.path = re.compile(f"/{path}")


METHODS = [Method(api, row) for api, d in DOCUMENTS.items() for row in d["methods"]]


def find_method(http: str, path: str) -> tuple[Method, tuple[str, ...]] | None:
    """Return the method of a request and the parts of its path."""
    for method in METHODS:
        matched = method.path.fullmatch(path)
        if matched and method.http == http:
            return method, matched.groups()
    return None


def find_problems(api: str, reference: str, value: Any, at: str = "") -> list[str]:
    """List what a schema does not allow in a document."""
    if not reference:
        return [f"{at}: no body is expected"] if value else []
    return _check(api, DOCUMENTS[api]["schemas"][reference], value, at or reference)


def _check(api: str, schema: dict[str, Any], value: Any, at: str) -> list[str]:
    if "$ref" in schema:
        return find_problems(api, schema["$ref"], value, at)
    kind = schema.get("type", "any")
    if kind == "integer" or schema.get("format") in ("int64", "uint64"):
        return [] if re.fullmatch(r"-?\d+", str(value)) else [f"{at}: {value!r} is no integer"]
    if kind in _TYPES and not isinstance(value, _TYPES[kind]):
        return [f"{at}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is not one of {schema['enum']}"]
    if kind == "array":
        pairs = [(schema["items"], item, f"{at}[{n}]") for n, item in enumerate(value)]
    elif kind == "object":
        known, more = schema.get("properties") or {}, schema.get("additionalProperties")
        unknown = [f"{at}.{name}: no such field" for name in value if name not in known]
        if unknown and more is None:
            return unknown
        pairs = [(known.get(n) or more, item, f"{at}.{n}") for n, item in value.items()]
    else:
        pairs = []
    return [problem for part, item, where in pairs for problem in _check(api, part, item, where)]
