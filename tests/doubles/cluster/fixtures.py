"""Pytest fixtures: a new double of a cluster, or the existing cluster that `make test-cluster`
names.

The mark `cluster(pools=..., **settings)` of a test has arguments for `FakeCluster`. After the test,
the cluster is checked and ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from doubles.cluster.fake import FakeCluster
    from doubles.cluster.real import RealCluster

_ENVIRON = dict(os.environ)
"""The environment of this run, before tests change theirs."""
REAL = _ENVIRON.get("KINETIC_TEST_KUBECONFIG", "")
"""The kubeconfig of the cluster that `make test-cluster` names."""
SHARES_FILES = not REAL or "KINETIC_POD_PYTHON" in _ENVIRON
"""True if pods are processes of this machine, and so can read its files."""
LEFT_WITHIN_S = 120.0
"""The longest time, in seconds, that a cluster may take to remove deleted objects."""
_SETTINGS = (
    "KINETIC_CLUSTER",
    "KINETIC_NAMESPACE",
    "KINETIC_POD_PYTHON",
    "KINETIC_POD_STORE",
    "KINETIC_SERVICE_ACCOUNT",
    "KINETIC_STORE",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-cluster`."""
    for item in items:
        if "any_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("kubernetes")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster]:
    """A cluster with a CPU node and four TPU hosts, unless the test's mark says otherwise."""
    pytest.importorskip("kubernetes")
    pytest.importorskip("kubernetes_validate")
    from doubles.cluster.fake import FakeCluster
    from doubles.cluster.nodes import CPU_POOL, V6E_4X4

    mark = request.node.get_closest_marker("cluster")
    settings = {"pools": (CPU_POOL, V6E_4X4)} | (mark.kwargs if mark else {})
    with FakeCluster(**settings) as running:
        yield running
        crashes, unknown = running.crashes, running.unknown_fields
    assert crashes == [], "\n".join(crashes)
    assert unknown == [], "fields that the API does not know"


@pytest.fixture
def kubeconfig(cluster: FakeCluster) -> Path:
    """The path of the cluster's kubeconfig."""
    return cluster.kubeconfig


@pytest.fixture
def any_cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster | RealCluster]:
    """The cluster that `make test-cluster` names, or else the double."""
    if not REAL:
        yield request.getfixturevalue("cluster")
        return
    if request.node.get_closest_marker("double"):
        pytest.skip("needs the double of a cluster, for example for its faults")
    from doubles.cluster.real import RealCluster

    real = RealCluster(REAL)
    if request.node.get_closest_marker("evicts") and not real.may_evict():
        real.close()
        pytest.skip("needs the right to create pods/eviction")
    yield real
    real.close()


@pytest.fixture
def on_cluster(
    any_cluster: FakeCluster | RealCluster, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCluster | RealCluster]:
    """The cluster, named by the settings of the test's process. The user has only the documented
    rights, and must attempt nothing else. After the test, no objects of jobs may remain, however
    the jobs ended."""
    from doubles.cluster.fake import FakeCluster
    from doubles.cluster.roles import submitter

    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if isinstance(any_cluster, FakeCluster):
        any_cluster.restrict(submitter(any_cluster.namespace))
    for name, value in settings_of(any_cluster, home).items():
        monkeypatch.setenv(name, value)
    yield any_cluster
    any_cluster.wait_for(
        lambda: not any_cluster.left_over(), LEFT_WITHIN_S, "a cluster without remains of jobs"
    )
    if isinstance(any_cluster, FakeCluster):
        assert any_cluster.refused() == [], "what the documented roles lack"


def settings_of(cluster: FakeCluster | RealCluster, home: Path) -> dict[str, str]:
    """Return the environment variables of a caller who submits jobs to a cluster.

    If pods are processes of this machine, the store is a folder that they share; otherwise the
    environment names it."""
    variables = {"KUBECONFIG": str(cluster.kubeconfig), "KINETIC_POD_SIMULATED": "1"}
    if not REAL:
        variables |= {"KINETIC_CLUSTER": "fake", "KINETIC_POD_PYTHON": sys.executable}
        return variables | {"KINETIC_POD_STORE": f"file://{home}"}
    variables["KINETIC_CLUSTER"] = cluster.context  # type: ignore[union-attr]
    variables |= {name: _ENVIRON[name] for name in _SETTINGS if _ENVIRON.get(name)}
    if "KINETIC_POD_STORE" in variables:
        return {"KINETIC_STORE": variables["KINETIC_POD_STORE"]} | variables
    if SHARES_FILES and "KINETIC_STORE" not in variables:
        variables["KINETIC_POD_STORE"] = f"file://{home}"
    return variables
