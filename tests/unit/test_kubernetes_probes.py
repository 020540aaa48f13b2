"""The doctor's findings on a cluster, the rights of roles, and the list of accelerators."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_answers import ClusterAnswers
from doubles.cluster.roles import grants_of
from test_kubernetes_waiting import node

from kinetic._backends.kubernetes import nodes as pools
from kinetic._backends.kubernetes import probes
from kinetic._backends.kubernetes.api import Version
from kinetic._backends.kubernetes.errors import Forbidden, NotInstalled, Refused
from kinetic._backends.kubernetes.preflight import Needs
from kinetic._backends.kubernetes.rights import RIGHTS, Need, list_relevant
from kinetic._core.findings import Finding, Level
from kinetic.errors import BackendUnavailable, KineticError, NotFound

ALL = Needs("kinetic", "team-a", multi_tier=True, networks=True)
NO = Forbidden("You may not.")


@pytest.fixture
def cluster() -> ClusterAnswers:
    answers = ClusterAnswers()
    spec = {"inMemoryVolumeSize": "60Gi"}
    answers.objects["checkpointconfigurations"] = {"metadata": {"name": "c"}, "spec": spec}
    return answers


def examined(cluster: Any, needs: Needs = ALL) -> dict[str, Finding]:
    return {finding.check: finding for finding in probes.examine(cluster, needs)}


def test_a_cluster_that_is_well(cluster: ClusterAnswers) -> None:
    findings = examined(cluster)
    assert {f.level for f in findings.values()} == {Level.OK}
    assert list(findings)[:3] == ["cluster", "JobSet", "rights"]
    assert findings["node pools"].detail == "tpu (tpu-v6e-slice 4x4, 1 node)"
    assert findings["multi-tier"].detail == "60Gi for each node of c"
    assert not examined(cluster, Needs()).keys() & {"multi-tier", "network devices"}


INACTIVE = {
    "status": {"conditions": [{"type": "Active", "status": "False", "message": "It is stopped."}]}
}
FAULTS: list[tuple[dict[tuple[str, str], KineticError], str, Level, str]] = [
    ({("create", "jobsets"): NotInstalled("no")}, "JobSet", Level.WARN, "is not installed"),
    ({("create", "jobs"): NO}, "rights", Level.PROBLEM, "all jobs: create jobs.batch"),
    ({("list", "nodes"): NO}, "rights", Level.WARN, "why a job waits: list nodes"),
    ({("delete", "pods"): NO}, "rights", Level.WARN, "`kinetic jobs kill`: delete pods"),
    ({("get", "kinetic"): NotFound("no")}, "service account", Level.PROBLEM, "does not exist"),
    ({("get", "localqueues"): NotInstalled("no")}, "Kueue", Level.PROBLEM, "has no Kueue"),
    (
        {("get", "team-a"): NotFound("no")},
        "Kueue",
        Level.PROBLEM,
        "The queue 'team-a' does not exist",
    ),
    ({("get", "csidrivers"): NotFound("no")}, "multi-tier", Level.PROBLEM, "is not enabled"),
    ({("get", "deviceclasses"): NotFound("no")}, "network devices", Level.PROBLEM, "no network"),
]


@pytest.mark.parametrize(("problems", "check", "level", "words"), FAULTS)
def test_what_is_missing_is_named(
    cluster: ClusterAnswers,
    problems: dict[tuple[str, str], KineticError],
    check: str,
    level: Level,
    words: str,
) -> None:
    cluster.problems = problems
    bad = {name: f for name, f in examined(cluster).items() if f.level is not Level.OK}
    assert [*bad] == [check]
    assert bad[check].level is level
    assert words in bad[check].detail


@pytest.mark.parametrize(
    ("verb", "noun", "check"),
    [
        ("list", "nodes", "node pools"),
        ("get", "localqueues", "Kueue"),
        ("list", "checkpointconfigurations", "multi-tier"),
        ("create", "jobsets", "JobSet"),
    ],
)
def test_what_may_not_be_looked_up_is_no_problem(
    cluster: ClusterAnswers, verb: str, noun: str, check: str
) -> None:
    cluster.problems[verb, noun] = NO
    cluster.knows = lambda _: True  # type: ignore[method-assign]
    assert examined(cluster)[check].level is Level.OK


@pytest.mark.parametrize(
    "error", [Refused("The cluster refuses it."), BackendUnavailable("It is busy.")]
)
def test_a_jobset_that_is_refused_says_why(cluster: ClusterAnswers, error: KineticError) -> None:
    cluster.problems["create", "jobsets"] = error
    cluster.knows = lambda _: True  # type: ignore[method-assign]
    finding = examined(cluster)["JobSet"]
    assert (finding.level, finding.detail) == (
        Level.PROBLEM,
        f'the cluster refuses a JobSet. Its answer: "{error}"',
    )


def test_a_jobset_without_a_controller_takes_no_jobs(cluster: ClusterAnswers) -> None:
    cluster.has_controller = False
    assert "only the definition of JobSets is installed" in examined(cluster)["JobSet"].detail


def test_a_queue_that_is_stopped(cluster: ClusterAnswers) -> None:
    cluster.objects["localqueues"] = INACTIVE
    finding = examined(cluster)["Kueue"]
    assert (finding.level, finding.detail) == (
        Level.WARN,
        "the queue 'team-a' admits no jobs: It is stopped.",
    )


def test_a_configuration_that_the_cluster_refused(cluster: ClusterAnswers) -> None:
    cluster.objects["checkpointconfigurations"]["status"] = {"error": "no bucket"}
    assert "c was not accepted: no bucket" in examined(cluster)["multi-tier"].detail


def test_an_old_cluster(cluster: ClusterAnswers) -> None:
    cluster.text = Version("v1.22.0", 1, 22)
    assert examined(cluster)["cluster"].level is Level.WARN


@pytest.mark.parametrize("verb", ["version", "may"])
def test_a_cluster_that_does_not_answer(cluster: ClusterAnswers, verb: str) -> None:
    cluster.problems[verb, ""] = BackendUnavailable("It does not answer.")
    (finding,) = examined(cluster).values()
    where = f"{cluster.server}, namespace ml"
    assert (finding.level, finding.detail) == (Level.PROBLEM, f"{where}: It does not answer.")


def test_node_pools_are_listed_by_the_names_that_options_take() -> None:
    nodes = [
        *(node(f"a{n}", "big", "4x4") for n in range(7)),
        node("b", "odd", "3x3"),
        {"metadata": {"name": "cpu", "labels": {}}, "status": {}},
    ]
    machine = {"node.kubernetes.io/instance-type": "ct6e-standard-4t"}
    for answers in nodes[:7]:
        answers["metadata"]["labels"] |= machine
    big, odd = pools.live_accelerators(nodes)
    assert (big.name, big.pool, big.slices) == ("tpu-v6e-16", "big", 1)
    assert (odd.name, odd.slices) == ("", 0)


def test_the_roles_of_the_documentation_are_the_rights_that_are_checked() -> None:
    pytest.importorskip("yaml")
    for kind in ("Role", "ClusterRole"):
        assert grants_of(kind) == {
            (right.verb, right.resource.full_name)
            for right in RIGHTS
            if (kind == "Role") == right.resource.namespaced
        }


def test_what_is_not_asked_for_needs_no_rights() -> None:
    plain = {right.need for right in list_relevant()}
    assert not plain & {Need.NETWORKS, Need.QUEUES, Need.CHECKS}
    every = {right.need for right in list_relevant(networks=True, queue=True)}
    assert every == {*Need} - {Need.CHECKS}
