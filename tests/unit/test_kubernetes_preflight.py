"""What is asked of a cluster before a job is sent: little, and once for many jobs."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from kinetic._backends.kubernetes import checks, rights
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.errors import Forbidden
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, Resource
from kinetic.errors import BackendUnavailable, NotFound, PreflightError

_numbers = itertools.count()


class Cluster:
    """Another one for each test. Lacks rights, JobSets or an account as told; may be away."""

    namespace = "ml"

    def __init__(self) -> None:
        self.server = f"https://c{next(_numbers)}"
        self.lacks: set[tuple[str, str]] = set()
        self.has_jobsets = self.answers = self.has_namespace = True
        self.account: type[Exception] | None = None
        self.asked: Counter[str] = Counter()

    def may(self, verb: str, resource: Resource) -> bool:
        self._asked("may")
        return (verb, resource.plural) not in self.lacks

    def knows(self, _resource: Resource) -> bool:
        self._asked("knows")
        return self.has_jobsets

    def get(self, _resource: Resource, name: str) -> dict[str, Any]:
        self._asked("get")
        if not self.has_namespace:
            raise NotFound("no")
        if self.account is not None and name == "kinetic":
            raise self.account("no")
        return {}

    def _asked(self, what: str) -> None:
        self.asked[what] += 1
        if not self.answers:
            raise BackendUnavailable("It does not answer.")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def check(cluster: Cluster, hosts: int = 1, clock: float = 0.0) -> None:
    api: Api = cluster  # type: ignore[assignment]
    checks.check_job(api, hosts, "kinetic", clock=lambda: clock)


def test_many_jobs_ask_once(cluster: Cluster) -> None:
    for _ in range(200):
        check(cluster, clock=5.0)
    assert cluster.asked == {"may": len(rights.list_needed(1)), "get": 1}
    check(cluster, hosts=4, clock=5.0)  # which needs other things
    assert cluster.asked["knows"] == 1
    check(cluster, clock=5.0 + checks.COUNTS_S)
    assert cluster.asked["get"] == 3


@pytest.mark.parametrize(
    ("lacks", "hosts", "words"),
    [
        (("create", "jobs"), 1, "You may not create jobs.batch in namespace ml"),
        (("list", "pods"), 4, "You may not list pods"),
        (("create", "secrets"), 1, "You may not create secrets"),
        (("delete", "jobsets"), 4, "You may not delete jobsets"),
        (("create", "jobsets"), 1, ""),
        (("create", "jobs"), 4, ""),
    ],
)
def test_a_right_without_which_nothing_works_is_missing(
    cluster: Cluster, lacks: tuple[str, str], hosts: int, words: str
) -> None:
    cluster.lacks = {lacks}
    if not words:
        check(cluster, hosts)
        return
    with pytest.raises(PreflightError, match=words):
        check(cluster, hosts)
    cluster.lacks = set()
    check(cluster, hosts)  # a refusal is not remembered


def test_what_pods_need_is_missing(cluster: Cluster) -> None:
    cluster.account = NotFound
    with pytest.raises(PreflightError, match="service account kinetic does not exist"):
        check(cluster)
    cluster.account = Forbidden  # nobody knows
    check(cluster)
    cluster.has_jobsets = False
    with pytest.raises(PreflightError, match="does not know jobsets"):
        check(cluster, hosts=4)


def test_a_cluster_that_is_away_refuses_nothing(cluster: Cluster) -> None:
    cluster.answers = False
    with pytest.raises(BackendUnavailable, match="does not answer"):
        check(cluster)


def test_all_that_is_needed_is_a_right_of_the_documentation() -> None:
    for hosts, workload in ((1, JOBS), (4, JOBSETS)):
        needed = rights.list_needed(hosts)
        assert set(needed) <= set(rights.RIGHTS)
        assert len(needed) == 5
        assert {right.verb for right in needed if right.resource == workload} == {
            "create",
            "list",
            "delete",
        }


def test_a_namespace_that_does_not_exist_is_said(cluster: Cluster) -> None:
    cluster.has_namespace = False
    with pytest.raises(PreflightError, match="The namespace ml does not exist in the cluster"):
        check(cluster)
