"""Cluster objects as text for `kubectl apply -f -`.

YAML needs PyYAML, which comes with the `gcp` extra; without it the documents are written as JSON,
which is valid YAML.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetic._backends.base import Document


class Format(StrEnum):
    """Formats of cluster objects."""

    YAML = "yaml"
    JSON = "json"


def format_documents(documents: Sequence[Document], form: Format) -> str:
    """Return the documents as text: separated by "---" in YAML, one List in JSON."""
    if form is Format.JSON:
        return _json({"apiVersion": "v1", "kind": "List", "items": list(documents)})
    try:
        import yaml
    except ImportError:
        return "\n---\n".join(map(_json, documents))

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes multi-line strings, such as programs, as blocks."""

        def ignore_aliases(self, data: Any) -> bool:
            """Return True: write repeated values in full, without YAML's anchors and aliases."""
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    dumped = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return str(dumped).rstrip("\n")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
