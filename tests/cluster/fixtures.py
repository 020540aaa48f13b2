"""Fixtures of pytest: a fresh cluster and its kubeconfig.

In: nothing, or a test's mark `cluster(pools=..., **settings)` with what `FakeCluster` takes. Out: a
running cluster that is checked and ended after the test. Called by pytest for every test folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster.fake import FakeCluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster]:
    """A cluster with a CPU node and four TPU hosts, unless the test's mark says otherwise."""
    pytest.importorskip("kubernetes")
    pytest.importorskip("kubernetes_validate")
    from cluster.fake import FakeCluster
    from cluster.nodes import CPU_POOL, V6E_4X4

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
