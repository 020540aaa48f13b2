"""An existing cluster, with the methods of `FakeCluster` that read objects and delete pods.

The kubeconfig's current context names the cluster and the namespace. Its user has the
documented roles, so only kinds that these allow to list are visible. Tests that inject faults have
the mark `double`, and do not run here.
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
CREATED_KINDS = (JOBS, JOBSETS, PODS, SECRETS, SERVICES)
PREFIX = "kinetic-"
POLL_S = 0.25


class RealCluster:
    """A namespace of a cluster. Objects that existed at the start are ignored."""

    def __init__(self, path: str | Path) -> None:
        """Connect with the current context of one kubeconfig, or of several separated by ":"."""
        self.kubeconfig = os.pathsep.join(
            str(Path(part).absolute()) for part in str(path).split(os.pathsep)
        )
        variables = {**os.environ, "KUBECONFIG": self.kubeconfig}
        access = kubeconfig.find(variables)
        self.context = access.context
        self._api = _Api(access, variables)
        self._kinds = [k for k in CREATED_KINDS if self._api.knows(k) and self._api.may("list", k)]
        self._before = set(self._names())

    def objects(self, plural: str) -> list[Document]:
        """Return all objects of a kind in the namespace; [] if the kind is not installed, or the
        user may not list it."""
        kind = KINDS[plural]
        if kind in CREATED_KINDS and kind not in self._kinds:
            return []
        return list(self._api.list(kind).items)

    def left_over(self) -> list[str]:
        """Return the objects of jobs that were created since the start and still exist."""
        return [name for name in self._names() if name not in self._before]

    def _names(self) -> list[str]:
        return [
            f"{kind.plural}/{obj['metadata']['name']}"
            for kind in self._kinds
            for obj in self._api.list(kind).items
            if obj["metadata"]["name"].startswith(PREFIX)
        ]

    def delete_pod(self, name: str, *, force: bool = False) -> None:
        """Delete a pod; with `force`, without its grace period."""
        self._api.delete_pod(name, {"gracePeriodSeconds": 0} if force else {})

    def evict_pod(self, name: str) -> None:
        """Evict a pod, as when its node is drained."""
        self._api.evict_pod(name)

    def may_evict(self) -> bool:
        """True if the user may evict pods; the documented roles do not allow it."""
        return self._api.may_evict()

    def wait_for(
        self, condition: Callable[[], object], timeout_s: float = 60.0, what: str = ""
    ) -> object:
        """Wait until `condition` is true; return its result."""
        until = time.monotonic() + timeout_s
        while not (result := condition()):
            if time.monotonic() > until:
                raise AssertionError(f"waited in vain for {what or condition}\n{self.describe()}")
            time.sleep(POLL_S)
        return result

    def describe(self) -> str:
        """Describe the objects of jobs and the last events in a few lines, for failed tests."""
        lines = [
            f"{kind.plural}/{obj['metadata']['name']} {obj.get('status')}"
            for kind in self._kinds
            if kind in (JOBSETS, JOBS, PODS)
            for obj in self._api.list(kind).items
            if obj["metadata"]["name"].startswith(PREFIX)
        ]
        for event in self._api.list(EVENTS).items[-20:]:
            about = event["involvedObject"]
            message = f"{event.get('reason')}: {event.get('message')}"
            lines.append(f"  {about.get('kind')}/{about.get('name')} {message}")
        return "\n".join(lines)

    def close(self) -> None:
        """Close the connections."""
        self._api.close()


class _Api(HttpApi):
    """The connection, with three API calls that kinetic itself does not use."""

    def may_evict(self) -> bool:
        attributes = {"verb": "create", "resource": "pods", "subresource": "eviction"}
        body = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes | {"namespace": self.namespace}},
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
