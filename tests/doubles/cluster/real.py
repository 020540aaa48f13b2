"""A cluster that is really there, as tests hold it: the part of `FakeCluster` that looks.

In: a kubeconfig, whose current context names the cluster and the namespace, and whose user has the
documented roles. Out: the objects that were made since, of the kinds that this user may list, and
the force to delete a pod. What a fault has to be injected for is not here: such tests are marked
`double`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.errors import ApiCall
from kinetic._backends.kubernetes.resources import (
    ACCESS_REVIEWS,
    EVENTS,
    JOBS,
    JOBSETS,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
)
from kinetic.errors import NotFound

Document = dict[str, Any]
KINDS = {kind.plural: kind for kind in (EVENTS, JOBS, JOBSETS, NODES, PODS, SECRETS, SERVICES)}
MADE = (JOBS, JOBSETS, PODS, SECRETS, SERVICES)
PREFIX = "kinetic-"
POLL_S = 0.25


class RealCluster:
    """A namespace of a cluster. What is in it at first is never looked at again."""

    def __init__(self, path: str | Path) -> None:
        """Connect with the current context of a kubeconfig, or of several with ":" between."""
        self.kubeconfig = os.pathsep.join(
            str(Path(part).absolute()) for part in str(path).split(os.pathsep)
        )
        variables = {**os.environ, "KUBECONFIG": self.kubeconfig}
        access = kubeconfig.find(variables)
        self.context = access.context
        self._api = _Api(access, variables)
        self._kinds = [k for k in MADE if self._api.knows(k) and self._api.may("list", k)]
        self._before = set(self._names())

    def objects(self, plural: str) -> list[Document]:
        """Return all objects of a kind in the namespace; none of a kind that is not installed, or
        may not be listed."""
        kind = KINDS[plural]
        if kind in MADE and kind not in self._kinds:
            return []
        return list(self._api.list(kind).items)

    def left_over(self) -> list[str]:
        """Return what clients and controllers have made for jobs since, and is still there."""
        return [name for name in self._names() if name not in self._before]

    def _names(self) -> list[str]:
        return [
            f"{kind.plural}/{found['metadata']['name']}"
            for kind in self._kinds
            for found in self._api.list(kind).items
            if found["metadata"]["name"].startswith(PREFIX)
        ]

    def delete_pod(self, name: str, *, force: bool = False) -> None:
        """Delete a pod, with `force` without the time that it has to end."""
        self._api.delete_pod(name, {"gracePeriodSeconds": 0} if force else {})

    def evict_pod(self, name: str) -> None:
        """Have a pod evicted, as a drain of its node does."""
        self._api.evict_pod(name)

    def may_evict(self) -> bool:
        """Whether the user has the right to, which is none of the documented ones."""
        return self._api.may_evict()

    def wait_for(
        self, condition: Callable[[], object], timeout_s: float = 60.0, what: str = ""
    ) -> object:
        """Return what `condition` says once that is true."""
        until = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > until:
                raise AssertionError(f"waited in vain for {what or condition}\n{self.describe()}")
            time.sleep(POLL_S)
        return found

    def describe(self) -> str:
        """Return what jobs have made, and the last events, in a few lines for failed tests."""
        lines = [
            f"{kind.plural}/{found['metadata']['name']} {found.get('status')}"
            for kind in self._kinds
            if kind in (JOBSETS, JOBS, PODS)
            for found in self._api.list(kind).items
            if found["metadata"]["name"].startswith(PREFIX)
        ]
        for event in self._api.list(EVENTS).items[-20:]:
            about = event["involvedObject"]
            said = f"{event.get('reason')}: {event.get('message')}"
            lines.append(f"  {about.get('kind')}/{about.get('name')} {said}")
        return "\n".join(lines)

    def close(self) -> None:
        """Close the connections."""
        self._api.close()


class _Api(HttpApi):
    """Has three calls more than kinetic needs."""

    def may_evict(self) -> bool:
        asked = {"verb": "create", "resource": "pods", "subresource": "eviction"}
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked | {"namespace": self.namespace}},
        }
        call = ApiCall("create", ACCESS_REVIEWS)
        review = self._ask(call, body)
        return bool(review["status"].get("allowed"))

    def evict_pod(self, name: str) -> None:
        call = ApiCall("create", PODS, self.namespace, name)
        path = f"{PODS.path(self.namespace, name)}/eviction"
        body = {"kind": "Eviction", "apiVersion": "policy/v1", "metadata": {"name": name}}
        self._ask(call, body, path=path)

    def delete_pod(self, name: str, options: Document) -> None:
        call = ApiCall("delete", PODS, self.namespace, name)
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        with contextlib.suppress(NotFound):
            self._ask(call, body)
