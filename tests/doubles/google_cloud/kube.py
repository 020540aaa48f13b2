"""The API server of one cluster: objects that are applied, and controllers that take a while."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate

Document = dict[str, Any]
CALLER = "ann@example.com"
READS_UNTIL_AVAILABLE = 2
"""How often the controller of a manifest is asked for before it runs."""
VALIDATED = "1.33"
_BUILT_IN = """
v1 Namespace namespaces -
v1 ServiceAccount serviceaccounts n
v1 ConfigMap configmaps n
v1 Service services n
v1 Secret secrets n
v1 Node nodes -
v1 Pod pods n
v1 Event events n
apps/v1 Deployment deployments n
batch/v1 Job jobs n
rbac.authorization.k8s.io/v1 Role roles n
rbac.authorization.k8s.io/v1 RoleBinding rolebindings n
rbac.authorization.k8s.io/v1 ClusterRole clusterroles -
rbac.authorization.k8s.io/v1 ClusterRoleBinding clusterrolebindings -
apiextensions.k8s.io/v1 CustomResourceDefinition customresourcedefinitions -
checkpointing.gke.io/v1 CheckpointConfiguration checkpointconfigurations -
"""
BUILT_IN = [tuple(line.split()) for line in _BUILT_IN.split("\n") if line]


class Kube:
    """The objects of a cluster, by (apiVersion, plural, namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str, str], Document] = {}
        self.reads: dict[str, int] = {}
        self.applied: list[str] = []
        self.problems: list[str] = []
        self.put("v1", "namespaces", "", {"kind": "Namespace", "metadata": {"name": "default"}})

    def put(self, version: str, plural: str, namespace: str, document: Document) -> None:
        """Put an object that nobody has applied."""
        name = document["metadata"]["name"]
        self.objects[version, plural, namespace, name] = {"apiVersion": version} | document

    def names(self, plural: str) -> list[str]:
        """List the names of objects of a kind."""
        return sorted(key[3] for key in self.objects if key[1] == plural)

    def kinds(self) -> list[tuple[str, ...]]:
        """List the kinds that the server knows: its own, and those of definitions."""
        rows = list(BUILT_IN)
        for key, crd in self.objects.items():
            if key[1] == "customresourcedefinitions":
                spec = crd["spec"]
                for version in spec["versions"]:
                    space = "n" if spec["scope"] == "Namespaced" else "-"
                    api = f"{spec['group']}/{version['name']}"
                    rows.append((api, spec["names"]["kind"], spec["names"]["plural"], space))
        return rows

    def answer(
        self, http: str, path: str, query: dict[str, str], kind: str, body: bytes
    ) -> tuple[int, Document]:
        """Answer a request."""
        if path == "/version":
            return 200, {"major": "1", "minor": "33", "gitVersion": "v1.33.5-gke.1080000"}
        if http == "POST" and path.endswith("/selfsubjectreviews"):
            return 201, {"status": {"userInfo": {"username": CALLER}}}
        if http == "POST" and path.endswith("/selfsubjectaccessreviews"):
            return 201, {"status": {"allowed": True}}
        matched = re.fullmatch(
            r"/apis?/((?:[\w.-]+/)?v\w+)(?:/namespaces/([^/]+)(?=/))?(?:/(\w+))?(?:/([^/]+))?(/status)?",
            path,
        )
        if not matched:
            return 404, {}
        version, space, plural, name, part = matched.groups()
        rows = [row for row in self.kinds() if row[0] == version]
        if not plural:
            listed = [
                {"kind": row[1], "name": row[2], "namespaced": row[3] == "n", "verbs": ["get"]}
                for row in rows
            ]
            return (200, {"kind": "APIResourceList", "resources": listed}) if rows else (404, {})
        row = next((row for row in rows if row[2] == plural), None)
        if row is None:
            return 404, {}
        if not name:
            return self._list(version, plural, space or "", http, body)
        is_lost = row[3] == "n" and ("v1", "namespaces", "", space) not in self.objects
        if http == "PATCH" and is_lost:
            return _status(404, "NotFound", f'namespaces "{space}" not found', "namespaces")
        key = (version, plural, (space or ""), name)
        if http == "GET":
            return self._get(key)
        if http == "PATCH":
            return self._apply(key, row, query, kind, json.loads(body), part or "")
        if http == "DELETE" and self.objects.pop(key, None):
            return 200, {"kind": "Status"}
        return _status(404, "NotFound", f'{plural} "{name}" not found', plural)

    def _list(
        self, version: str, plural: str, space: str, http: str, body: bytes
    ) -> tuple[int, Document]:
        if http == "POST":
            return 201, json.loads(body)  # The doctor's dry runs.
        items = [
            document
            for key, document in self.objects.items()
            if key[:2] == (version, plural) and (not space or key[2] == space)
        ]
        return 200, {"kind": "List", "items": items, "metadata": {}}

    def _get(self, key: tuple[str, str, str, str]) -> tuple[int, Document]:
        document = self.objects.get(key)
        if document is None:
            return _status(404, "NotFound", f'{key[1]} "{key[3]}" not found', key[1])
        if key[1] == "deployments":
            self.reads[key[3]] = self.reads.get(key[3], 0) + 1
            if self.reads[key[3]] >= READS_UNTIL_AVAILABLE:
                document = document | {"status": {"availableReplicas": 1}}
        return 200, document

    def _apply(
        self,
        key: tuple[str, str, str, str],
        row: tuple[str, ...],
        query: dict[str, str],
        kind: str,
        document: Document,
        part: str,
    ) -> tuple[int, Document]:
        if kind != "application/apply-patch+yaml" or not query.get("fieldManager"):
            return _status(415, "UnsupportedMediaType", f"not an apply: {kind}", "")
        meta = document["metadata"]
        named = (document["apiVersion"], document["kind"], meta.get("namespace", ""), meta["name"])
        if named != (key[0], row[1], key[2], key[3]):
            self.problems.append(f"{named} was sent to {key}")
        if "kueue.x-k8s.io" in key[0]:
            ready = self.reads.get("kueue-controller-manager", 0) >= READS_UNTIL_AVAILABLE
            if not ready:
                return _status(500, "InternalError", "failed calling webhook: no endpoints", "")
        if row in BUILT_IN and "gke.io" not in row[0]:
            try:
                kubernetes_validate.validate(document, VALIDATED, strict=True)
            except Exception as error:
                self.problems.append(f"{key}: {error}")
                return _status(422, "Invalid", str(error), key[1])
        self.objects[key] = self.objects.get(key, {}) | document
        self.applied.append("/".join(filter(None, (row[1], key[2], key[3], part))))
        return 200, self.objects[key]


def _status(code: int, reason: str, message: str, kind: str) -> tuple[int, Document]:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message}
    return code, body | {"code": code, "details": {"kind": kind}}
