"""`kinetic doctor` with settings that name a cluster and a bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster.fake import FakeCluster
from doubles.cluster.kinds import CHECKPOINT_CONFIGURATIONS, CSI_DRIVERS, DEVICE_CLASSES
from doubles.gcs import Double, serving
from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, MULTI_TIER_DRIVER
from kinetic._client.doctor import examination, probes
from kinetic._client.doctor.probes import Machine
from kinetic.cli.root import call

MACHINE = Machine("linux", (3, 11, 7), {"jax": "0.7.1"}, 16 << 30, namespaces=True, cpus=2)
OF_CLUSTERS = {"cluster", "JobSet", "rights", "service account", "node pools", "Kueue"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no zygote, and report no problem of this machine."""
    monkeypatch.setenv("KINETIC_PRELOAD", "off")
    monkeypatch.setattr(probes, "read_machine", lambda: MACHINE)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("google.cloud.storage")
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        yield double


@pytest.fixture
def configured(
    cluster: FakeCluster, bucket: Double, monkeypatch: pytest.MonkeyPatch
) -> FakeCluster:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("KINETIC_CLUSTER", "fake")
    monkeypatch.setenv("KINETIC_STORE", "gs://bucket/doctor")
    return cluster


def examined() -> dict[str, tuple[str, str]]:
    findings = examination.examine().findings
    return {f.check: (str(f.level), f.detail) for f in findings}


def test_a_cluster_in_order(
    configured: FakeCluster, bucket: Double, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["doctor", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    findings = {f["check"]: f for f in document["findings"]}
    assert {findings[name]["level"] for name in (*OF_CLUSTERS, "store access")} == {"ok"}
    assert "tpu-v6e-slice" in findings["node pools"]["detail"]
    assert configured.url in findings["cluster"]["detail"]
    assert not list(bucket.buckets.names("bucket"))


def test_what_a_cluster_lacks(configured: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    configured.remove_job_sets()
    monkeypatch.setenv("KINETIC_SERVICE_ACCOUNT", "nobody")
    findings = examined()
    assert findings["JobSet"][0] == "warn"
    assert findings["service account"] == ("problem", "nobody does not exist")


def test_jobset_is_tried_out(configured: FakeCluster) -> None:
    assert examined()["JobSet"] == ("ok", "is installed, and takes jobs of several hosts")
    assert configured.objects("jobsets") == []
    configured.api.job_set_controller = False
    level, detail = examined()["JobSet"]
    assert (level, "only the definition of JobSets is installed" in detail) == ("problem", True)
    configured.api.job_set_controller = True
    configured.api.webhook_down = True
    level, detail = examined()["JobSet"]
    assert (level, "webhook" in detail) == ("problem", True)


def test_the_queue_that_settings_name(
    configured: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_QUEUE", "team-a")
    assert examined()["Kueue"][0] == "problem"
    configured.install_kueue({"team-b": {"cpu": "4"}})
    level, detail = examined()["Kueue"]
    assert (level, "The queue 'team-a' does not exist in namespace" in detail) == (
        "problem",
        True,
    ), detail
    monkeypatch.setenv("KINETIC_QUEUE", "team-b")
    assert examined()["Kueue"] == ("ok", "is installed; the queue team-b admits jobs")


def test_a_cluster_that_is_away(configured: FakeCluster) -> None:
    configured.stop_server()
    findings = examined()
    assert findings["cluster"][0] == "problem"
    assert configured.url in findings["cluster"][1]
    assert not findings.keys() & (OF_CLUSTERS - {"cluster"})
    assert findings["store access"][0] == "ok"


def test_a_cluster_that_no_kubeconfig_knows(
    configured: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_CLUSTER", "absent")
    level, detail = examined()["cluster"]
    assert level == "problem"
    assert "absent" in detail


def test_a_profile_names_it(configured: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETIC_CLUSTER")
    assert call(["profile", "create", "work", "--cluster", "fake"]) == 0
    assert examined()["cluster"][0] == "ok"


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_backend_of_this_machine_asks_no_cluster(
    configured: FakeCluster, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("KINETIC_BACKEND", backend)
    assert not examined().keys() & OF_CLUSTERS
    assert not configured.requests


def test_without_a_cluster_nothing_is_asked(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert not examined().keys() & {*OF_CLUSTERS, "store access"}
    assert not cluster.requests


def test_pods_do_not_reach_a_folder(
    configured: FakeCluster, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.delenv("KINETIC_STORE")
    level, detail = examined()["store access"]
    assert (level, str(home) in detail) == ("problem", True)
    monkeypatch.setenv("KINETIC_POD_STORE", f"file://{home}")
    assert examined()["store access"][0] == "ok"


def test_a_bucket_is_tried_out(bucket: Double) -> None:
    (finding,) = probes.access("gs://bucket/jobs", has_cluster=True, pods_store="")
    assert finding.level == "ok"
    assert not list(bucket.buckets.names("bucket"))


def test_a_bucket_that_is_not_there(bucket: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_STORE", "gs://absent/jobs")
    level, detail = examined()["store access"]
    assert level == "problem"
    assert "gs://absent" in detail


def test_a_bucket_that_one_may_not_use(bucket: Double) -> None:
    bucket.denied.add("storage.objects.create")
    (finding,) = probes.access("gs://bucket", has_cluster=True, pods_store="")
    assert "storage.objects.create" in finding.detail


def test_what_settings_ask_for_in_addition(
    configured: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_STORAGE", "multi-tier")
    monkeypatch.setenv("KINETIC_NETWORK_DEVICES", "all")
    findings = examined()
    assert findings["multi-tier"][0] == findings["network devices"][0] == "problem"
    assert "is not enabled" in findings["multi-tier"][1]
    configured.store.create(CSI_DRIVERS, {"metadata": {"name": MULTI_TIER_DRIVER}})
    configured.store.create(DEVICE_CLASSES, {"metadata": {"name": DEVICE_CLASS}})
    assert "has no CheckpointConfiguration" in examined()["multi-tier"][1]
    configured.api.discovery.custom.add(CHECKPOINT_CONFIGURATIONS)
    spec = {"cloudStorageBucketName": "b", "inMemoryVolumeSize": "60Gi"}
    configured.store.create(CHECKPOINT_CONFIGURATIONS, {"metadata": {"name": "c"}, "spec": spec})
    findings = examined()
    assert findings["multi-tier"] == ("ok", "60Gi for each node of c")
    assert findings["network devices"] == ("ok", "pods can claim them")
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "1")
    assert not examined().keys() & {"multi-tier", "network devices"}
