"""Whether a cluster has what jobs ask of it in addition: memory for checkpoints, networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_kubernetes_waiting import node

from kinetic._backends.kubernetes import addons, checks
from kinetic._backends.kubernetes.addons import Asked, MultiTier, Networks
from kinetic._backends.kubernetes.api import Api, ObjectList, Version
from kinetic._backends.kubernetes.errors import Forbidden, NotInstalled
from kinetic._backends.kubernetes.resources import (
    CHECKPOINT_CONFIGURATIONS,
    CLAIM_TEMPLATES,
    CSI_DRIVERS,
    JOBSETS,
    NODES,
    SERVICE_ACCOUNTS,
    Resource,
)
from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, GCSFUSE_DRIVER, MULTI_TIER_DRIVER
from kinetic._core.findings import Finding, Level
from kinetic._core.quantities import bytes_of
from kinetic.errors import NotFound, PreflightError

Document = dict[str, Any]
TPU_ONLY = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
SELECTOR = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}


def configured(**changes: Any) -> Document:
    spec = {
        "cloudStorageBucketName": "checkpoints",
        "nodeSelector": SELECTOR,
        "tolerations": [TPU_ONLY],
        "inMemoryVolumeSize": "60Gi",
    }
    return {"metadata": {"name": "cpc"}, "spec": spec | changes}


def tpu_node(pool: str = "tpus", memory: str = "737280Mi", **labels: str) -> Document:
    made = node(f"gke-{pool}-0", pool, "4x4", **labels)
    made["spec"]["taints"] = [{"key": "google.com/tpu", "value": "x", "effect": "NoSchedule"}]
    made["status"]["allocatable"]["memory"] = memory
    return made


WELL = MultiTier(True, (configured(),))
OTHERS = {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice"}


def test_memory_on_all_nodes_with_chips() -> None:
    plain = {"metadata": {"name": "cpu"}, "spec": {}, "status": {}}
    assert addons.check_memory(WELL, [tpu_node(), plain]) == []
    assert addons.check_memory(WELL, []) == [], "pools may be scaled to zero"
    assert addons.describe_multi_tier(WELL) == "60Gi for each node of cpc"
    unknown = MultiTier(None, None)
    assert addons.check_memory(unknown, [tpu_node()]) == []
    assert "may not be listed" in addons.describe_multi_tier(unknown)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (MultiTier(False, ()), "is not enabled"),
        (MultiTier(False, None), "is not enabled"),
        (MultiTier(True, ()), "has no CheckpointConfiguration"),
        (MultiTier(None, ()), "has no CheckpointConfiguration"),
        ({"cloudStorageBucketName": ""}, "the CheckpointConfiguration cpc names no bucket"),
        ({"cloudStorageBucketName": "gs://b"}, "has the bucket gs://b: the name alone"),
        ({"inMemoryVolumeSize": None}, "has no size of memory: inMemoryVolumeSize is None"),
        ({"inMemoryVolumeSize": "much"}, "has no size of memory: inMemoryVolumeSize is 'much'"),
        ({"tolerations": []}, "does not tolerate google.com/tpu, which the nodes of tpus have"),
        (
            {"tolerations": [TPU_ONLY | {"operator": "Equal", "value": "y"}]},
            "does not tolerate google.com/tpu",
        ),
        (
            {"inMemoryVolumeSize": "720Gi"},
            "asks for 720Gi of memory, and nodes of tpus have 737280Mi",
        ),
        ({"nodeSelector": OTHERS}, "no CheckpointConfiguration selects the nodes of tpus"),
    ],
)
def test_what_keeps_pods_from_their_memory(found: Any, words: str) -> None:
    seen = found if isinstance(found, MultiTier) else MultiTier(True, (configured(**found),))
    (trouble,) = addons.check_memory(seen, [tpu_node()])
    assert words in trouble.detail
    assert trouble.level is Level.PROBLEM
    assert trouble.remedy


@pytest.mark.parametrize(
    "tolerations",
    [
        [{"operator": "Exists"}],
        [TPU_ONLY | {"effect": ""}],
        [{"key": "google.com/tpu", "operator": "Equal", "value": "x"}],
    ],
)
def test_tolerations(tolerations: list[Document]) -> None:
    seen = MultiTier(True, (configured(tolerations=tolerations),))
    assert addons.check_memory(seen, [tpu_node()]) == []


def test_a_configuration_that_the_cluster_refused() -> None:
    seen = configured() | {"status": {"error": "bad bucket"}}
    (trouble,) = addons.check_memory(MultiTier(True, (seen,)), [])
    assert "was not accepted: bad bucket" in trouble.detail


def test_memory_on_some_pools_only() -> None:
    selector = {"cloud.google.com/gke-nodepool": "tpus"}
    seen = MultiTier(True, (configured(nodeSelector=selector),))
    (trouble,) = addons.check_memory(seen, [tpu_node(), tpu_node("others")])
    assert "selects the nodes of others" in trouble.detail
    assert trouble.level is Level.WARN


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("1Ki", 1024), ("1.5G", 1_500_000_000), ("7", 7), ("2k", 2000), ("", 0), ("3 Gi", 0)],
)
def test_quantities(quantity: str, size: int) -> None:
    assert bytes_of(quantity) == size


def test_network_devices() -> None:
    assert addons.check_networks(Networks(True, True)) == []
    assert addons.check_networks(Networks(True, None)) == []
    (old,) = addons.check_networks(Networks(False, None))
    assert "It needs Kubernetes 1.34" in old.remedy
    (none,) = addons.check_networks(Networks(True, False))
    assert "no network devices of class netdev.google.com" in none.detail


class Cluster:
    """Has what its keywords say; None for what the caller may not look up."""

    server, namespace = "https://addons", "ml"

    def __init__(
        self,
        *,
        driver: bool | None = True,
        configurations: tuple[Document, ...] | None = (configured(),),
        knows_claims: bool = True,
        devices: bool | None = True,
        may_claim: bool = True,
        fuse: bool | None = True,
    ) -> None:
        self.there = {MULTI_TIER_DRIVER: driver, GCSFUSE_DRIVER: fuse, DEVICE_CLASS: devices}
        self.configurations, self.knows_claims = configurations, knows_claims
        self.may_claim = may_claim
        self.asked: list[Resource] = []

    def version(self) -> Version:
        return Version("v1.34.1", 1, 34)

    def may(self, _verb: str, resource: Resource) -> bool:
        self.asked.append(resource)
        return self.may_claim or resource != CLAIM_TEMPLATES

    def knows(self, resource: Resource) -> bool:
        return resource == JOBSETS or (resource == CLAIM_TEMPLATES and self.knows_claims)

    def create(self, _resource: Resource, document: Document, *, dry_run: bool) -> Document:
        assert dry_run
        return document | {"spec": document["spec"] | {"successPolicy": {"operator": "All"}}}

    def get(self, resource: Resource, name: str, **_: str) -> Document:
        self.asked.append(resource)
        there = self.there.get(name, resource == SERVICE_ACCOUNTS)
        if there is None:
            raise Forbidden("You may not get it.")
        if not there:
            raise NotFound("There is none.")
        return {}

    def list(self, resource: Resource) -> ObjectList:
        self.asked.append(resource)
        if resource == NODES:
            return ObjectList((tpu_node(),), "1")
        assert resource == CHECKPOINT_CONFIGURATIONS
        if self.configurations is None:
            raise Forbidden("You may not list them.")
        if not self.configurations:
            raise NotInstalled("The cluster does not know them.")
        return ObjectList(self.configurations, "1")


BOTH = Asked(multi_tier=True, networks=True)
ALL = Asked(multi_tier=True, networks=True, buckets=True)


def gathered(asked: Asked, **lacks: Any) -> dict[str, Finding]:
    api: Api = Cluster(**lacks)  # type: ignore[assignment]
    return {check.check: check for check in checks.checks_of(checks.gather(api, asked=asked))}


@pytest.mark.parametrize(
    ("lacks", "name", "words"),
    [
        ({"driver": False}, "multi-tier", "is not enabled"),
        ({"configurations": ()}, "multi-tier", "has no CheckpointConfiguration"),
        ({"configurations": (configured(tolerations=[]),)}, "multi-tier", "does not tolerate"),
        ({"knows_claims": False}, "network devices", "does not know ResourceClaimTemplates"),
        ({"devices": False}, "network devices", "no network devices of class"),
        ({"may_claim": False}, "rights", "create resourceclaimtemplates.resource.k8s.io"),
    ],
)
def test_the_doctor_looks_for_what_settings_ask_for(
    lacks: dict[str, Any], name: str, words: str
) -> None:
    found = gathered(BOTH, **lacks)
    assert found[name].level is Level.PROBLEM
    assert words in found[name].detail
    assert not gathered(Asked(), **lacks).keys() & {"multi-tier", "network devices"}
    assert gathered(Asked(), **lacks)["rights"].level is Level.OK


def test_the_doctor_of_a_cluster_that_has_it_or_does_not_say() -> None:
    found = gathered(BOTH)
    assert {check.level for check in found.values()} == {Level.OK}
    assert found["multi-tier"].detail == "60Gi for each node of cpc"
    unknown = gathered(BOTH, driver=None, configurations=None, devices=None)
    assert {check.level for check in unknown.values()} == {Level.OK}


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ({"driver": False}, "Multi-tier checkpointing is not enabled in the cluster. Ask an"),
        ({"configurations": ()}, "so no node has its memory. Ask an administrator for one"),
        ({"devices": False}, "The cluster has no network devices of class netdev.google.com."),
        ({"may_claim": False}, "You may not create resourceclaimtemplates.resource.k8s.io"),
        ({"fuse": False}, "The cluster mounts no buckets: .* leave fuse=True away"),
    ],
)
def test_a_job_that_the_cluster_cannot_start_is_refused(lacks: dict[str, Any], words: str) -> None:
    api: Api = Cluster(**lacks)  # type: ignore[assignment]
    with pytest.raises(PreflightError, match=words):
        checks.check_job(api, 8, "kinetic", ALL)


def test_buckets_of_a_cluster_that_does_not_say_what_it_has_are_tried() -> None:
    api: Api = Cluster(fuse=None)  # type: ignore[assignment]
    checks.check_job(api, 8, "kinetic", ALL)


def test_a_job_that_asks_for_nothing_asks_nothing_and_an_answer_is_for_what_was_asked() -> None:
    cluster = Cluster(driver=False)
    api: Api = cluster  # type: ignore[assignment]
    checks.check_job(api, 8, "kinetic")
    assert not {CSI_DRIVERS, CHECKPOINT_CONFIGURATIONS, CLAIM_TEMPLATES} & {*cluster.asked}
    with pytest.raises(PreflightError, match="not enabled"):
        checks.check_job(api, 8, "kinetic", Asked(multi_tier=True))


@pytest.mark.parametrize(
    ("storage", "devices", "simulated", "expected"),
    [
        ("multi-tier", "2", False, BOTH),
        ("60Gi", None, False, Asked()),
        (None, "all", False, Asked(networks=True)),
        ("multi-tier", "2", True, Asked()),
    ],
)
def test_what_is_asked_for(
    storage: str | None, devices: str | None, simulated: bool, expected: Asked
) -> None:
    assert addons.list_asked(storage, devices, simulated=simulated) == expected
    more = addons.list_asked(storage, devices, simulated=simulated, buckets=True)
    assert more == replace(expected, buckets=True)
