"""The check before submission: a dry run, other needs of a job, and one check for many jobs."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_answers import ClusterAnswers

from kinetic._backends.kubernetes import preflight
from kinetic._backends.kubernetes.errors import Forbidden, NotInstalled, Refused
from kinetic._backends.kubernetes.preflight import Needs
from kinetic.errors import BackendUnavailable, KineticError, NotFound, PreflightError

JOB = [
    {"apiVersion": "batch/v1", "kind": "Job"},
    {"apiVersion": "v1", "kind": "Secret"},
]
CLAIM = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
ALL = Needs("kinetic", "team-a", multi_tier=True, networks=True, buckets=True)


@pytest.fixture
def cluster() -> ClusterAnswers:
    answers = ClusterAnswers()
    answers.objects["checkpointconfigurations"] = {"metadata": {"name": "c"}}
    return answers


def check(cluster: Any, needs: Needs = ALL, *more: dict[str, Any], clock: float = 0.0) -> None:
    preflight.check(cluster, [*JOB, *more], needs, clock=lambda: clock)


def test_a_plain_job_is_two_questions(cluster: ClusterAnswers) -> None:
    check(cluster, Needs())
    assert cluster.calls == {"create jobs": 1, "create secrets": 1}


def test_many_jobs_ask_once(cluster: ClusterAnswers) -> None:
    for _ in range(200):
        check(cluster, clock=5.0)
    assert set(cluster.calls.values()) == {1, 2}, "two drivers are read"
    check(cluster, Needs("other"), clock=5.0)
    assert cluster.calls["create jobs"] == 2
    check(cluster, clock=5.0 + preflight.COUNTS_S)
    assert cluster.calls["create jobs"] == 3


REFUSALS: list[tuple[tuple[str, str], KineticError, str]] = [
    (("create", "jobs"), Forbidden("You may not create jobs."), "You may not create jobs"),
    (("create", "secrets"), Forbidden("You may not create secrets."), "may not create secrets"),
    (("create", "jobs"), Refused("The namespace ml does not exist."), "namespace ml does not"),
    (("create", "jobs"), BackendUnavailable("It does not answer."), "It does not answer"),
    (
        ("create", "resourceclaimtemplates"),
        NotInstalled("The cluster does not know them."),
        r"has no resourceclaimtemplates.* \(v1\)\. Ask an administrator for node pools with GKE's",
    ),
    (("get", "kinetic"), NotFound("no"), "service account 'kinetic' does not exist in"),
    (("get", "localqueues"), NotInstalled("no"), "has no Kueue, so the job would start at once"),
    (("get", "team-a"), NotFound("no"), "The queue 'team-a' does not exist in namespace 'ml'"),
    (("get", preflight.MULTI_TIER_DRIVER), NotFound("no"), "HighScaleCheckpointing"),
    (("get", preflight.GCSFUSE_DRIVER), NotFound("no"), "enable the add-on GcsFuseCsiDriver"),
    (("list", "checkpointconfigurations"), NotInstalled("no"), "has no CheckpointConfiguration"),
    (("get", preflight.DEVICE_CLASS), NotFound("no"), "has no network devices of class"),
]


@pytest.mark.parametrize(("where", "error", "words"), REFUSALS)
def test_what_a_job_needs_and_a_cluster_lacks(
    cluster: ClusterAnswers, where: tuple[str, str], error: KineticError, words: str
) -> None:
    cluster.problems[where] = error
    with pytest.raises((PreflightError, BackendUnavailable), match=words):
        check(cluster, ALL, CLAIM)
    cluster.problems.clear()
    check(cluster, ALL, CLAIM)  # a refusal is not remembered


def test_what_may_not_be_looked_up_may_be_there(cluster: ClusterAnswers) -> None:
    for verb in ("get", "list"):
        cluster.problems[verb, "*"] = Forbidden("You may not.")
    check(cluster)


def test_an_older_kueue_is_asked_for_its_queue(cluster: ClusterAnswers) -> None:
    first = iter([NotInstalled("v1beta2")])

    def get(resource: Any, name: str) -> dict[str, Any]:
        if resource.plural == "localqueues" and (error := next(first, None)):
            raise error
        return {}

    cluster.get = get  # type: ignore[method-assign]
    check(cluster)


def test_a_webhook_that_knows_no_dry_run_says_nothing(cluster: ClusterAnswers) -> None:
    message = 'admission webhook "policy.example.com" does not support dry run'
    cluster.problems["create", "jobs"] = Refused(message)
    check(cluster)


def _job(**resources: dict[str, str]) -> dict[str, Any]:
    container = {"name": "kinetic", "resources": resources}
    return JOB[0] | {"spec": {"template": {"spec": {"containers": [container]}}}}


@pytest.mark.parametrize("requests", [{}, {"memory": "8Gi"}])
def test_a_cluster_that_limits_memory_by_itself_is_warned_about(
    cluster: ClusterAnswers, caplog: Any, requests: dict[str, str]
) -> None:
    limited = requests or {"memory": "2Gi"}
    stored = _job(limits=limited, requests=limited)
    cluster.create = lambda *_, **__: stored  # type: ignore[method-assign]
    preflight.check(cluster, [_job(requests=requests)], Needs(), clock=lambda: 0.0)  # type: ignore[arg-type]
    warned = ["2Gi, as GKE's Autopilot does" in record.getMessage() for record in caplog.records]
    assert warned == ([] if requests else [True])


def test_a_pod_that_is_larger_than_all_machines_is_refused(cluster: ClusterAnswers) -> None:
    cluster.nodes[0]["status"]["allocatable"] = {"cpu": "80", "memory": "320Gi"}
    for _ in range(2):
        preflight.check(cluster, [_job(requests={"cpu": "60"}), JOB[1]], Needs(), clock=lambda: 0.0)
    assert cluster.calls["list nodes"] == 1
    with pytest.raises(PreflightError, match=r"^No node has the 500 CPUs that a pod requests"):
        preflight.check(
            cluster, [_job(requests={"cpu": "500"}), JOB[1]], Needs(), clock=lambda: 0.0
        )
    with pytest.raises(PreflightError, match=r"the 500Gi of memory .* largest has 320Gi"):
        preflight.check(
            cluster, [_job(requests={"memory": "500Gi"}), JOB[1]], Needs(), clock=lambda: 0.0
        )
    cluster.nodes[0]["spec"]["providerID"] = "gce://p/z/n"  # A cloud may add larger nodes.
    preflight.check(cluster, [_job(requests={"cpu": "500"}), JOB[1]], Needs(), clock=lambda: 0.0)
    del cluster.nodes[0]["spec"]["providerID"]
    cluster.problems["list", "nodes"] = Forbidden("You may not list nodes.")
    preflight.check(cluster, [_job(requests={"cpu": "501"}), JOB[1]], Needs(), clock=lambda: 0.0)
