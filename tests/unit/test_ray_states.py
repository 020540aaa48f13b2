"""Jobs on Ray: their state from Ray's responses, the command that is submitted, version checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from manifest_cases import planned

from kinetic._backends.base import LogRequest
from kinetic._backends.ray import backend
from kinetic._backends.ray.backend import DriverFacts, HostSettings
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._ray.jobs_api import RayJob, RayNode
from kinetic._store.local import LocalStore
from kinetic.errors import PreflightError

JOB = RayJob("job-00c0ffee", "RUNNING")
SETTINGS = HostSettings("a" * 64, "/shared/store")


def judge(job, *, cancelled=False, begun=False, was_submitted=False, waits=""):
    facts = DriverFacts(
        job, 2, lambda: cancelled, lambda: begun, lambda: was_submitted, waits_for=lambda: waits
    )
    return backend.judge(facts)


@pytest.mark.parametrize(
    ("status", "facts", "phase", "reason"),
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
def test_the_state_of_a_job_without_a_verdict(status, facts, phase, reason):
    standing = judge(replace(JOB, status=status), **facts)
    assert (standing.phase, standing.reason) == (phase, reason)


def test_a_job_that_ray_does_not_know():
    assert judge(None).phase is JobStatus.NOT_FOUND
    assert judge(None, cancelled=True).phase is JobStatus.CANCELLED
    verdict = judge(None, was_submitted=True)
    assert (verdict.phase, verdict.reason) == (
        JobStatus.FAILED,
        "Ray does not know its driver any more",
    )


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (-9, "Job entrypoint command failed\n[2026-01-01 x] noise", "its driver was killed"),
        (137, "", "its driver was killed"),
        (2, "x\nkinetic: The store is not there.\n", "The store is not there."),
        (1, "Traceback\nValueError: no", "its driver ended with exit code 1: ValueError: no"),
        (1, "[2026-01-01 00:00:00,1 W 3 3] noise", "its driver ended with exit code 1"),
        (43, "", "its driver was asked to end"),
        (7, "Running entrypoint for job x: for p in python", "its driver ended with exit code 7"),
        (None, "Its actor died.", "Ray ended its driver: Its actor died."),
    ],
)
def test_a_driver_that_left_no_verdict(code, message, reason):
    ended = RayJob("job-1", "FAILED", message, exit_code=code)
    assert judge(ended, begun=True).reason == reason


INSTALLER = """runtime_env setup failed: Failed to set up runtime environment.
Could not create the actor because its associated runtime env failed to be created.
Traceback (most recent call last):
  File "/ray/runtime_env_agent.py", line 387, in _create_runtime_env_with_retry
ray._private.SubprocessCalledProcessError: Run cmd[12] failed with the following details.
Command '['/tmp/v/bin/python', '-m', 'uv', 'pip']' returned non-zero exit status 1.
Last 50 lines of stdout:
      × No solution found when resolving dependencies:
      ╰─▶ Because no-such-package was not found in the package registry and you
          require no-such-package==1, your requirements are unsatisfiable.
"""


def test_the_cause_is_kept_of_packages_that_cannot_be_installed():
    pending = replace(JOB, status="PENDING", runtime_env={"uv": {"packages": ["a"]}})
    standing = judge(pending)
    assert (standing.phase, standing.reason) == (JobStatus.PENDING, backend.INSTALLING)
    kind = "RUNTIME_ENV_SETUP_FAILURE"
    standing = judge(RayJob("job-1", "FAILED", INSTALLER, error_type=kind))
    assert standing.reason.startswith("Ray could not set up its packages: × No solution found")
    assert standing.reason.endswith(
        "require no-such-package==1, your requirements are unsatisfiable."
    )
    assert "\n" not in standing.reason
    long = judge(RayJob("job-1", "FAILED", f"{'x' * 5000} the cause", error_type=kind)).reason
    assert (len(long) < 1200, long.endswith("x the cause")) == (True, True)


@pytest.mark.parametrize(
    ("ended", "was_submitted", "error"),
    [
        (RayJob("job-1", "FAILED", INSTALLER, error_type="RUNTIME_ENV_SETUP_FAILURE"), False, True),
        (RayJob("job-1", "FAILED", "kinetic: no Python that has Ray", exit_code=69), False, True),
        (RayJob("job-1", "FAILED", "kinetic: The store is not there.", exit_code=2), False, True),
        (RayJob("job-1", "FAILED", "No module named 'x'", exit_code=1), False, False),
        (RayJob("job-1", "FAILED", "kinetic: The store is not there.", exit_code=2), True, False),
        (RayJob("job-1", "FAILED", "x", error_type="JOB_SUPERVISOR_ACTOR_DIED"), False, False),
        (RayJob("job-1", "FAILED", "", exit_code=137), False, False),
        (RayJob("job-1", "STOPPED", "", exit_code=2), False, False),
    ],
)
def test_a_driver_that_could_not_begin_is_no_lost_host(ended, was_submitted, error):
    (host,) = judge(ended, was_submitted=was_submitted).hosts
    assert host.exit is (Exit.SETUP_FAILED if error else None)


def test_a_running_job_says_which_nodes_it_waits_for():
    standing = judge(JOB, begun=True, waits="it waits for 4 nodes")
    assert (standing.phase, standing.reason) == (JobStatus.RUNNING, "it waits for 4 nodes")
    assert standing.why_waiting is None


def test_what_ray_has_of_a_driver_that_led_nobody_is_its_output(tmp_path):
    store = LocalStore(tmp_path)
    job = RayJob("job-00c0ffee", "FAILED", INSTALLER)
    ray = SimpleNamespace(find=lambda _: job, logs=lambda _: INSTALLER)
    ended = backend.RayBackend(store, lambda: ray, lambda: None, SETTINGS)
    ref = JobRef(job.job_id, Place("ray"), "cpu", "f", "f", 0.0, store.uri)

    def read(**request):
        chunks = ended.logs(ref, LogRequest(follow=False, **request))
        return [chunk for chunk in chunks if chunk is not None and chunk.data]

    (chunk,) = read()
    assert (chunk.data.decode(), chunk.host) == (INSTALLER, 0)
    assert read(tail=2)[0].data.decode() == "".join(INSTALLER.splitlines(keepends=True)[-2:])
    nothing = ({"after": {0: chunk.end}}, {"failures": False}, {"metrics": True}, {"tail": 0})
    assert [read(**request) for request in nothing] == [[], [], [], []]
    ray.logs = lambda _: "cause\n 10%\r 20%\r 30%\nend\n"
    assert read(tail=2)[0].data == b" 10%\r 20%\r 30%\nend\n", "a progress bar is one line"
    store.put(layout.JobKeys(ref.job_id).events, b"")
    assert read() == []


@pytest.mark.parametrize(
    ("ray", "python", "words"),
    [
        ("2.60.0", "3.11.4", ""),
        ("3.0.0.dev0", "", ""),
        ("2.40.0", "3.11.4", "runs Ray 2.40.0, but jobs need Ray 2.49 or later"),
        ("2.60.0", "3.12.1", "The cluster runs Python 3.12.1, this machine 3.11"),
    ],
)
def test_versions_are_compared_before_anything_is_sent(ray, python, words):
    if not words:
        return backend.check_versions(ray, python, "3.11")
    with pytest.raises(PreflightError, match=re.escape(words)):
        backend.check_versions(ray, python, "3.11")
    return None


def test_a_package_that_the_cluster_lacks_is_named():
    message = "Traceback\nModuleNotFoundError: No module named 'msgspec'\n"
    reason = judge(RayJob("job-1", "FAILED", message, exit_code=1)).reason
    assert reason.startswith("the driver's Python has no msgspec, which kinetic needs")


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
    # Ray installs the environment only on nodes that the job uses.
    assert sent.runtime_env["config"] == {"eager_install": False}


def test_the_driver_has_more_time_to_stop_than_its_function():
    plan = planned("cpu")
    longer = replace(plan, limits=replace(plan.limits, grace_s=30.5))
    variables = backend.render(longer, SETTINGS)["runtime_env"]["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "41"


@pytest.mark.starts_processes
def test_the_interpreter_of_rays_workers_is_found(tmp_path):
    """Without a given path, the submitted shell command runs the driver with the Python that is in
    the command line of the raylet, an ancestor of the shell."""
    ours = tmp_path / "python"
    ours.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "driver: $*"\n')
    ours.chmod(0o755)
    start = "import subprocess, sys; subprocess.run(sys.argv[1], shell=True)"
    supervisor = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {start!r}, sys.argv[1]])"  # fmt: skip  # noqa: E501
    command = backend.entrypoint("", installs=False)
    shell = subprocess.run(
        [sys.executable, "-c", supervisor, command, f"--python_worker_command={ours} worker.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == f"driver: -m {backend.DRIVER}\n"


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
        (
            "gpu-l4",
            [node({})],
            "1 GPU: none of its nodes has GPU",
        ),
        (
            "tpu-v6e-16",
            slice_of(3),
            "the cluster's nodes (3) are 3 of v6e-16 4x4 (4 on each)",
        ),
        ("tpu-v6e-16", [*slice_of(2), *slice_of(2, "t")], "is too small for"),
        ("tpu-v6e-32", slice_of(8), "8 hosts"),
        ("cpu", [replace(node({}), is_alive=False)], "no node of the cluster runs"),
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
        ({"cpu": "9"}, False, "with 9 CPU: the cluster's nodes (1) are 1 of CPU (8 on each)"),
        (
            {"memory": "64Gi"},
            False,
            "with 1 CPU and 64 GiB: the cluster's nodes (1) are",
        ),
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
    with pytest.raises(PreflightError, match="2 slices of tpu-v6e-16, which need 8 hosts"):
        backend.check_capacity(planned("tpu-v6e-16", slices=2), slice_of(4))
