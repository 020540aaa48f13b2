"""The roles that the documentation asks an administrator for, as the double grants them.

In: docs/how-to/kubernetes.md. Out: what they allow. Whoever submits jobs to the double in a test of
the product has these rights and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs/how-to/kubernetes.md"
Grant = tuple[str, str]
"""A verb and a resource, such as ("list", "jobs.batch")."""


def documented() -> list[dict[str, Any]]:
    """The documents of the page's first block of YAML."""
    import yaml

    block = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    return list(yaml.safe_load_all(block))


def grants_of(kind: str) -> set[Grant]:
    """What the roles of this kind allow: "Role" in one namespace, "ClusterRole" everywhere."""
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
    """What somebody may do to whom both roles are bound, the Role in `namespace`."""
    here, everywhere = grants_of("Role"), grants_of("ClusterRole")

    def may(verb: str, noun: str, of: str) -> bool:
        return (verb, noun) in everywhere or (of == namespace and (verb, noun) in here)

    return may
