"""Jobs on a cluster in which one process controls all devices, by Pathways: one pod runs the
function, and each machine of the slice has a pod of Pathways. Pathways' programs are not public:
where chips are virtual, idle processes take their places, and the function has the virtual chips
itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doubles.gcs import serving
from gangs import wait_until

import kinetic
from kinetic._core import layout
from kinetic.errors import GangTimeout, HostLost, JobCancelled, JobFailed

SINGLE = {"accelerator": "tpu-v6e-16", "controller": "single"}
HEAD, WORKER = "-pathways-head-0-0-", "-pathways-worker-0-{}-"


STAND_IN = """
import os, time
import jax
from jax._src import xla_bridge
from jax.extend import backend

def connect():
    assert jax.config.read("jax_backend_target") == "grpc://localhost:29000"
    while not os.path.exists(os.environ["MACHINES_ARE_UP"]):
        time.sleep(0.02)
    return xla_bridge.make_cpu_client()

def initialize():
    jax.config.update("jax_num_cpu_devices", 16)
    backend.register_backend_factory("proxy", connect, priority=-1)
"""
"""A stand-in for Pathways' package. It offers 16 CPU devices once the machines are up, which the
test signals by a file."""
IDLE = [sys.executable, "-c", "import signal; signal.pause()"]


def world():
    import jax

    return jax.process_count(), jax.device_count(), jax.local_device_count()


def fail():
    raise LookupError("on purpose")


def wait_for_ever(marker):
    Path(marker).touch()
    while True:
        time.sleep(0.1)


def wait_at_first(marker):
    if os.environ["KINETIC_ATTEMPT"] == "1":
        wait_for_ever(marker)
    return "again"


def wait_for_file(marker):
    Path(f"{marker}-began").touch()
    while not Path(marker).exists():
        time.sleep(0.02)
    return "seen"


def is_empty(cluster):
    return not cluster.left_over()


def pods_of(cluster, handle):
    return [
        pod["metadata"]["name"]
        for pod in cluster.objects("pods")
        if handle.job_id in pod["metadata"]["name"] and "deletionTimestamp" not in pod["metadata"]
    ]


def start_and_wait(cluster, function, marker, sign="", **options):
    """Start a job; return its handle when the function and all pods have begun."""
    handle = kinetic.run(**SINGLE, **options)(function).run_async(str(marker))
    wait_until(Path(f"{marker}{sign}").exists, "the function has not begun")
    cluster.wait_for(lambda: handle.status() == "RUNNING")
    return handle


def test_one_process_has_the_devices_of_all_machines(on_cluster):
    handle = kinetic.run(**SINGLE)(world).run_async()
    assert handle.result() == (1, 16, 16)
    assert (handle.backend, handle.hosts) == ("pathways", 1)
    assert kinetic.attach(handle.job_id).result() == (1, 16, 16)
    on_cluster.wait_for(lambda: is_empty(on_cluster))


def test_each_machine_has_a_pod(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, wait_for_ever, marker, slices=2)
    kinds = sorted(
        name.rpartition("-")[0].partition("pathways-")[2] for name in pods_of(on_cluster, handle)
    )
    assert kinds == ["head-0-0", *(f"worker-{s}-{n}" for s in range(2) for n in range(4))]
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()
    on_cluster.wait_for(lambda: is_empty(on_cluster))


def test_the_exception_is_raised_here(on_cluster):
    with pytest.raises(LookupError, match="on purpose"):
        kinetic.run(**SINGLE)(fail)()
    on_cluster.wait_for(lambda: is_empty(on_cluster))


@pytest.mark.settles_within(30)
def test_a_controller_that_is_lost_is_named(on_cluster, home):
    handle = start_and_wait(on_cluster, wait_for_ever, home.parent / "m")
    (head,) = [pod for pod in pods_of(on_cluster, handle) if HEAD in pod]
    on_cluster.delete_pod(head, force=True)
    with pytest.raises(HostLost, match="host 0"):
        handle.result(timeout=60)
    on_cluster.wait_for(lambda: is_empty(on_cluster))


@pytest.mark.settles_within(30)
def test_a_lost_controller_is_retried_with_all_pods(on_cluster, home):
    handle = start_and_wait(on_cluster, wait_at_first, home.parent / "m", retries=1)
    (head,) = [pod for pod in pods_of(on_cluster, handle) if HEAD in pod]
    on_cluster.delete_pod(head, force=True)
    assert handle.result(timeout=90) == "again"
    assert handle.outcome().attempt == 2
    on_cluster.wait_for(lambda: is_empty(on_cluster))


def test_a_machine_that_is_lost_is_replaced(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, wait_for_file, marker, "-began")
    (lost,) = [pod for pod in pods_of(on_cluster, handle) if WORKER.format(2) in pod]
    on_cluster.delete_pod(lost, force=True)
    on_cluster.wait_for(
        lambda: [p for p in pods_of(on_cluster, handle) if WORKER.format(2) in p and p != lost]
    )
    on_cluster.wait_for(lambda: handle.status() == "RUNNING")
    marker.touch()
    assert handle.result(timeout=60) == "seen"
    on_cluster.wait_for(lambda: is_empty(on_cluster))


@pytest.mark.long
def test_a_slice_of_an_elastic_job_is_killed_by_deleting_its_pods(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, wait_for_ever, marker, slices=(1, 2))
    machine = f"kinetic-{handle.job_id}-pathways-worker-1-2-"
    (before,) = [name for name in pods_of(on_cluster, handle) if name.startswith(machine)]
    assert handle.kill_hosts(slice=1, host=2) == (7,)
    on_cluster.wait_for(lambda: before not in pods_of(on_cluster, handle))
    on_cluster.wait_for(
        lambda: any(name.startswith(machine) for name in pods_of(on_cluster, handle))
    )
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()
    on_cluster.wait_for(lambda: is_empty(on_cluster))


@pytest.mark.double
def test_what_the_machines_wait_for_is_said_until_the_job_gives_up(on_cluster, capfd):
    on_cluster.hold_back("kinetic-")
    with pytest.raises(JobFailed, match="did not start within"):
        kinetic.run(**SINGLE, start_timeout=4)(world)()
    on_cluster.wait_for(lambda: is_empty(on_cluster))


@pytest.mark.double
def test_a_dry_run_shows_what_would_be_created(on_cluster, tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    words = "run -a tpu-v6e-16 --controller single --dry-run -o json train.py"
    line = [sys.executable, "-m", "kinetic", *words.split()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    workload, secret = json.loads(done.stdout)["items"]
    assert (workload["kind"], secret["kind"]) == ("JobSet", "Secret")
    jobs = {each["name"]: each["replicas"] for each in workload["spec"]["replicatedJobs"]}
    assert jobs == {"pathways-head": 1, "pathways-worker": 1}
    view = repr(kinetic.run(**SINGLE)(world).plan())
    assert "1 x 16 (single controller x devices; tpu 4x4)" in view
    assert "creates    JobSet, Secret" in view
    assert is_empty(on_cluster)


# -- machines with chips ---------------------------------------------------------------------------


@pytest.fixture
def with_chips(on_cluster, monkeypatch, tmp_path):
    """A cluster whose machines have chips, and the file whose creation says that they are up."""
    pytest.importorskip("google.cloud.storage")
    package, up = tmp_path / "site" / "pathwaysutils", tmp_path / "up"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    for name in ("KINETIC_POD_SIMULATED", "KINETIC_POD_STORE"):
        monkeypatch.delenv(name)
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        monkeypatch.setenv("KINETIC_STORE", "gs://bucket/store")
        environ = {"PYTHONPATH": str(package.parent), "MACHINES_ARE_UP": str(up)}
        environ["STORAGE_EMULATOR_HOST"] = double.uri
        on_cluster.set_image({"pathways/server": IDLE}, environ)
        yield on_cluster, up


def read_platform(marker):
    import jax

    Path(marker).touch()
    return jax.devices()[0].client.platform, jax.config.jax_platforms, world()


@pytest.mark.double
def test_a_function_starts_when_pathways_has_all_chips(with_chips, tmp_path):
    cluster, up = with_chips
    handle = kinetic.run(**SINGLE)(read_platform).run_async(str(tmp_path / "m"))
    cluster.wait_for(lambda: handle.status() == "RUNNING")
    assert not (tmp_path / "m").exists()
    up.touch()
    assert handle.result(timeout=120) == ("cpu", "proxy,cpu", (1, 16, 16))
    cluster.wait_for(lambda: is_empty(cluster))


@pytest.mark.long
@pytest.mark.double
@pytest.mark.settles_within(30)
def test_chips_that_are_not_there_are_named(with_chips, tmp_path, capfd):
    cluster, _ = with_chips
    remote = kinetic.run(accelerator="tpu-v5p-16", controller="single", start_timeout=8)(
        read_platform
    )
    with pytest.raises(GangTimeout, match="not ready within 8 s") as caught:
        remote(str(tmp_path / "m"))
    for message in (capfd.readouterr().err, str(caught.value)):
        assert "No node of the cluster has tpu-v5p-slice 2x2x4" in message
    assert not (tmp_path / "m").exists()
    cluster.wait_for(lambda: is_empty(cluster))


@pytest.mark.double
def test_machines_that_do_not_start_end_the_job(with_chips, tmp_path):
    cluster, _ = with_chips
    cluster.set_image({"pathways/server": [sys.executable, "-c", "exit('no such slice')"]})
    with pytest.raises(HostLost, match=r"Pathways' workers ended too often.*pathways-worker-0"):
        kinetic.run(**SINGLE)(read_platform)(str(tmp_path / "m"))
    assert not (tmp_path / "m").exists()
    cluster.wait_for(lambda: is_empty(cluster))


@pytest.mark.long
@pytest.mark.double
@pytest.mark.settles_within(60)
def test_a_head_that_tells_of_its_own_end_first_is_explained(with_chips, tmp_path):
    cluster, _ = with_chips
    end = tmp_path / "end"
    machine = (
        f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)\nexit('x')"
    )
    cluster.set_image({"pathways/server": [sys.executable, "-c", machine]})
    handle = kinetic.run(**SINGLE)(read_platform).run_async(str(tmp_path / "m"))
    store = handle._store
    cluster.wait_for(lambda: store.has(layout.JobKeys(handle.job_id).events))
    end.touch()
    cluster.wait_for(lambda: store.has(layout.JobKeys(handle.job_id).outcome))
    with pytest.raises(HostLost, match=r"Pathways' workers ended too often.*pathways-worker-0"):
        handle.result()
    assert not (tmp_path / "m").exists()
