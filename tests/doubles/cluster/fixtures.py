"""Fixtures of pytest: a fresh cluster and its kubeconfig, or one that is really there.

In: nothing, or a test's mark `cluster(pools=..., **settings)` with what `FakeCluster` takes; of the
environment, what `make test-cluster` is told. Out: a running cluster that is checked and ended
after the test. Called by pytest for every test folder.
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

_GIVEN = dict(os.environ)
"""Before tests get an environment of their own."""
REAL = _GIVEN.get("KINETIC_TEST_KUBECONFIG", "")
"""The kubeconfig of the cluster that `make test-cluster` names."""
SHARES_FILES = not REAL or "KINETIC_POD_PYTHON" in _GIVEN
"""Whether pods are processes of this machine."""
LEFT_WITHIN_S = 120.0
"""How long a cluster may take to remove what was deleted."""
_TAKEN = (
    "KINETIC_CLUSTER",
    "KINETIC_NAMESPACE",
    "KINETIC_POD_PYTHON",
    "KINETIC_POD_STORE",
    "KINETIC_SERVICE_ACCOUNT",
    "KINETIC_STORE",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-cluster` runs."""
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
    """The cluster that `make test-cluster` names; else the double."""
    if not REAL:
        yield request.getfixturevalue("cluster")
        return
    if request.node.get_closest_marker("double"):
        pytest.skip("needs what only the double of a cluster does at a word, such as faults")
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
    """The cluster, named by the settings of the test's process. The caller has the rights that the
    documentation asks for, and tries nothing else. What a job has made in the cluster must be gone
    after the test, by whatever ended the job."""
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
    """Return the variables of a caller whose jobs go to a cluster.

    The store is a folder that pods share with this machine, where they are its processes. Else it
    is the one that the environment names."""
    found = {"KUBECONFIG": str(cluster.kubeconfig), "KINETIC_POD_SIMULATED": "1"}
    if not REAL:
        found |= {"KINETIC_CLUSTER": "fake", "KINETIC_POD_PYTHON": sys.executable}
        return found | {"KINETIC_POD_STORE": f"file://{home}"}
    found["KINETIC_CLUSTER"] = cluster.context  # type: ignore[union-attr]
    found |= {name: _GIVEN[name] for name in _TAKEN if _GIVEN.get(name)}
    if "KINETIC_POD_STORE" in found:
        return {"KINETIC_STORE": found["KINETIC_POD_STORE"]} | found
    if SHARES_FILES and "KINETIC_STORE" not in found:
        found["KINETIC_POD_STORE"] = f"file://{home}"
    return found
