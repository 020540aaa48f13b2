"""Google Kubernetes Engine: reads and changes clusters and node pools. A change returns when GKE
has completed it."""

from __future__ import annotations

import time

from kinetic._clusters.cloud import Cloud
from kinetic._clusters.observed import Document
from kinetic._clusters.refusals import OperationUnderWay, explain_operation
from kinetic._clusters.wanted import Wanted
from kinetic.errors import BackendUnavailable

POLL_S = 5.0
LONGEST_S = 3600.0
"""Longest wait in seconds for one operation of GKE. GKE itself gives up earlier."""


class Gke:
    """The clusters of a project, in all locations."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def _ask(self, method: str, path: str, action: str, body: Document | None = None) -> Document:
        # If a response was lost and the request repeated, the first one may have removed the
        # object.
        allowed = (404,) if method == "DELETE" else ()
        _, answer = self._cloud.ask(
            method, "container", f"v1/{path}", body, action=action, allowed=allowed
        )
        return answer

    def list_clusters(self) -> list[Document]:
        """List the clusters with their node pools."""
        path = f"projects/{self._cloud.project}/locations/-/clusters"
        return list(self._ask("GET", path, "list the clusters").get("clusters") or ())

    def get_cluster(self, wanted: Wanted) -> Document | None:
        """Return GKE's document of a cluster, with its node pools; None if there is none."""
        place = (wanted.name, wanted.location)
        return next((c for c in self.list_clusters() if (c["name"], c["location"]) == place), None)

    def create_cluster(self, wanted: Wanted, body: Document) -> None:
        """Create a cluster, and wait until it runs."""
        path, action = f"{wanted.parent}/clusters", f"create the cluster {wanted.name}"
        self._change(wanted, "POST", path, action, {"cluster": body})

    def create_pool(self, wanted: Wanted, body: Document) -> None:
        """Create a node pool, and wait for it."""
        path, action = f"{wanted.path}/nodePools", f"create the node pool {body['name']}"
        self._change(wanted, "POST", path, action, {"nodePool": body})

    def remove_pool(self, wanted: Wanted, pool: str) -> None:
        """Remove a node pool, and wait until it is gone."""
        path = f"{wanted.path}/nodePools/{pool}"
        self._change(wanted, "DELETE", path, f"remove the node pool {pool}")

    def remove_cluster(self, wanted: Wanted) -> None:
        """Remove a cluster with its node pools, and wait until it is gone."""
        self._change(wanted, "DELETE", wanted.path, f"remove the cluster {wanted.name}")

    def _change(
        self, wanted: Wanted, method: str, path: str, action: str, body: Document | None = None
    ) -> None:
        """Start an operation, after those that run on the cluster, and wait until it has ended."""
        ends = time.monotonic() + LONGEST_S
        while True:
            try:
                operation = self._ask(method, path, action, body)
                break
            except OperationUnderWay:
                if time.monotonic() > ends:
                    raise
                self.wait(wanted, wanted.name, action)
                time.sleep(POLL_S)
        if operation:
            self._follow(wanted, operation, action)

    def wait(self, wanted: Wanted, target: str, action: str = "") -> None:
        """Wait for GKE's operations on `target`: a cluster's name, or "cluster/pool". `action` says
        in errors what failed; "" for the creation of the target."""
        suffix = f"/clusters/{target.replace('/', '/nodePools/')}/"
        path = f"{wanted.parent}/operations"
        answer = self._ask("GET", path, "list GKE's operations")
        running = [
            operation
            for operation in answer.get("operations") or ()
            if operation.get("status") != "DONE"
            and suffix in f"{operation.get('targetLink') or ''}/"
        ]
        for operation in running:
            self._follow(wanted, operation, action or f"create {target}")
        if not running:
            time.sleep(POLL_S)

    def _follow(self, wanted: Wanted, operation: Document, action: str) -> None:
        """Wait until an operation has ended. If it failed, raise its error."""
        ends = time.monotonic() + LONGEST_S
        path = f"{wanted.parent}/operations/{operation['name']}"
        while operation.get("status") != "DONE":
            if time.monotonic() > ends:
                raise BackendUnavailable(
                    f"Could not {action}: GKE has not finished within an hour. Run the same "
                    "command again: it continues to wait."
                )
            time.sleep(POLL_S)
            operation = self._ask("GET", path, f"ask whether GKE could {action}")
        error = operation.get("error") or {}
        message = error.get("message") or operation.get("statusMessage")
        if message:
            raise explain_operation(self._cloud.project, action, str(message))
