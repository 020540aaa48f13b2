"""The double refuses requests as a real API server does.

Recorded requests are sent again: status, reason, message, details and headers must be the same.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from doubles.cluster.fake import FakeCluster
from doubles.cluster.kinds import NAMESPACES
from doubles.cluster.manifests import job, job_set
from doubles.cluster.objects import Object
from doubles.cluster.problems import forbidden

RECORDED = json.loads(Path(__file__).with_name("recorded_errors.json").read_text())
ALICE = "alice@example.com"
QUOTAS = {
    "a pod": {"requests.google.com/tpu": "4"},
    "of jobs (": {"count/jobs.batch": "1"},
    "of jobsets": {"count/jobsets.jobset.x-k8s.io": "0"},
}


class Wire:
    """A connection that sends requests unchanged, without the official client."""

    def __init__(self, cluster: FakeCluster, user: str) -> None:
        self._port = cluster.server.port
        self._token = {
            "admin": "token-1",
            "alice": "token-of-alice@example.com",
            "stranger": "unknown",
        }.get(user, "")

    def send(
        self, method: str, path: str, body: object = None, content_type: str | None = None
    ) -> tuple[int, dict[str, str], object]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        data = None
        if body is not None:
            data = body if isinstance(body, str) else json.dumps(body)
            headers["Content-Type"] = content_type or "application/json"
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        headers = {k.lower(): v for k, v in answer.getheaders()}
        connection.close()
        if "json" in headers.get("content-type", ""):
            return answer.status, headers, json.loads(text)
        return answer.status, headers, text


@pytest.fixture
def cluster():
    with FakeCluster(namespaces=["ml"]) as running:
        running.add_user(ALICE, lambda verb, resource, namespace: False)
        yield running
        assert running.crashes == []


def prepare(cluster: FakeCluster, case: Object) -> None:
    """Create the objects that existed on the recorded cluster before the request."""
    what, admin = case["what"], Wire(cluster, "admin")
    jobs = "/apis/batch/v1/namespaces/ml/jobs"
    if "/dup" in case["path"] or "create again" in what or "still being deleted" in what:
        admin.send("POST", jobs, job("dup", "sleep 600"))
    if "dupset" in case["path"] or "jobset again" in what:
        path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets"
        held = job_set("dupset", "sleep 600", hosts=1)
        admin.send("POST", path, held | {"spec": held["spec"] | {"failurePolicy": {}}})
    if "still being deleted" in what:
        cluster.store.update(cluster._resource("jobs"), "ml", "dup", _held)
        cluster.delete("jobs", "dup", policy="Foreground")
    if "being deleted" in what and "namespace" in what:
        cluster.add_namespace("leaving")
        cluster.admit_with(_refuse_in_leaving)
    for word, hard in QUOTAS.items():
        if "quota" in what and word in f"{what} (":
            cluster.add_quota("team", hard, "ml")
    if "object count of jobs" in what and "jobsets" not in what:
        admin.send("POST", jobs, job("first", "sleep 600"))
    if "budget" in what:
        cluster.api.protected_pods.add("pdb-lqbbj")
    if "webhook is down" in what:
        cluster.api.webhook_down = True
    if "CRD not installed" in what or "CRD is not installed" in what:
        cluster.remove_job_sets()


def _held(obj: Object) -> None:
    obj["metadata"]["finalizers"] = ["example.com/hold"]


def _refuse_in_leaving(resource, obj) -> None:
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    if namespace == "leaving" and resource is not NAMESPACES:
        text = f"namespace {namespace} is being terminated"
        cause = {"reason": "NamespaceTerminating", "message": text, "field": "metadata.namespace"}
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        raise forbidden(resource, name, why, causes=[cause])


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["what"][:60])
def test_refused_as_recorded(cluster, case) -> None:
    prepare(cluster, case)
    wire = Wire(cluster, case["as"])
    status, headers, body = wire.send(
        case["method"], case["path"], case.get("body"), case.get("type")
    )
    assert status == case["status"], body
    assert headers.get("warning") == case.get("warning")
    assert headers.get("retry-after") == case.get("retry_after")
    if "text" in case:
        assert body == case["text"]
        assert headers["content-type"].startswith("text/plain")
    if "reason" in case:
        assert isinstance(body, dict)
        assert body.get("reason") == case["reason"]
        assert body["message"].startswith(case.get("message", ""))
        wanted = case.get("details")
        if wanted is not None:
            assert {k: body["details"].get(k) for k in wanted} == wanted


def test_who_may_do_what_can_be_asked(cluster) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    wanted = {"namespace": "ml", "verb": "create", "group": "batch", "resource": "jobs"}
    body = {"spec": {"resourceAttributes": wanted}}
    for user, allowed in (("admin", True), ("alice", False)):
        _, _, answer = Wire(cluster, user).send("POST", path, body)
        assert isinstance(answer, dict)
        assert answer["status"] == {"allowed": allowed}
