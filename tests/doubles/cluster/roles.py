"""The roles documented in docs/how-to/kubernetes.md. In tests of the product, the double's user has
these rights and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs/how-to/kubernetes.md"
Grant = tuple[str, str]
"""A verb and a resource, such as ("list", "jobs.batch")."""


def documented() -> list[dict[str, Any]]:
    """Return the YAML documents in the first code block of the page."""
    import yaml

    block = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    return list(yaml.safe_load_all(block))


def grants_of(kind: str) -> set[Grant]:
    """Return the rights in roles of a kind: "Role" for one namespace, "ClusterRole" for all."""
    return {
        (verb, f"{noun}.{group}" if group else noun)
        for document in documented()
        if document["kind"] == kind
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for noun in rule["resources"]
        for verb in rule["verbs"]
    }


def submitter(namespace: str) -> Callable[[str, str, str], bool]:
    """Return the permission function for a user with both roles, the Role bound in `namespace`."""
    local, everywhere = grants_of("Role"), grants_of("ClusterRole")

    def may(verb: str, noun: str, of: str) -> bool:
        return (verb, noun) in everywhere or (of == namespace and (verb, noun) in local)

    return may
