"""A fake `Api` of a cluster, for tests of preflights and of the doctor."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from test_kubernetes_waiting import node

from kinetic._backends.kubernetes.api import ObjectList, Selector, Version
from kinetic._backends.kubernetes.errors import Forbidden
from kinetic._backends.kubernetes.resources import Resource
from kinetic.errors import KineticError, NotFound

_numbers = itertools.count()


class ClusterAnswers:
    """A cluster that lacks nothing. `problems` maps (verb, plural or name) to an error to raise."""

    namespace = "ml"

    def __init__(self) -> None:
        self.server = f"https://c{next(_numbers)}"
        self.problems: dict[tuple[str, str], KineticError] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self.text = Version("v1.33.4", 1, 33)
        self.has_controller = True
        self.calls: Counter[str] = Counter()
        self.nodes = [node("n0", "tpu", "4x4")]

    def _ask(self, verb: str, *nouns: str) -> None:
        self.calls[f"{verb} {nouns[0]}"] += 1
        for noun in ("*", *nouns):
            if (verb, noun) in self.problems:
                raise self.problems[verb, noun]

    def version(self) -> Version:
        self._ask("version", "")
        return self.text

    def may(self, verb: str, resource: Resource) -> bool:
        self._ask("may", "")
        return not isinstance(self.problems.get((verb, resource.plural)), Forbidden)

    def knows(self, resource: Resource) -> bool:
        return ("create", resource.plural) not in self.problems

    def create(
        self, resource: Resource, document: dict[str, Any], *, dry_run: bool
    ) -> dict[str, Any]:
        assert dry_run
        self._ask("create", resource.plural)
        filled = {"successPolicy": {"operator": "All"}} if self.has_controller else {}
        return document | {"spec": document.get("spec", {}) | filled}

    def get(self, resource: Resource, name: str) -> dict[str, Any]:
        self._ask("get", resource.plural, name)
        if name == "nobody":
            raise NotFound("There is none.")
        return self.objects.get(resource.plural, {})

    def list(self, resource: Resource, _: Selector = Selector()) -> ObjectList:  # noqa: B008
        self._ask("list", resource.plural)
        if resource.plural == "nodes":
            return ObjectList(tuple(self.nodes))
        return ObjectList(
            (self.objects[resource.plural],) if resource.plural in self.objects else ()
        )
