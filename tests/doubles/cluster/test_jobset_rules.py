"""Rules of JobSet: the double accepts what kinetic renders, and refuses what JobSet refuses.

The golden documents get status 201. A JobSet with one error gets 422 with the field's path.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster import jobset_rules
from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job_set
from doubles.cluster.objects import Object
from doubles.cluster.problems import Refused
from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.errors import Refused as RefusedCall
from kinetic._backends.kubernetes.resources import BY_KIND, JOBSETS

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
RENDERED = {
    str(path.relative_to(GOLDEN)): json.loads(path.read_text())
    for path in sorted(GOLDEN.rglob("*.json"))
    if path.name != "jobset-fields.json"
}
LONGEST_ID = "job-ffffffff"


@pytest.fixture(scope="module")
def api() -> Any:
    with FakeCluster() as running:
        variables = {"KUBECONFIG": str(running.kubeconfig)}
        http = HttpApi(kubeconfig.find(variables), variables)
        yield http
        http.close()
        assert running.unknown_fields == []


def small() -> Object:
    """A valid JobSet with all parts that have rules."""
    document = job_set("small", "true", hosts=2, slices=2)
    spec = document["spec"]
    head = copy.deepcopy(spec["replicatedJobs"][0]) | {"name": "head", "replicas": 1}
    spec["replicatedJobs"].insert(0, head)
    spec["replicatedJobs"][1]["dependsOn"] = [{"name": "head", "status": "Ready"}]
    spec["coordinator"] = {"replicatedJob": "head"}
    spec["failurePolicy"] = {"rules": [{"name": "code", "action": "FailJobSet"}]}
    spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["head"]}
    return document


def put(document: Object, path: str, value: object) -> None:
    """Set the value at a path such as spec.replicatedJobs.0.name; None removes it."""
    *parts, last = path.split(".")
    for part in parts:
        document = document[int(part)] if part.isdigit() else document.setdefault(part, {})
    if value is None:
        document.pop(last)
    else:
        document[last] = value


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_rendered_is_taken(api: HttpApi, name: str) -> None:
    for document in RENDERED[name]:
        rendered = json.loads(json.dumps(document).replace("job-00c0ffee", LONGEST_ID))
        rendered["metadata"].pop("namespace", None)
        resource = BY_KIND.get((rendered["apiVersion"], rendered["kind"]))
        if resource is None:
            continue  # Secrets are created with their values.
        api.create(resource, rendered)
        api.delete(resource, rendered["metadata"]["name"])


REFUSED = {
    "name too long for pods": ("metadata.name", "n" * 50, "pod names"),
    "name too long for the coordinator": ("metadata.name", "n" * 30, "coordinator"),
    "name that begins with a digit": ("metadata.name", "1-small", "replicatedJobs[0].name"),
    "name with a dot": ("metadata.name", "small.job", "replicatedJobs[0].name"),
    "group too long": ("spec.replicatedJobs.0.groupName", "g" * 64, "groupName"),
    "group with capitals": ("spec.replicatedJobs.0.groupName", "Heads", "groupName"),
    "group with a number": ("spec.replicatedJobs.0.groupName", 1, "type string"),
    "subdomain too long": ("spec.network.subdomain", "s" * 64, "subdomain"),
    "subdomain with a dot": ("spec.network.subdomain", "a.b", "subdomain"),
    "network of a wrong type": ("spec.network.enableDNSHostnames", "yes", "type boolean"),
    "manager without a domain": ("spec.managedBy", "kueue", "managedBy"),
    "manager too long": ("spec.managedBy", "example.com/" + "m" * 60, "managedBy"),
    "replicas of a wrong type": ("spec.replicatedJobs.0.replicas", "1", "type integer"),
    "replicas of more than 32 bits": ("spec.replicatedJobs.0.replicas", 2**31, "32 bits"),
    "too many pods": ("spec.replicatedJobs.1.replicas", 2**30, "too many pods"),
    "no template": ("spec.replicatedJobs.1.template", None, "replicatedJobs[1].template"),
    "two of one name": ("spec.replicatedJobs.1.name", "head", "Duplicate"),
    "the first depends": ("spec.replicatedJobs.0.dependsOn", [], "first"),
    "depends on an unknown one": (
        "spec.replicatedJobs.1.dependsOn",
        [{"name": "nobody", "status": "Ready"}],
        "nobody",
    ),
    "depends on an unknown state": (
        "spec.replicatedJobs.1.dependsOn",
        [{"name": "head", "status": "Started"}],
        "Started",
    ),
    "depends on too many": (
        "spec.replicatedJobs.1.dependsOn",
        [{"name": "head", "status": "Ready"}] * 6,
        "at most 5",
    ),
    "order besides dependencies": (
        "spec.startupPolicy",
        {"startupPolicyOrder": "InOrder"},
        "exclusive",
    ),
    "order without a word": ("spec.startupPolicy", {}, "startupPolicyOrder"),
    "success of an unknown one": ("spec.successPolicy.targetReplicatedJobs", ["no"], "'no'"),
    "success without an operator": ("spec.successPolicy.operator", None, "operator"),
    "success of most": ("spec.successPolicy.operator", "Most", "Unsupported"),
    "rule without an action": ("spec.failurePolicy.rules.0.action", None, "action"),
    "rule with an unknown action": ("spec.failurePolicy.rules.0.action", "Retry", "Retry"),
    "rule that needs a gate": ("spec.failurePolicy.rules.0.action", "RestartJob", "gate"),
    "rule with a hyphen in its name": ("spec.failurePolicy.rules.0.name", "taken-away", "name"),
    "rule with a long name": ("spec.failurePolicy.rules.0.name", "r" * 129, "128"),
    "rule for an unknown one": (
        "spec.failurePolicy.rules.0.targetReplicatedJobs",
        ["nobody"],
        "nobody",
    ),
    "rule for an unknown reason": (
        "spec.failurePolicy.rules.0.onJobFailureReasons",
        ["Tired"],
        "Tired",
    ),
    "rules of one name": (
        "spec.failurePolicy.rules",
        [{"name": "code", "action": "FailJobSet"}] * 2,
        "several",
    ),
    "restarts of a wrong type": ("spec.failurePolicy.maxRestarts", 1.5, "type integer"),
    "restarts in place": ("spec.failurePolicy.restartStrategy", "InPlaceRestart", "gate"),
    "unknown strategy": ("spec.failurePolicy.restartStrategy", "Never", "Never"),
    "coordinator without a name": ("spec.coordinator", {}, "replicatedJob"),
    "coordinator in an unknown one": ("spec.coordinator.replicatedJob", "nobody", "nobody"),
    "coordinator in an unknown Job": ("spec.coordinator.jobIndex", 1, "job index 1"),
    "coordinator before the first": ("spec.coordinator.podIndex", -1, "pod index -1"),
    "coordinator in an unknown pod": ("spec.coordinator.podIndex", 2, "pod index 2"),
    "coordinator of no index": (
        "spec.replicatedJobs.0.template.spec.completionMode",
        "NonIndexed",
        "Indexed",
    ),
    "negative time to live": ("spec.ttlSecondsAfterFinished", -1, "ttlSecondsAfterFinished"),
}


def test_a_small_jobset_is_taken(api: HttpApi) -> None:
    api.create(JOBSETS, small())
    api.delete(JOBSETS, "small")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(api: HttpApi, case: str) -> None:
    path, value, message = REFUSED[case]
    document = small()
    put(document, path, value)
    with pytest.raises(RefusedCall) as caught:
        api.create(JOBSETS, document)
    assert message in str(caught.value)


UNKNOWN = {
    "spec.ttlSecondAfterFinished": 1,
    "spec.network.subDomain": "a",
    "spec.failurePolicy.rules.0.onJobFailureReason": [],
    "spec.replicatedJobs.0.parallelism": 1,
    "spec.replicatedJobs.0.template.spec.template.spec.tolerance": [],
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_fields_are_found_at_any_depth(api: HttpApi, path: str) -> None:
    document = small()
    put(document, path, UNKNOWN[path])
    with pytest.raises(RefusedCall, match=path.rpartition(".")[2]):
        api.create(JOBSETS, document)


# -- updates ---------------------------------------------------------------------------------------

POD = "replicatedJobs.0.template.spec.template."
CHANGES = [
    ("replicatedJobs.0.replicas", 3, False),
    ("replicatedJobs.0.template.spec.parallelism", 3, False),
    (POD + "spec.nodeSelector", {"pool": "a"}, False),
    ("network.subdomain", "other", False),
    ("successPolicy.operator", "Any", False),
    ("failurePolicy.maxRestarts", 3, False),
    ("failurePolicy", None, True),
    ("startupPolicy", {"startupPolicyOrder": "AnyOrder"}, True),
    ("managedBy", "example.com/other", False),
    ("coordinator.podIndex", 1, True),
    ("ttlSecondsAfterFinished", 5, True),
    ("suspend", True, True),
]
SUSPENDED = [
    (POD + "spec.nodeSelector", {"pool": "a"}, True),
    (POD + "spec.tolerations", [{"operator": "Exists"}], True),
    (POD + "metadata.labels", {"admitted": "yes"}, True),
    (POD + "spec.containers", [], False),
    ("replicatedJobs.0.replicas", 3, False),
]


@pytest.mark.parametrize(
    ("suspended", "path", "value", "taken"),
    [(False, *change) for change in CHANGES] + [(True, *change) for change in SUSPENDED],
)
def test_what_may_change(suspended: bool, path: str, value: object, taken: bool) -> None:
    before = small()["spec"] | {"suspend": suspended}
    after = copy.deepcopy(before)
    put(after, path, value)
    if taken:
        jobset_rules.check_update("small", before, after)
        return
    with pytest.raises(Refused) as caught:
        jobset_rules.check_update("small", before, after)
    assert caught.value.code == 422
    assert "immutable" in str(caught.value.body)
