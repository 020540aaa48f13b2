"""Pytest fixtures: a Ray cluster that is started once for all tests of a run, or the existing
cluster that `make test-ray` names. A test has the cluster to itself, or shares it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doubles.ray_cluster import (
    GivenCluster,
    RayCluster,
    end_shared_cluster,
    share_cluster,
    why_impossible,
)

REAL = os.environ.get("KINETIC_TEST_RAY_ADDRESS", "")
"""The address of the cluster that `make test-ray` names."""
TIMEOUT_S = 900
"""The time limit of a test, which may wait for the start of the cluster and for other tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-ray`, and run them first, one after the other: a running cluster
    takes a quarter of a processor, and a test that waits for it blocks one of pytest's workers."""
    for item in items:
        if {"ray_cluster", "common_ray", "any_ray"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """End the cluster after the last test that uses it, in the process that runs this test."""
    yield
    if item.get_closest_marker("ray") is not None and not REAL:
        folder = _folder_of_run(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        with (folder / "done").open("a+") as done:
            fcntl.flock(done, fcntl.LOCK_EX)
            done.write(f"{item.nodeid}\n")
            done.seek(0)
            marked = {i.nodeid for i in item.session.items if i.get_closest_marker("ray")}
            if marked == set(done.read().splitlines()):
                end_shared_cluster(folder)


def _folder_of_run(base: Path) -> Path:
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ray"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def _run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run of tests share."""
    return _folder_of_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def _shared_ray(_run_folder: Path, request: pytest.FixtureRequest) -> RayCluster:
    if problem := why_impossible():
        pytest.skip(problem)
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    # Only trainers need the output of actors in their drivers.
    has_trainers = any(item.get_closest_marker("release") for item in request.session.items)
    return share_cluster(_run_folder, owner, sends_output=has_trainers)


@contextmanager
def _take_turn(lock: Path, how: int) -> Iterator[None]:
    with lock.open("w") as turn:
        fcntl.flock(turn, how)
        yield


def _open_cluster(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> RayCluster:
    if REAL:
        pytest.skip("needs the tests' own cluster, for example to kill nodes")
    cluster: RayCluster = request.getfixturevalue("_shared_ray")
    patch.setenv("RAY_AUTH_TOKEN", cluster.token)
    return cluster


@pytest.fixture
def ray_cluster(
    request: pytest.FixtureRequest, _run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RayCluster]:
    """A cluster with a head and the four nodes of a v6e-16 slice, for one test at a time. Killed
    nodes are replaced after the test. The environment has the cluster's token, not its address."""
    cluster = _open_cluster(request, monkeypatch)
    with _take_turn(_run_folder / "in-use", fcntl.LOCK_EX):
        before = set(cluster.nodes())
        yield cluster
        for index in cluster.nodes().keys() - before:
            cluster.remove_node(index)
        cluster.mend()


@pytest.fixture
def common_ray(
    request: pytest.FixtureRequest, _run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RayCluster]:
    """The same cluster, for several tests at a time. A test must not end a node or reserve a slice,
    and may read only its own jobs. Each of the five nodes has one processor."""
    cluster = _open_cluster(request, monkeypatch)
    with _take_turn(_run_folder / "in-use", fcntl.LOCK_SH):
        yield cluster


@pytest.fixture
def ray_store_turn(common_ray: RayCluster, _run_folder: Path) -> Iterator[RayCluster]:
    """The same cluster, for tests that use the store on its head: one test at a time."""
    with _take_turn(_run_folder / "store-in-use", fcntl.LOCK_EX):
        yield common_ray


@pytest.fixture
def any_ray(request: pytest.FixtureRequest) -> RayCluster | GivenCluster:
    """The cluster that `make test-ray` names, or else the tests' own, shared with other tests."""
    if REAL:
        return GivenCluster(REAL)
    return request.getfixturevalue("common_ray")  # type: ignore[no-any-return]
