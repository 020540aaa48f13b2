"""What every backend promises, held by the Ray backend on a real cluster; and what only Ray's own
answers show.

In: a cluster of raylets on this machine. Out: promises kept.
"""

from __future__ import annotations

import functools
import sys

import pytest
import test_backend
from backend_cases import folder, planned, read, speak, submitted, wait_for_ever
from test_backend import *  # noqa: F403 - the suite

from kinetic._backends.base import phase_of
from kinetic._backends.ray.backend import RayBackend
from kinetic._backends.ray.submission import HostSettings
from kinetic._core.state import JobStatus
from kinetic._ray.jobs_api import JobsApi
from kinetic._source import runtime
from kinetic._store.local import LocalStore
from kinetic.errors import PreflightError

del test_every_promise_has_a_test  # noqa: F821 - it is about the suite


def on_ray(cluster, cache, store):
    def read_archive():
        made = runtime.archive(cache)
        return made.blob, made.data

    api = JobsApi(cluster.address, cluster.token)
    settings = HostSettings("", store.uri, sys.executable, simulated=True)
    return RayBackend(store, lambda: api, read_archive, settings)


@pytest.fixture
def case(common_ray, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "ray-archive"
    return functools.partial(on_ray, common_ray, cache), folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One for all tests, as the job below."""
    return LocalStore(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def made():
    """What tests of this module have made for each other."""
    return {}


@pytest.fixture
def spoken(backend, store, made):
    """One job for all tests that only read it: each takes seconds here."""
    if "spoken" not in made:
        ref = submitted(backend, store, speak)
        made["spoken"] = ref, read(backend, ref)
    return made["spoken"]


def test_the_suite_is_all_of_it():
    own = {name for name in vars(test_backend) if name.startswith("test_")}
    assert own - globals().keys() == {"test_every_promise_has_a_test"}


def test_a_shape_that_no_node_has_is_refused_with_what_there_is(backend, store):
    with pytest.raises(PreflightError) as refused:
        backend.preflight(planned(store, speak, "tpu-v5e-16"))
    assert "tpu-v5litepod-16 has 4 hosts with 4 TPU each" in str(refused.value)
    assert "4 of v6e-16 4x4 (4 on each)" in str(refused.value)
    backend.preflight(planned(store, speak, "tpu-v6e-16"))


def test_an_interpreter_without_ray_is_said(common_ray, case, store):
    make, _ = case
    backend = make(store)
    backend._settings = HostSettings("", store.uri, "/no/such/python", simulated=True)
    ref = submitted(backend, store, speak)
    while not (status := backend.status([ref])[ref.job_id]).phase.ended:
        pass
    assert status.phase is JobStatus.FAILED
    assert "no Python that has Ray was found" in status.reason
    assert "/no/such/python" in status.reason


def test_what_ray_shows_has_no_secrets(common_ray, backend, store):
    plan_ref = submitted(backend, store, wait_for_ever)
    shown = str(backend._api._ask("GET", f"/api/jobs/{plan_ref.job_id}"))
    assert "TOKEN" not in shown
    assert "TLS" not in shown
    backend.cancel(plan_ref)
    while not phase_of(backend, plan_ref).ended:
        pass
