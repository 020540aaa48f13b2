"""The contract of backends with Ray, on a real cluster of raylets on this machine; and tests that
need the responses of a real Ray.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from dataclasses import replace

import pytest
import test_backend
from backend_cases import folder, planned, read, ref_of, speak, submitted
from test_backend import *  # noqa: F403 - the suite

from kinetic._backends.base import LogRequest, phase_of
from kinetic._backends.ray.backend import INSTALLING, HostSettings, RayBackend
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.plan import Blob
from kinetic._core.state import JobStatus
from kinetic._ray.jobs_api import JobsApi, secrets_package
from kinetic._source import runtime
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound, PreflightError

TOGETHER = (
    "test_a_job_that_was_submitted_is_known_at_once_to_another_backend_object",
    "test_phases_follow_the_job",
    "test_a_follower_is_never_kept_waiting_for_long",
    "test_many_jobs_are_asked_for_at_once",
    "test_a_store_that_does_not_answer_is_no_verdict",
    "test_a_job_that_runs_or_has_ended_waits_for_nothing",
    "test_a_host_can_be_killed_and_the_job_fails",
)
"""Tests that `test_what_is_promised_of_a_running_job` calls, one after the other, with one job."""
for name in ("test_every_promise_has_a_test", *TOGETHER):
    del globals()[name]


def on_ray(cluster, cache, store):
    def read_archive():
        archive = runtime.archive(cache)
        return archive.blob, archive.data

    api = JobsApi(cluster.address, cluster.token)
    settings = HostSettings("", store.uri, sys.executable, simulated=True)
    return RayBackend(store, lambda: api, read_archive, settings)


@pytest.fixture
def case(common_ray, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "ray-archive"
    return functools.partial(on_ray, common_ray, cache), folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store for all tests of this module, because they share jobs."""
    return LocalStore(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def shared_jobs():
    """Jobs that several tests of this module share, by the name of a fixture."""
    return {}


@pytest.fixture
def spoken(backend, store, shared_jobs):
    """One ended job for all tests that only read it, because a job on Ray takes seconds."""
    if "spoken" not in shared_jobs:
        ref = submitted(backend, store, speak)
        shared_jobs["spoken"] = ref, read(backend, ref)
    return shared_jobs["spoken"]


def test_the_suite_is_all_of_it():
    own = {name for name in vars(test_backend) if name.startswith("test_")}
    assert own - globals().keys() == {"test_every_promise_has_a_test", *TOGETHER}


@pytest.mark.long
def test_what_is_promised_of_a_running_job(backend, store, case, spoken, begun, monkeypatch):
    """All tests share one job, because a job on Ray takes many seconds."""
    assert phase_of(case[0](store), begun) is not JobStatus.NOT_FOUND
    test_backend.test_phases_follow_the_job(backend, begun)
    test_backend.test_a_job_that_was_submitted_is_known_at_once_to_another_backend_object(
        store, case, begun
    )
    test_backend.test_a_follower_is_never_kept_waiting_for_long(backend, begun)
    test_backend.test_many_jobs_are_asked_for_at_once(backend, store, spoken, begun)
    test_backend.test_a_store_that_does_not_answer_is_no_verdict(backend, store, begun, monkeypatch)
    test_backend.test_a_job_that_runs_or_has_ended_waits_for_nothing(backend, spoken, begun)
    test_backend.test_a_host_can_be_killed_and_the_job_fails(backend, begun, agents=False)


@pytest.mark.release
def test_a_host_can_be_killed_with_its_agent_and_the_job_fails(backend, talking):
    """Killing a host with its agent is the same on Ray as killing the host: the actor is killed."""
    test_backend.test_a_host_can_be_killed_and_the_job_fails(backend, talking, agents=True)


def test_a_shape_that_no_node_has_is_refused_with_what_there_is(backend, store):
    with pytest.raises(PreflightError) as refused:
        backend.preflight(planned(store, speak, "tpu-v5e-16"))
    assert "tpu-v5litepod-16, which needs 4 hosts with 4 TPU each" in str(refused.value)
    assert "4 of v6e-16 4x4 (4 on each)" in str(refused.value)
    backend.preflight(planned(store, speak, "tpu-v6e-16"))


SECRET = {"KEY": "value-that-nobody-sees"}


def read_dashboard(api):
    """Yield everything that the dashboard shows: log files on the head, jobs, actors, packages."""
    (head,) = (node.node_id for node in api.nodes() if node.is_head)
    for path in api.list_logs(head, "**/*"):
        with contextlib.suppress(NotFound):  # The file was removed after it was listed.
            yield b"" if path.endswith("/") else b"".join(api.read_log(head, path))
    for path in ("jobs/", "v0/actors?detail=1", "v0/tasks?detail=1", "v0/runtime_envs?detail=1"):
        yield api._send("GET", f"/api/{path}").data


def submit_with_secret(backend, store, func):
    plan = replace(planned(store, func), secrets=tuple(SECRET))
    ref = ref_of(plan, backend, store)
    store.put(layout.JobKeys(plan.job_id).plan, json.dumps(plan.to_json()).encode())
    backend.submit(ref, backend.render(plan), SECRET)
    return ref


def is_shown(backend, store):
    value = SECRET["KEY"].encode()
    contents = [*read_dashboard(backend._api), *(store.get(key) for key in store.list(""))]
    assert len(contents) > 10
    return any(value in content for content in contents)


@pytest.mark.long
def test_an_interpreter_without_ray_is_said_and_secrets_that_nobody_takes_are_not_shown(
    case, store
):
    make, _ = case
    backend = make(store)
    backend._settings = HostSettings("", store.uri, "/no/such/python", simulated=True)
    ref = submit_with_secret(backend, store, speak)
    while not (status := backend.status([ref])[ref.job_id]).phase.ended:
        pass
    assert status.phase is JobStatus.FAILED
    assert "no Python that has Ray was found" in status.reason
    assert "/no/such/python" in status.reason
    package = secrets_package(ref.job_id)
    assert backend._api.has_package(package), "the test looks for something else"
    assert backend._api._send("GET", f"/api/packages/gcs/{package}").data == b""
    assert not is_shown(backend, store)


@pytest.mark.long
def test_packages_that_cannot_be_installed_are_a_state_and_then_why_the_set_up_failed(case, store):
    make, _ = case
    backend = make(store)
    lines = b"/no/such/folder/nothing-1.0-py3-none-any.whl\n"
    digest = hashlib.sha256(lines).hexdigest()
    store.put(layout.blob(digest), lines)
    plan = replace(planned(store, speak), requirements=Blob(digest, len(lines)))
    store.put(layout.JobKeys(plan.job_id).plan, json.dumps(plan.to_json()).encode())
    ref = ref_of(plan, backend, store)
    backend.submit(ref, backend.render(plan), {})
    reasons = set()
    while not (status := backend.status([ref])[ref.job_id]).phase.ended:
        reasons.add(status.reason)
    assert INSTALLING in reasons
    assert status.reason.startswith("Ray could not set up its packages: ")
    assert "nothing-1.0-py3-none-any.whl" in status.reason
    assert [host.exit for host in status.hosts] == [Exit.SETUP_FAILED]
    printed = b"".join(chunk.data for chunk in backend.logs(ref, LogRequest()) if chunk)
    assert b"runtime_env setup failed" in printed
    assert b"nothing-1.0-py3-none-any.whl" in printed


def tell_length():
    print(len(os.environ["KEY"]), flush=True)
    time.sleep(1000)


@pytest.mark.long
def test_secrets_reach_the_function_and_nobody_else(backend, store):
    ref = submit_with_secret(backend, store, tell_length)
    follower = backend.logs(ref, LogRequest())
    while (chunk := next(follower)) is None:
        pass
    follower.close()
    assert int(chunk.data) == len(SECRET["KEY"])
    assert not backend._api.has_package(secrets_package(ref.job_id))
    assert not is_shown(backend, store)
    entry = str(backend._api._call("GET", f"/api/jobs/{ref.job_id}"))
    assert "TOKEN" not in entry
    assert "TLS" not in entry
    backend.cancel(ref)
    while not phase_of(backend, ref).ended:
        pass
