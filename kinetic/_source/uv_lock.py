"""A project's exact versions from its uv.lock.

In: the parsed lock, the project's name, the chosen extras and groups. Out: requirements, each with
its version and its conditions in the lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kinetic.errors import UsageError

Condition = frozenset[str]
_ALWAYS: Condition = frozenset()
_Node = tuple[str, str]
"""Name and version."""


def pins(
    where: str,
    lock: Mapping[str, Any],
    name: str,
    *,
    extras: Collection[str],
    groups: Collection[str],
    without: Collection[str],
) -> list[str] | None:
    """Return one requirement for each package that the project needs; None if the lock does not
    know the project.

    Args:
        where: the lock, for messages.
        lock: its content.
        name: of the project, normalized.
        extras, groups: what to take of the project besides its dependencies, normalized.
        without: names of packages to leave out, with what only they need.

    Raises:
        UsageError: a package lies on this machine.
    """
    packages: dict[str, list[Mapping[str, Any]]] = {}
    for package in lock.get("package", ()):
        packages.setdefault(package["name"], []).append(package)
    root = next(
        (p for p in packages.get(name, ()) if {"virtual", "editable"} & p.get("source", {}).keys()),
        None,
    )
    if root is None:
        return None
    found: dict[_Node, set[Condition]] = {}
    by_node = {(p["name"], p.get("version", "")): p for each in packages.values() for p in each}
    edges = [*root.get("dependencies", ())]
    for extra in extras:
        edges += root.get("optional-dependencies", {}).get(extra, ())
    for group in groups:
        edges += root.get("dev-dependencies", {}).get(group, ())
    waiting = [(edge, _ALWAYS) for edge in edges]
    seen: dict[tuple[_Node, str], set[Condition]] = {}
    while waiting:
        edge, condition = waiting.pop()
        if edge["name"] in without:
            continue
        condition |= {edge["marker"]} if "marker" in edge else _ALWAYS
        for package in _find_candidates(edge, packages):
            node = (package["name"], package.get("version", ""))
            _add(found.setdefault(node, set()), condition)
            for part, following in _list_edges(package, edge.get("extra", ())):
                if _add(seen.setdefault((node, part), set()), condition):
                    waiting += [(each, condition) for each in following]
    lines = (_line(where, by_node[node], found[node]) for node in sorted(found))
    return [line for line in lines if line]


def _find_candidates(
    edge: Mapping[str, Any], packages: Mapping[str, list[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    """The packages that an edge may lead to: several only if it names no version."""
    for package in packages.get(edge["name"], ()):
        if edge.get("version", package.get("version")) == package.get("version"):
            yield package


def _list_edges(
    package: Mapping[str, Any], extras: Collection[str]
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    yield "", package.get("dependencies", [])
    for extra in extras:
        yield extra, package.get("optional-dependencies", {}).get(extra, [])


def _add(conditions: set[Condition], condition: Condition) -> bool:
    """Add an alternative; return whether it adds anything."""
    if any(known <= condition for known in conditions):
        return False
    conditions -= {known for known in conditions if condition <= known}
    conditions.add(condition)
    return True


def _line(where: str, package: Mapping[str, Any], conditions: Collection[Condition]) -> str:
    source, name = package.get("source", {}), package["name"]
    if {"editable", "virtual"} & source.keys():
        return ""  # A member of the workspace: its files are the project's.
    place = source.get("path") or source.get("directory")
    if place:
        raise UsageError(
            f"{where}: {name} is {place} on this machine, where hosts cannot read it. Make it "
            "`editable = true` in [tool.uv.sources], and it is sent with the job; or name a "
            "published version."
        )
    if "git" in source:
        address, _, commit = source["git"].partition("#")
        text = f"{name} @ git+{address.partition('?')[0]}" + (f"@{commit}" if commit else "")
    elif "url" in source:
        text = f"{name} @ {source['url']}"
    else:
        text = f"{name}=={package['version']}"
    if _ALWAYS in conditions:
        return text
    alternatives = [" and ".join(f"({m})" for m in sorted(each)) for each in conditions]
    if len(alternatives) > 1:
        return f"{text} ; {' or '.join(f'({each})' for each in sorted(alternatives))}"
    return f"{text} ; {alternatives[0]}"
