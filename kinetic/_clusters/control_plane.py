"""A cluster's API server, for `kinetic up`: reads and applies objects, waits for controllers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping

from kinetic._backends.kubernetes.api import CallLimits, Selector
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.errors import NotInstalled
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.observed import JOB_LABEL
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, NODES, Resource
from kinetic._clusters.objects import mark
from kinetic._clusters.observed import Document, key_of
from kinetic._clusters.releases import Release
from kinetic.errors import BackendUnavailable, NotFound, PreflightError

POLL_S = 3.0
LONGEST_S = 600.0
_DEPLOYMENTS = Resource("apps", "v1", "deployments")
_REVIEWS = Resource("authentication.k8s.io", "v1", "selfsubjectreviews", namespaced=False)
_ENDED = ("Complete", "Completed", "Failed")


class ControlPlane:
    """Calls to the API server of one cluster. Owns the connection, which `close` closes."""

    def __init__(
        self,
        access: Access,
        variables: Mapping[str, str],
        name: str,
        *,
        limits: CallLimits | None = None,
    ) -> None:
        """Create the object without connecting. `name` is the value of the label that marks the
        cluster's objects."""
        self._api = HttpApi(access, variables, patience=limits)
        self._name = name
        self._kinds: dict[tuple[str, str], Resource] = {}

    def close(self) -> None:
        """Close idle connections."""
        self._api.close()

    def read_caller(self) -> str:
        """Return the name by which the cluster knows the user."""
        review = {"apiVersion": _REVIEWS.api_version, "kind": "SelfSubjectReview"}
        answer = self._api.create(_REVIEWS, review | {"metadata": {}})
        return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")

    def _find_kind(self, document: Document) -> Resource:
        key = (str(document["apiVersion"]), str(document["kind"]))
        if key not in self._kinds:
            self._kinds[key] = self._api.find_resource(*key)
        return self._kinds[key]

    def read_objects(self, documents: Iterable[Document]) -> dict[str, Document]:
        """Return the metadata of those of the documents' objects that exist, by kind and name."""
        existing = {}
        for document in documents:
            meta = document["metadata"]
            with contextlib.suppress(NotFound, NotInstalled):
                kind = self._find_kind(document)
                answer = self._api.get(kind, meta["name"], namespace=meta.get("namespace"))
                existing[key_of(document)] = answer.get("metadata") or {}
        return existing

    def apply(self, document: Document) -> None:
        """Apply an object. If the cluster does not know its kind yet, or a webhook is still
        starting, retry for some minutes."""
        ends = time.monotonic() + LONGEST_S
        while True:
            try:
                self._api.apply(self._find_kind(document), document)
                return
            except (NotInstalled, BackendUnavailable):
                if time.monotonic() > ends:
                    raise
                time.sleep(POLL_S)

    def install(self, release: Release, documents: Iterable[Document]) -> None:
        """Apply a release's manifest, wait until its controller runs, then mark it as applied."""
        for document in documents:
            self.apply(mark(document, self._name))
        ends = time.monotonic() + LONGEST_S
        while not self._is_available(release):
            if time.monotonic() > ends:
                raise PreflightError(
                    f"{release.name} is installed, but its controller has not started within "
                    f"{LONGEST_S / 60:g} minutes. `kubectl -n {release.namespace} describe pods` "
                    "says why; then run the same command again."
                )
            time.sleep(POLL_S)
        self.apply(mark(release.marker, self._name))

    def _is_available(self, release: Release) -> bool:
        try:
            document = self._api.get(_DEPLOYMENTS, release.controller, namespace=release.namespace)
        except NotFound:
            return True  # A manifest of the user's may run it in another way.
        return bool((document.get("status") or {}).get("availableReplicas"))

    def list_jobs(self) -> tuple[str, ...]:
        """Return the ids of kinetic's jobs in all namespaces that have not ended."""
        jobs = []
        for kind in (JOBS, JOBSETS):
            try:
                rows = self._api.list(kind, Selector(labels=JOB_LABEL, namespace="")).items
            except (NotInstalled, NotFound):
                continue
            for row in rows:
                states = (row.get("status") or {}).get("conditions") or ()
                if not any(c["type"] in _ENDED and c["status"] == "True" for c in states):
                    jobs.append(str(row["metadata"]["labels"][JOB_LABEL]))
        return tuple(dict.fromkeys(jobs))

    def list_nodes(self) -> list[Document]:
        """List the nodes."""
        return list(self._api.list(NODES).items)

    def read_queues(self, kinds: Iterable[Resource]) -> list[Document]:
        """Return the queues of Kueue; [] if there are none. `kinds` are the versions of the kind,
        of which the first that the cluster knows is used."""
        for kind in kinds:
            try:
                return list(self._api.list(kind, Selector(namespace="")).items)
            except (NotInstalled, NotFound):
                continue
        return []
