"""Google Kubernetes Engine through google-cloud-container, over REST: no gRPC channel is opened in
a process that forks.

Requests and answers are plain documents. A field that the library does not know is an error here,
before anything is sent.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinetic._backends.kubernetes.credentials import explain_google, find_google_credentials
from kinetic._clusters.observed import Document
from kinetic._clusters.refusals import OperationUnderWay, explain, explain_operation
from kinetic.errors import BackendUnavailable, PreflightError

if TYPE_CHECKING:
    from google.cloud import container_v1

REQUEST_S = 60.0
POLL_S = 5.0
LONGEST_S = 3600.0
"""The longest wait for one operation; GKE itself gives up earlier."""


class Gke:
    """Clusters and node pools of one location."""

    def __init__(
        self, project: str, location: str, address: str, *, sleep: Callable[[float], None]
    ) -> None:
        """Create the object without calling Google.

        Args:
            project, location: where the clusters are; "-" for all locations.
            address: the URL of the service.
            sleep: waits between polls.
        """
        self._project, self._location, self._address = project, location, address
        self._sleep = sleep
        self._opened: container_v1.ClusterManagerClient | None = None

    @property
    def _parent(self) -> str:
        return f"projects/{self._project}/locations/{self._location}"

    def _client(self) -> container_v1.ClusterManagerClient:
        if self._opened is None:
            from google.cloud import container_v1
            from google.cloud.container_v1.services.cluster_manager import transports

            parts = urlsplit(self._address)
            transport = transports.ClusterManagerRestTransport(
                host=parts.netloc, url_scheme=parts.scheme, credentials=find_google_credentials()
            )
            self._opened = container_v1.ClusterManagerClient(transport=transport)
        return self._opened

    @contextmanager
    def _map_errors(self, action: str) -> Iterator[None]:
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except GoogleAPICallError as error:
            code = int(error.code or 500)
            reason = str(error.reason or "")
            text = re.sub(r"^[A-Z]+ https?://\S+: ", "", str(error.message))
            raise explain(self._project, action, code, text, reason) from error
        except GoogleAuthError as error:
            raise explain_google(
                error, "Log in with `gcloud auth application-default login`."
            ) from error
        except (RetryError, OSError) as error:  # The library passes on errors of its transport.
            raise BackendUnavailable(
                f"{urlsplit(self._address).netloc} does not answer: "
                f'"{type(error).__name__}: {error}". Check the network and your proxy, then try '
                "again."
            ) from error

    def _call(self, method: str, action: str, **request: Any) -> Document:
        from google.protobuf.json_format import MessageToDict

        with self._map_errors(action):
            answer = getattr(self._client(), method)(request=request, timeout=REQUEST_S)
            return dict(MessageToDict(type(answer).pb(answer)))

    def get_cluster(self, name: str) -> Document | None:
        """Return a cluster with its node pools; None if there is none."""
        clusters = self.list_clusters()
        return next((c for c in clusters if c["name"] == name), None)

    def list_clusters(self, location: str = "") -> list[Document]:
        """List the clusters of the location, or of another one; "-" stands for all."""
        parent = f"projects/{self._project}/locations/{location or self._location}"
        answer = self._call("list_clusters", "list the clusters", parent=parent)
        return list(answer.get("clusters") or ())

    def create_cluster(self, body: Document) -> None:
        """Create a cluster, and wait until it runs."""
        from google.cloud import container_v1

        action = f"create the cluster {body['name']}"
        cluster = container_v1.Cluster.from_json(json.dumps(body))
        self._change("create_cluster", action, parent=self._parent, cluster=cluster)

    def create_pool(self, cluster: str, body: Document) -> None:
        """Create a node pool, and wait for it."""
        from google.cloud import container_v1

        action = f"create the node pool {body['name']}"
        pool = container_v1.NodePool.from_json(json.dumps(body))
        parent = f"{self._parent}/clusters/{cluster}"
        self._change("create_node_pool", action, cluster, parent=parent, node_pool=pool)

    def remove_pool(self, cluster: str, pool: str) -> None:
        """Remove a node pool, and wait until it is gone."""
        name = f"{self._parent}/clusters/{cluster}/nodePools/{pool}"
        self._change("delete_node_pool", f"remove the node pool {pool}", cluster, name=name)

    def remove_cluster(self, cluster: str) -> None:
        """Remove a cluster with its node pools, and wait until it is gone."""
        name = f"{self._parent}/clusters/{cluster}"
        self._change("delete_cluster", f"remove the cluster {cluster}", cluster, name=name)

    def _change(self, method: str, action: str, busy: str = "", /, **request: Any) -> None:
        """Begin an operation, after those that are under way on the cluster `busy`, and follow
        it."""
        ends = time.monotonic() + LONGEST_S
        while True:
            try:
                operation = self._call(method, action, **request)
                break
            except OperationUnderWay:
                if not busy or time.monotonic() > ends:
                    raise
                self.wait(busy, action)
                self._sleep(POLL_S)
        self._follow(operation, action)

    def wait(self, target: str, action: str = "") -> None:
        """Wait for the operations that GKE carries out on a cluster, or on "cluster/pool"."""
        cluster, _, pool = target.partition("/")
        suffix = f"/clusters/{cluster}/nodePools/{pool}" if pool else f"/clusters/{cluster}"
        answer = self._call("list_operations", "list GKE's operations", parent=self._parent)
        running = [
            operation
            for operation in answer.get("operations") or ()
            if operation.get("status") != "DONE"
            and f"{suffix}/" in f"{operation.get('targetLink') or ''}/"
        ]
        for operation in running:
            self._follow(operation, action or f"create {target}")
        if not running:
            self._sleep(POLL_S)

    def _follow(self, operation: Document, action: str) -> None:
        """Wait until an operation has ended; raise its error."""
        name, ends = f"{self._parent}/operations/{operation['name']}", time.monotonic() + LONGEST_S
        while operation.get("status") != "DONE":
            if time.monotonic() > ends:
                raise BackendUnavailable(
                    f"Could not {action}: GKE has not finished within an hour. Run the same "
                    "command again: it waits on."
                )
            self._sleep(POLL_S)
            operation = self._call("get_operation", f"ask whether GKE could {action}", name=name)
        error = operation.get("error") or {}
        message = error.get("message") or operation.get("statusMessage")
        if message:
            raise explain_operation(self._project, action, str(message))


def check_installed(command: str) -> None:
    """Refuse a command that needs google-cloud-container where it is missing.

    Raises:
        PreflightError: the extra `up` is not installed.
    """
    import importlib.util

    from kinetic._system.distribution import make_install_command

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # of a package above it
            return True

    if any(map(is_missing, ("google.cloud.container_v1", "kubernetes", "yaml"))):
        raise PreflightError(
            f"`kinetic {command}` needs packages that are not installed. Install them: "
            f"{make_install_command('up')}"
        )
