"""kinetic's API calls, and its explanations of pods and errors, against the double."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job, job_set
from kinetic._backends.kubernetes import errors, kubeconfig, probes
from kinetic._backends.kubernetes.api import CallLimits, Selector
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.diagnosis import JobCause, Observed, diagnose
from kinetic._backends.kubernetes.nodes import live_accelerators, pools_of
from kinetic._backends.kubernetes.preflight import Needs
from kinetic._backends.kubernetes.resources import (
    EVENTS,
    JOBS,
    JOBSETS,
    NODES,
    PODS,
)
from kinetic._backends.kubernetes.states import status_of
from kinetic._core.findings import Level
from kinetic._core.state import JobStatus
from kinetic.errors import BackendUnavailable, NotFound

PATIENCE_S = 100.0
QUICK = CallLimits(first_s=0.02, most_s=0.2, tries=4)


@pytest.fixture
def api(cluster: FakeCluster) -> Iterator[HttpApi]:
    variables = {"KUBECONFIG": str(cluster.kubeconfig), "PATH": os.defpath}
    http = HttpApi(kubeconfig.find(variables), variables, namespace="default", patience=QUICK)
    yield http
    http.close()


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(api: HttpApi, name: str) -> JobStatus:
    try:
        document = api.get(JOBS, name)
    except NotFound:
        return status_of(None, ()).phase
    return status_of(document, api.list(PODS, Selector(labels=f"job-name={name}")).items).phase


def test_a_job_from_creation_to_deletion(api: HttpApi, cluster: FakeCluster) -> None:
    created = api.create(JOBS, job("hello", "echo hi"))
    assert created["metadata"]["uid"]
    until(lambda: status(api, "hello") is JobStatus.SUCCEEDED)
    (pod,) = api.list(PODS).items
    assert cluster.log(pod["metadata"]["name"]) == "hi\n"
    with pytest.raises(errors.Conflict):
        api.create(JOBS, job("hello", "echo hi"))
    assert api.delete(JOBS, "hello", uid=created["metadata"]["uid"])
    assert not api.delete(JOBS, "hello")
    until(lambda: not api.list(PODS).items)


def test_a_creation_whose_answer_is_lost_makes_one_object(
    api: HttpApi, cluster: FakeCluster
) -> None:
    document = job("once", "echo hi")
    document["metadata"]["labels"] = {"kinetic.dev/job-id": "job-1"}
    cluster.faults.reset(verb="create", resource="jobs", after=True)
    assert api.create(JOBS, document)["metadata"]["name"] == "once"
    cluster.faults.fail(503, verb="create", resource="jobs", times=2)
    document["metadata"]["name"] = "twice"
    api.create(JOBS, document)
    assert len(api.list(JOBS).items) == 2


def test_discovery_rights_and_nodes(api: HttpApi, cluster: FakeCluster) -> None:
    assert api.knows(JOBSETS)
    assert api.version().major == 1
    assert api.may("create", JOBSETS)
    assert api.may("list", PODS)
    assert "tpu-v6e-slice" in [p.accelerator for p in pools_of(api.list(NODES).items)]
    cluster.remove_job_sets()
    assert not api.knows(JOBSETS)
    with pytest.raises(errors.NotInstalled):
        api.create(JOBSETS, job_set("x", "true", hosts=2))


def test_a_cluster_is_examined(api: HttpApi, cluster: FakeCluster) -> None:
    findings = probes.examine(api, Needs("kinetic"))
    assert {finding.level for finding in findings} == {Level.OK}
    assert [row.name for row in live_accelerators(api.list(NODES).items)] == ["tpu-v6e-16"]
    cluster.remove_job_sets()
    bad = {f.check for f in probes.examine(api, Needs("nobody")) if f.level is not Level.OK}
    assert bad == {"JobSet", "service account"}


def test_a_token_that_expires_is_read_anew(api: HttpApi, cluster: FakeCluster) -> None:
    cluster.expire_token()
    with pytest.raises(errors.Unauthorized):
        api.list(JOBS)
    cluster.renew_token()
    assert api.list(JOBS).items == ()


def test_a_server_that_is_down(api: HttpApi, cluster: FakeCluster) -> None:
    cluster.stop_server()
    with pytest.raises(
        BackendUnavailable, match=r"Could not list jobs\.batch in namespace default"
    ):
        api.list(JOBS)
    cluster.start_server()
    assert api.list(JOBS).items == ()


def test_what_is_wrong_is_found_from_live_objects(api: HttpApi) -> None:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "8x8",
    }
    document = job("nowhere", "echo hi")
    document["spec"]["template"]["spec"]["nodeSelector"] = selector
    api.create(JOBS, document)

    def kind() -> JobCause | None:
        diagnosis = diagnose(
            Observed(
                api.get(JOBS, "nowhere"),
                api.list(PODS).items,
                events=lambda name: (
                    api.list(EVENTS, Selector(fields=f"involvedObject.name={name}")).items
                ),
                nodes=api.list(NODES).items,
            ),
            now=time.time() + 600,
        )
        return diagnosis.kind if diagnosis and diagnosis.hopeless else None

    until(lambda: kind() is JobCause.NO_NODE_POOL)


@pytest.mark.parametrize("arguments", [["v6e"], ["v6e", "--json"], ["nothing"]])
def test_the_command_lists_what_the_cluster_has(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    from kinetic.cli.root import call

    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert call(["accelerators", "--live", *arguments]) == 0
    output = capsys.readouterr().out
    assert ("tpu-v6e-16" in output) == (arguments[0] == "v6e")


def test_the_command_names_the_cluster_that_is_not_there(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kinetic.cli.root import call

    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert call(["accelerators", "--live", "--cluster", "nope"]) != 0
    assert "to the cluster 'nope'" in capsys.readouterr().err
