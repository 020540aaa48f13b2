"""What callers see of jobs on a real Ray cluster: values, losses, waiting, growth; and that nothing
is left of them there.

In: functions, run on raylets that stand for the hosts of TPU slices. Out: what the promises say.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from doubles.ray_cluster import SliceShape
from elastic_jobs import Watched
from gangs import is_titled, kill, train, wait_until

import kinetic
from kinetic import errors
from kinetic._ray.jobs_api import JobsApi
from kinetic._system import processes

pytestmark = pytest.mark.settles_within(90)  # Agents that nobody leads look for their leader.
LIMIT_S = 400
V6E_8 = SliceShape("v6e-8", "2x4", hosts=2)


@pytest.fixture
def on_ray(ray_cluster, home, monkeypatch):
    """Jobs go to the cluster of the tests; nothing is left of them afterwards."""
    monkeypatch.setenv("KINETIC_ADDRESS", ray_cluster.address)
    monkeypatch.setenv("KINETIC_STORE", str(home))
    monkeypatch.setenv("KINETIC_POD_PYTHON", sys.executable)
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "1")
    yield ray_cluster
    wait_until(lambda: list_left(ray_cluster) == [], "something is left in the cluster")


def list_left(cluster):
    """Actors and placement groups that are there."""
    api = JobsApi(cluster.address, cluster.token)
    actors = api._ask_state("/api/v0/actors", {"detail": "1", "limit": "1000"})["result"]
    groups = api._ask_state("/api/v0/placement_groups", {"detail": "1", "limit": "1000"})["result"]
    own = [each["class_name"] for each in actors if each["state"] != "DEAD"]
    return [*(name for name in own if name == "HostActor"), *_find_held(groups)]


def _find_held(groups):
    return [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]


def find_pid(title):
    """The id, as it is seen here, of a process in the cluster."""
    (found,) = (pid for pid in processes.all_pids() if is_titled(pid, title))
    return found


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def hold(folder):
    index = os.environ["KINETIC_HOST_INDEX"]
    print(f"host {index} runs", flush=True)
    Path(folder, index).touch()
    time.sleep(1000)


@pytest.fixture
def held(on_ray, tmp_path):
    """A gang of four, all in the function."""
    handle = kinetic.run("tpu-v6e-16")(hold).run_async(str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "the function has not begun")
    return handle


def test_a_slice_of_four_trains_and_its_output_comes_back(on_ray, capfd):
    def shout():
        print("loud and clear", flush=True)
        return train()

    assert kinetic.run("tpu-v6e-16")(shout)() == (4, 16, True)
    assert "loud and clear\n" in capfd.readouterr().out


def test_ray_itself_tells_how_a_job_ended(on_ray):
    """Its dashboard showed each job as FAILED whose entry was deleted as soon as it had ended."""
    handle = kinetic.run("cpu")(lambda: 7).run_async()
    assert handle.result(timeout=LIMIT_S) == 7
    told = JobsApi(on_ray.address, on_ray.token).find(handle.job_id)
    assert told is not None
    assert told.status == "SUCCEEDED"


def test_the_exception_of_a_host_comes_back(on_ray):
    @kinetic.run("tpu-v6e-16")
    def fail():
        if os.environ["KINETIC_HOST_INDEX"] == "2":
            raise LookupError("on purpose")
        time.sleep(1000)

    with pytest.raises(LookupError, match="on purpose") as caught:
        fail()
    assert "host 2 of 4" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("what", ["worker", "actor", "raylet", "driver"])
def test_the_loss_of_a_process_ends_the_gang(on_ray, held, what):
    job = held.job_id
    if what == "raylet":
        on_ray.kill_node(3)
    elif what == "actor":
        kill(parent_of(find_pid(f"kinetic-host {job} seat 2")))
    elif what == "worker":
        kill(find_pid(f"kinetic-worker {job} host 2"))
    else:
        kill(find_pid(f"kinetic-host {job} head"))
    with pytest.raises(errors.HostLost) as lost:
        held.result(timeout=LIMIT_S)
    where = "the head, which led the job" if what == "driver" else "host 2 of 4"
    assert where in str(lost.value)


def test_a_job_waits_for_a_slice_that_another_one_has(on_ray, held, monkeypatch):
    """... and says so; the other one is detached, and cancelled by whoever attaches to it."""
    monkeypatch.setenv("KINETIC_START_TIMEOUT_S", "25")
    waiting = kinetic.run("tpu-v6e-16")(hold).run_async("/nowhere")
    with pytest.raises(errors.JobFailed, match="did not join within 25 s") as late:
        waiting.result(timeout=LIMIT_S)
    assert "It waits for 4 nodes with 1 CPU, 4 TPU each" in str(late.value)
    attached = kinetic.attach(held.job_id)
    attached.cancel()
    with pytest.raises(errors.JobCancelled):
        attached.result(timeout=LIMIT_S)


def count_until_over(folder):
    """Stay until somebody says that it is over; make room for a slice that is back."""
    own = Path(folder, f"{kinetic.attempt()}-{os.environ['KINETIC_HOST_INDEX']}")
    own.touch()
    while not Path(folder, "over").exists():
        if kinetic.should_reform():
            kinetic.reform()
        time.sleep(0.05)
    return kinetic.attempt(), int(os.environ["KINETIC_HOSTS"]), kinetic.num_slices()


def test_an_elastic_job_survives_a_node_and_grows_again(on_ray, home, tmp_path):
    _, lost = (on_ray.add_slice(f"small-{n}", V6E_8)[1] for n in range(2))
    elastic = kinetic.run("tpu-v6e-8", slices=(1, 2), on_slice_loss="shrink", start_wait="300s")(
        count_until_over
    )
    job = Watched(home, elastic.run_async(str(tmp_path)))
    wait_until((tmp_path / "1-0").exists, "no first attempt")
    assert job.slices() == [(0, 1)]
    on_ray.kill_node(lost)
    wait_until((tmp_path / "2-0").exists, "no attempt on the slice that is left")
    on_ray.mend()
    wait_until((tmp_path / "3-0").exists, "it does not grow")
    (tmp_path / "over").touch()
    assert job.handle.result(timeout=LIMIT_S) == (3, 4, 2)
    assert [len(slices) for slices in job.slices()] == [2, 1, 2]
