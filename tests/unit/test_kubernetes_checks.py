"""What a cluster's answers mean for the doctor, a preflight and the list of accelerators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doubles.cluster.roles import grants_of
from test_kubernetes_waiting import node

from kinetic._backends.kubernetes import checks
from kinetic._backends.kubernetes.addons import Asked
from kinetic._backends.kubernetes.api import Api, ObjectList, Selector, Version
from kinetic._backends.kubernetes.checks import (
    Facts,
    checks_of,
    gather,
    why_not,
)
from kinetic._backends.kubernetes.controllers import JobSets, Queues
from kinetic._backends.kubernetes.errors import Forbidden
from kinetic._backends.kubernetes.resources import (
    DEPLOYMENTS,
    JOBS,
    JOBSETS,
    NODES,
    PODS,
    Resource,
)
from kinetic._backends.kubernetes.rights import RIGHTS, Need, Right, list_relevant
from kinetic._core.findings import Level
from kinetic.errors import BackendUnavailable, NotFound

WELL = Facts(
    "https://c",
    "ml",
    version=Version("v1.33.4", 1, 33),
    rights=dict.fromkeys(list_relevant(), True),
    jobsets=JobSets(True),
    nodes=[node("n0", "tpu", "4x4")],
    service_account="kinetic",
    has_account=True,
)


def without(*rights: tuple[str, Resource]) -> dict[Right, bool]:
    return {right: (right.verb, right.resource) not in rights for right in list_relevant()}


def test_a_cluster_that_is_well() -> None:
    found = checks_of(WELL)
    assert {c.level for c in found} == {Level.OK}
    assert [c.check for c in found][:3] == ["cluster", "JobSet", "rights"]
    assert "tpu (tpu-v6e-slice 4x4, 1 node)" in [c.detail for c in found]
    assert why_not(WELL, hosts=4) == ""


@pytest.mark.parametrize(
    ("change", "name", "level", "one_host", "four_hosts"),
    [
        (
            {"jobsets": JobSets()},
            "JobSet",
            Level.WARN,
            "",
            "The cluster does not know jobsets",
        ),
        (
            {"rights": without(("create", JOBS), ("list", PODS))},
            "rights",
            Level.PROBLEM,
            "You may not create jobs.batch; list pods in namespace ml.",
            "You may not create jobs.batch; list pods in namespace ml.",
        ),
        (
            {"rights": without(("create", JOBSETS), ("delete", JOBSETS))},
            "rights",
            Level.PROBLEM,
            "",
            "You may not create, delete jobsets.jobset.x-k8s.io in namespace ml.",
        ),
        ({"rights": without(("list", NODES))}, "rights", Level.WARN, "", ""),
        ({"rights": without(("delete", PODS))}, "rights", Level.WARN, "", ""),
        (
            {"has_account": False},
            "service account",
            Level.PROBLEM,
            "The service account kinetic does not exist in namespace ml. Create it",
            "The service account kinetic does not exist",
        ),
        ({"version": Version("v1.22.0", 1, 22)}, "cluster", Level.WARN, "", ""),
        ({"jobsets": JobSets(True, "0.8.1", is_old=True)}, "JobSet", Level.WARN, "", ""),
        ({"jobsets": JobSets(True, fault="No.")}, "JobSet", Level.PROBLEM, "", ""),
        (
            {"queues": Queues(queue="team-a")},
            "Kueue",
            Level.PROBLEM,
            "The cluster has no Kueue, so no queue team-a can admit the job",
            "The cluster has no Kueue",
        ),
        ({"queues": Queues(True, "", "team-a", False)}, "Kueue", Level.PROBLEM, "", ""),
        ({"queues": Queues(True, "", "team-a", True, "Stopped")}, "Kueue", Level.WARN, "", ""),
    ],
)
def test_what_is_missing_is_named(
    change: dict[str, Any], name: str, level: Level, one_host: str, four_hosts: str
) -> None:
    facts = replace(WELL, **change)
    bad = [c for c in checks_of(facts) if c.level is not Level.OK]
    assert [(c.check, c.level) for c in bad] == [(name, level)]
    assert all(c.remedy for c in bad)
    for hosts, words in ((1, one_host), (4, four_hosts)):
        said = why_not(facts, hosts=hosts)
        assert said.startswith(words)
        assert bool(said) == bool(words)


class FakeApi:
    server, namespace = "https://c", "ml"

    def __init__(self, *, away: bool = False, may: bool = True) -> None:
        self.away, self.allowed = away, may

    def version(self) -> Version:
        if self.away:
            raise BackendUnavailable("It does not answer.")
        return Version("v1.33.4", 1, 33)

    def may(self, _verb: str, _resource: Resource) -> bool:
        return self.allowed

    def knows(self, resource: Resource) -> bool:
        return resource == JOBSETS

    def create(
        self, _resource: Resource, document: dict[str, Any], *, dry_run: bool
    ) -> dict[str, Any]:
        assert dry_run
        return document | {"spec": document["spec"] | {"successPolicy": {"operator": "All"}}}

    def get(self, _resource: Resource, name: str, *, namespace: str = "") -> dict[str, Any]:
        if name not in ("kinetic", "default"):
            raise NotFound("There is none.")
        return {}

    def list(self, _resource: Resource, _selection: Selector = Selector()) -> ObjectList:  # noqa: B008
        if not self.allowed:
            raise Forbidden("You may not list nodes.")
        return ObjectList((node("n0", "tpu", "4x4"),), "1")


def gathered(account: str = "kinetic", **settings: Any) -> Facts:
    api: Api = FakeApi(**settings)  # type: ignore[assignment]
    return gather(api, service_account=account)


def test_a_cluster_is_asked() -> None:
    assert gathered() == replace(WELL, nodes=gathered().nodes)
    assert gathered("other").has_account is False
    assert gathered(may=False).nodes is None
    assert why_not(gathered(may=False), hosts=1).startswith("You may not create, get, list, delete")


def test_a_cluster_that_does_not_answer() -> None:
    (found,) = checks_of(gathered(away=True))
    assert (found.check, found.level, found.detail) == (
        "cluster",
        Level.PROBLEM,
        "https://c, namespace ml: It does not answer.",
    )
    assert why_not(gathered(away=True), hosts=1) == "It does not answer."


def test_node_pools_are_listed_by_the_names_that_options_take() -> None:
    nodes = [
        *(node(f"a{n}", "big", "4x4") for n in range(7)),
        node("b", "odd", "3x3"),
        {"metadata": {"name": "cpu", "labels": {}}, "status": {}},
    ]
    machine = {"node.kubernetes.io/instance-type": "ct6e-standard-4t"}
    for made in nodes[:7]:
        made["metadata"]["labels"] |= machine
    big, odd = checks.live_accelerators(nodes)
    assert (big.name, big.pool, big.slices) == ("tpu-v6e-16", "big", 1)
    assert (odd.name, odd.slices) == ("", 0)


def test_the_roles_of_the_documentation_are_the_rights_that_are_checked() -> None:
    pytest.importorskip("yaml")
    for kind in ("Role", "ClusterRole"):
        assert grants_of(kind) == {
            (right.verb, right.resource.full_name)
            for right in RIGHTS
            if (kind == "Role") == (right.resource.namespaced and right.resource != DEPLOYMENTS)
        }


def test_what_is_not_asked_for_needs_no_rights() -> None:
    plain = {right.need for right in list_relevant()}
    assert not plain & {Need.NETWORKS, Need.QUEUES, Need.CHECKS}
    assert {r.need for r in list_relevant(Asked(networks=True, queue="q"))} == {*Need} - {
        Need.CHECKS
    }
