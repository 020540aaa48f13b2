"""The double of Google Cloud refuses what Google's schemas do not have, and answers in the order in
which GKE works: it must not be easier to please than Google."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request

import pytest

pytest.importorskip("google.cloud.container_v1")
pytest.importorskip("kubernetes_validate")

from doubles.google_cloud import serving

CLUSTERS = "/v1/projects/my-project/locations/us-east5-b/clusters"
POOL = {
    "name": "v6e-16-0",
    "initialNodeCount": 4,
    "config": {
        "machineType": "ct6e-standard-4t",
        "labels": {"cloud.google.com/gke-networking-dra-driver": "true"},
        "gvnic": {"enabled": True},
        "oauthScopes": ["https://www.googleapis.com/auth/cloud-platform"],
    },
    "placementPolicy": {"type": "COMPACT", "tpuTopology": "4x4"},
}
"""The node pool of Google's tutorial "Multislice and elastic training on TPUs", as a request."""


@pytest.fixture
def google(tmp_path):
    """A project with GKE enabled."""
    with serving(tmp_path) as double:
        double.services.add("container.googleapis.com")
        yield double


def ask(google, method, path, body=None):
    """Return the code and the answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(google.url + path, data, method=method)
    request.add_header("Authorization", "Bearer t")
    try:
        with urllib.request.urlopen(request, timeout=200) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def finish(google, answer):
    """Ask for an operation until it is done; return it."""
    path = f"/v1/projects/my-project/locations/us-east5-b/operations/{answer['name']}"
    while answer["status"] != "DONE":
        _, answer = ask(google, "GET", path)
    return answer


def test_a_documented_cluster_and_pool_are_accepted(google):
    """The requests of Google's tutorial pass; while one operation runs, another is refused."""
    body = {"cluster": {"name": "c", "initialNodeCount": 1}}
    code, operation = ask(google, "POST", CLUSTERS, body)
    assert (code, operation["status"]) == (200, "RUNNING")
    assert google.clusters["c"]["status"] == "PROVISIONING"
    code, answer = ask(google, "POST", f"{CLUSTERS}/c/nodePools", {"nodePool": POOL})
    assert code == 400
    assert "incompatible operation" in answer["error"]["message"]
    finish(google, operation)
    code, operation = ask(google, "POST", f"{CLUSTERS}/c/nodePools", {"nodePool": POOL})
    assert code == 200
    finish(google, operation)
    assert google.clusters["c"]["nodePools"][0]["status"] == "RUNNING"
    assert ask(google, "POST", CLUSTERS, body)[0] == 409
    assert google.problems == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["config", "machine_typo"], "x"),
        (["placementPolicy", "topology"], "4x4"),
        (["placementPolicy", "type"], "DENSE"),
        (["config", "gvnic"], True),
        (["initialNodeCount"], "four"),
    ],
)
def test_a_field_that_google_does_not_know_is_an_error(google, path, value):
    """A misspelt field, a wrong type or a word that an enumeration lacks: 400, and it is noted."""
    pool = copy.deepcopy(POOL)
    inner = pool
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert ask(google, "POST", f"{CLUSTERS}/c/nodePools", {"nodePool": pool})[0] == 400
    assert google.problems


def test_a_bucket_and_its_policy(google):
    """A field that buckets lack is refused; a policy is replaced only with its etag; identities
    exist only when a cluster runs."""
    path = "/storage/v1/b?project=my-project"
    assert ask(google, "POST", path, {"name": "b", "softdelete": {}})[0] == 400
    google.problems.clear()
    assert ask(google, "POST", path, {"name": "b", "location": "US"})[0] == 200
    assert ask(google, "POST", path, {"name": "b"})[0] == 409
    binding = {"role": "roles/storage.objectUser", "members": ["user:ann@example.com"]}
    policy = "/storage/v1/b/b/iam"
    stale = {"bindings": [binding], "etag": "old"}
    assert ask(google, "PUT", policy, stale)[0] == 412
    _, current = ask(google, "GET", policy)
    assert ask(google, "PUT", policy, current | {"bindings": [binding]})[0] == 200
    _, current = ask(google, "GET", policy)
    pods = binding | {"members": ["principal://iam.googleapis.com/projects/1/x"]}
    assert ask(google, "PUT", policy, current | {"bindings": [pods]})[0] == 400
    assert google.problems == []


def test_an_unknown_method_or_parameter_is_noted(google):
    """A path or a query parameter that no discovery document has is not answered as if it had."""
    assert ask(google, "GET", "/v1/projects/my-project/locations/x/flusters")[0] == 404
    assert ask(google, "GET", f"{CLUSTERS}?pageSize=3")[0] == 400
    assert len(google.problems) == 2
