"""Which lifecycle rules of a bucket delete what jobs still need.

In: rules as the service writes them, the prefix of a store. Out: a phrase for each rule that may
delete live objects that the store needs. Pure.

Content is shared by jobs and used again by each new one, which does not change its age: a rule by
age deletes what today's plans name. Only old records may be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kinetic._core import layout

_CONTENT = (layout.BLOBS, layout.PACKS, layout.PACK_INDEXES, layout.TREES, layout.DATA)
OLD_DAYS = 30
"""Longer than jobs wait and run."""
_NONCURRENT_ONLY = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_NEVER_SET = ("customTimeBefore", "daysSinceCustomTime")
"""Conditions that no live object of a store meets: kinetic sets no custom times."""


def threats(rules: Iterable[Mapping[str, Any]], prefix: str) -> tuple[str, ...]:
    """Return what deletes live objects whose names begin with `prefix`."""
    return tuple(
        _describe_condition(rule.get("condition") or {}) for rule in rules if _deletes(rule, prefix)
    )


def _deletes(rule: Mapping[str, Any], prefix: str) -> bool:
    condition = rule.get("condition") or {}
    if (rule.get("action") or {}).get("type") != "Delete" or condition.get("isLive") is False:
        return False
    if any(condition.get(key) is not None for key in (*_NONCURRENT_ONLY, *_NEVER_SET)):
        return False
    wanted: Sequence[str] = condition.get("matchesPrefix") or ("",)
    needed = [prefix] if condition.get("age", 0) < OLD_DAYS else [prefix + c for c in _CONTENT]
    return any(w.startswith(n) or n.startswith(w) for w in wanted for n in needed)


def _describe_condition(condition: Mapping[str, Any]) -> str:
    told = ["objects"]
    if condition.get("matchesPrefix"):
        told.append(f"below {', '.join(condition['matchesPrefix'])}")
    if condition.get("matchesSuffix"):
        told.append(f"that end with {', '.join(condition['matchesSuffix'])}")
    if condition.get("age") is not None:
        told.append(f"after {condition['age']} days")
    if condition.get("createdBefore"):
        told.append(f"made before {condition['createdBefore']}")
    return " ".join(told)
