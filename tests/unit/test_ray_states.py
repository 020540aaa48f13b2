"""What is made of Ray's words about a job, what it is submitted as, and whether it fits: pure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from manifest_cases import planned

from kinetic._backends.ray import backend
from kinetic._backends.ray.backend import DriverFacts, HostSettings
from kinetic._core.state import JobStatus
from kinetic._ray.jobs_api import RayJob, RayNode
from kinetic.errors import PreflightError

JOB = RayJob("job-00c0ffee", "RUNNING")
SETTINGS = HostSettings("a" * 64, "/shared/store")


def judge(job, *, cancelled=False, begun=False, there=False, waits=""):
    facts = DriverFacts(
        job, 2, lambda: cancelled, lambda: begun, lambda: there, waits_for=lambda: waits
    )
    return backend.judge(facts)


@pytest.mark.parametrize(
    ("status", "known", "phase", "reason"),
    [
        ("PENDING", {}, JobStatus.PENDING, "its driver is starting"),
        ("RUNNING", {}, JobStatus.PENDING, "its hosts are starting"),
        ("RUNNING", {"waits": "it waits for 4 nodes"}, JobStatus.PENDING, "it waits for 4 nodes"),
        ("RUNNING", {"begun": True}, JobStatus.RUNNING, ""),
        ("RUNNING", {"begun": True, "cancelled": True}, JobStatus.RUNNING, ""),
        ("STOPPED", {"cancelled": True}, JobStatus.CANCELLED, "The job was cancelled."),
        ("STOPPED", {"begun": True}, JobStatus.FAILED, "its driver was stopped in Ray"),
        ("SUCCEEDED", {}, JobStatus.FAILED, "Ray ended its driver: it does not say why"),
    ],
)
def test_the_state_of_a_job_without_a_verdict(status, known, phase, reason):
    said = judge(replace(JOB, status=status), **known)
    assert (said.phase, said.reason) == (phase, reason)


def test_a_job_that_ray_does_not_know():
    assert judge(None).phase is JobStatus.NOT_FOUND
    assert judge(None, cancelled=True).phase is JobStatus.CANCELLED
    gone = judge(None, there=True)
    assert (gone.phase, gone.reason) == (JobStatus.FAILED, "Ray does not know its driver any more")


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (-9, "Job entrypoint command failed\n[2026-01-01 x] noise", "its driver was killed"),
        (137, "", "its driver was killed"),
        (2, "x\nkinetic: The store is not there.\n", "The store is not there."),
        (1, "Traceback\nValueError: no", "its driver ended with exit code 1: ValueError: no"),
        (1, "[2026-01-01 00:00:00,1 W 3 3] noise", "its driver ended with exit code 1"),
        (43, "", "its driver was told to end"),
        (7, "Running entrypoint for job x: for p in python", "its driver ended with exit code 7"),
        (None, "Its actor died.", "Ray ended its driver: Its actor died."),
    ],
)
def test_a_driver_that_left_no_verdict(code, message, reason):
    ended = RayJob("job-1", "FAILED", message, exit_code=code)
    assert judge(ended, begun=True).reason == reason


def test_a_package_that_the_cluster_lacks_is_named():
    message = "Traceback\nModuleNotFoundError: No module named 'msgspec'\n"
    said = judge(RayJob("job-1", "FAILED", message, exit_code=1)).reason
    assert said.startswith("the driver's Python has no msgspec, which kinetic needs")


def test_a_submission_shows_no_secrets_and_travels_as_modules():
    plan = planned("tpu-v6e-16", secrets=("HF_TOKEN",))
    document = backend.render(plan, SETTINGS)
    assert document == json.loads(json.dumps(document))
    assert document["submission_id"] == plan.job_id
    assert document["runtime_env"]["py_modules"] == [f"gcs://_ray_pkg_{'a' * 32}.zip"]
    assert "HF_TOKEN" not in str(document)
    sent = backend.read_submission(document, ["jax==0.9"])
    assert sent.runtime_env["uv"] == {"packages": ["jax==0.9"]}
    assert "uv" not in backend.read_submission(document).runtime_env


def test_the_driver_has_more_time_to_stop_than_its_function():
    plan = planned("cpu")
    longer = replace(plan, limits=replace(plan.limits, grace_s=30.5))
    variables = backend.render(longer, SETTINGS)["runtime_env"]["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "41"


@pytest.mark.starts_processes
def test_the_interpreter_of_rays_workers_is_found(tmp_path):
    """The shell's parent is started by a raylet, whose command line has it."""
    ours = tmp_path / "python"
    ours.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "driver: $*"\n')
    ours.chmod(0o755)
    start = "import subprocess, sys; subprocess.run(sys.argv[1], shell=True)"
    supervisor = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {start!r}, sys.argv[1]])"  # fmt: skip  # noqa: E501
    command = backend.entrypoint("", installs=False)
    said = subprocess.run(
        [sys.executable, "-c", supervisor, command, f"--python_worker_command={ours} worker.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"driver: -m {backend.DRIVER}\n"


def node(resources, **labels):
    named = {f"ray.io/tpu-{name.replace('_', '-')}": value for name, value in labels.items()}
    return RayNode("n", "10.0.0.1", True, False, {"CPU": 1.0} | resources, named)


def slice_of(hosts, name="s", pod_type="v6e-16", topology="4x4"):
    own = {"slice_name": name, "pod_type": pod_type, "topology": topology}
    return [node({"TPU": 4.0}, **own) for _ in range(hosts)]


@pytest.mark.parametrize(
    ("accelerator", "nodes"),
    [
        ("cpu", [node({})]),
        ("gpu-l4", [node({"GPU": 1.0})]),
        ("tpu-v6e-16", slice_of(4)),
        ("tpu-v5p-8", slice_of(2, pod_type="v5p-16", topology="2x2x2")),
    ],
)
def test_what_fits(accelerator, nodes):
    backend.check_capacity(planned(accelerator), nodes)


@pytest.mark.parametrize(
    ("accelerator", "nodes", "words"),
    [
        ("gpu-l4", [node({})], "gpu-l4 has 1 host with 1 GPU each; none of its nodes (1) has GPU"),
        ("tpu-v6e-16", slice_of(3), "TPU each; its 3 nodes are 3 of v6e-16 4x4 (4 on each)"),
        ("tpu-v6e-16", [*slice_of(2), *slice_of(2, "t")], "cannot hold this job"),
        ("tpu-v6e-32", slice_of(8), "8 hosts"),
        ("cpu", [replace(node({}), is_alive=False)], "none of its nodes (0) has CPU"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(accelerator, nodes, words):
    with pytest.raises(PreflightError) as refused:
        backend.check_capacity(planned(accelerator), nodes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("options", "fits", "words"),
    [
        ({"cpu": "8", "memory": "2Gi"}, True, ""),
        ({"cpu": "9"}, False, "with 9 CPU each; its 1 nodes are 1 of CPU (8 on each)"),
        ({"memory": "64Gi"}, False, "with 1 CPU and 64 GiB each; its 1 nodes are 1 of CPU (8, 4 G"),
    ],
)
def test_processors_and_memory_count_too(options, fits, words):
    nodes = [node({"CPU": 8.0, "memory": 4.0 * 2**30})]
    if fits:
        backend.check_capacity(planned("cpu", **options), nodes)
        return
    with pytest.raises(PreflightError) as refused:
        backend.check_capacity(planned("cpu", **options), nodes)
    assert words in str(refused.value)


def test_an_elastic_job_needs_room_for_its_least_slices():
    backend.check_capacity(planned("tpu-v6e-16", slices=(1, 2)), slice_of(4))
    with pytest.raises(PreflightError, match="2 slices of tpu-v6e-16 has 8 hosts"):
        backend.check_capacity(planned("tpu-v6e-16", slices=2), slice_of(4))
