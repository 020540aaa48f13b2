"""`RealCluster`, which `make test-cluster` uses, on the double's API server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job
from doubles.cluster.real import RealCluster
from doubles.cluster.roles import submitter
from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.resources import JOBS


@pytest.fixture
def api(cluster: FakeCluster) -> Iterator[HttpApi]:
    variables = {"KUBECONFIG": str(cluster.kubeconfig)}
    http = HttpApi(kubeconfig.find(variables), variables)
    yield http
    http.close()


@pytest.fixture
def real(api: HttpApi, cluster: FakeCluster) -> Iterator[RealCluster]:
    api.create(JOBS, job("kinetic-before", "sleep 100"))
    cluster.wait_for(lambda: cluster.objects("pods"))
    seen = RealCluster(cluster.kubeconfig)
    yield seen
    seen.close()


def test_only_what_jobs_made_since_is_left_over(
    real: RealCluster, api: HttpApi, cluster: FakeCluster
) -> None:
    assert real.left_over() == []
    api.create(JOBS, job("other", "sleep 100"))
    api.create(JOBS, job("kinetic-job-1", "sleep 100"))
    assert real.wait_for(lambda: len(real.left_over()) == 2, what="its pod")
    assert set(real.left_over()) < set(cluster.left_over())
    assert {job["metadata"]["name"] for job in real.objects("jobs")} == {
        "kinetic-before",
        "kinetic-job-1",
        "other",
    }
    description = real.describe()
    assert "jobs/kinetic-job-1" in description
    assert "jobs/other" not in description
    api.delete(JOBS, "kinetic-job-1")
    real.wait_for(lambda: real.left_over() == [])


def test_a_pod_that_is_deleted_is_gone(real: RealCluster, cluster: FakeCluster) -> None:
    (pod,) = real.objects("pods")
    name = pod["metadata"]["name"]
    real.delete_pod(name, force=True)
    real.wait_for(lambda: cluster.object("pods", name) is None)
    real.delete_pod(name)


def test_a_pod_that_is_evicted_says_so(real: RealCluster, cluster: FakeCluster) -> None:
    (pod,) = real.objects("pods")
    name, seen = pod["metadata"]["name"], []
    cluster.store.listeners.append(
        lambda change: seen.append(change.object) if change.resource.kind == "Pod" else None
    )
    assert real.may_evict()
    real.evict_pod(name)
    real.wait_for(lambda: cluster.object("pods", name) is None)
    assert "EvictionByEvictionAPI" in str(seen)


def test_what_waits_in_vain_says_what_there_is(real: RealCluster) -> None:
    with pytest.raises(AssertionError, match=r"in vain for rain\n[^$]*kinetic-before"):
        real.wait_for(lambda: False, 0.0, "rain")


def test_kinds_that_are_not_installed_are_absent(cluster: FakeCluster) -> None:
    cluster.remove_job_sets()
    seen = RealCluster(cluster.kubeconfig)
    assert seen.objects("jobsets") == []
    assert seen.left_over() == []
    seen.close()


def test_whoever_has_the_documented_roles_sees_what_jobs_leave(
    api: HttpApi, cluster: FakeCluster
) -> None:
    cluster.restrict(submitter(cluster.namespace))
    real = RealCluster(cluster.kubeconfig)
    api.create(JOBS, job("kinetic-job-1", "sleep 100"))
    real.wait_for(lambda: real.objects("pods"))
    assert real.objects("secrets") == []
    assert len(real.left_over()) == 2
    (pod,) = real.objects("pods")
    assert not real.may_evict()
    real.delete_pod(pod["metadata"]["name"], force=True)
    api.delete(JOBS, "kinetic-job-1")
    real.wait_for(lambda: real.left_over() == [])
    real.close()


def test_tests_of_a_real_cluster_ask_for_nothing_else() -> None:
    """A test that uses methods which only the double has needs the mark `double`."""
    offered = {name for name in dir(RealCluster) if not name.startswith("_")} | {"kubeconfig"}
    for path in (Path(__file__).parents[2] / "system").glob("test_*.py"):
        tree = ast.parse(path.read_text())
        marks = [ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign)]
        if any("pytestmark" in mark and "double" in mark for mark in marks):
            continue
        for test in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
            marks = [ast.unparse(mark) for mark in test.decorator_list]
            if not test.name.startswith("test_") or any("double" in mark for mark in marks):
                continue
            used = {
                node.attr
                for node in ast.walk(test)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "on_cluster"
            }
            assert used <= offered, f"{path.name}: {test.name}"
            assert "evict_pod" not in used or any("evicts" in mark for mark in marks), test.name
