"""Jobs on a real Ray cluster, whose raylets on this machine stand for the hosts of TPU slices:
values, losses, waiting, growth. The cluster is clean afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from doubles.ray_cluster import SliceShape
from elastic_jobs import Watched
from gangs import is_titled, kill, train, wait_until

import kinetic
from kinetic import errors
from kinetic._client import debugging
from kinetic._client.access import open_access
from kinetic._core.exits import Exit
from kinetic._ray.jobs_api import JobsApi
from kinetic._store import attempts
from kinetic._store.local import LocalStore
from kinetic._system import processes

pytestmark = pytest.mark.settles_within(90)  # Agents look for a dead leader for so long.
LIMIT_S = 400
TESTS = Path(__file__).resolve().parents[1]
V6E_4 = SliceShape("v6e-4", "2x2", hosts=1)
V5P_16 = SliceShape("v5p-16", "2x2x2", hosts=2)


@pytest.fixture
def on_ray(ray_cluster, home, monkeypatch):
    """Send jobs to the test cluster; check afterwards that no job has left anything in it."""
    monkeypatch.setenv("KINETIC_ADDRESS", ray_cluster.address)
    monkeypatch.setenv("KINETIC_STORE", str(home))
    monkeypatch.setenv("KINETIC_POD_PYTHON", sys.executable)
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "1")
    yield ray_cluster
    wait_until(lambda: list_left(ray_cluster) == [], "something is left in the cluster")


def list_left(cluster):
    """List the host actors and placement groups that still exist in the cluster."""
    api = JobsApi(cluster.address, cluster.token)
    actors = api._call_state("/api/v0/actors", {"detail": "1", "limit": "1000"})["result"]
    groups = api._call_state("/api/v0/placement_groups", {"detail": "1", "limit": "1000"})["result"]
    own = [each["class_name"] for each in actors if each["state"] != "DEAD"]
    return [*(name for name in own if name == "HostActor"), *_find_held(groups)]


def _find_held(groups):
    return [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]


def find_pid(title):
    """Return the pid of the process with this title; all processes run on this machine."""
    (match,) = (pid for pid in processes.all_pids() if is_titled(pid, title))
    return match


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def hold(folder):
    index = os.environ["KINETIC_HOST_INDEX"]
    print(f"host {index} runs", flush=True)
    Path(folder, index).touch()
    time.sleep(1000)


@pytest.fixture
def held(on_ray, tmp_path):
    """A running job whose four hosts have all begun the function."""
    handle = kinetic.run("tpu-v6e-16")(hold).run_async(str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "the function has not begun")
    return handle


def wait_for(folder, *names):
    wait_until(lambda: all((folder / name).exists() for name in names), f"there is no {names}")


def live(folder):
    """Wait for a loss in attempt 1; in attempt 2 train, then raise on host 2."""
    attempt, index = kinetic.attempt(), os.environ["KINETIC_HOST_INDEX"]
    print(f"attempt {attempt}", flush=True)
    Path(folder, f"{attempt}-{index}").touch()
    if attempt < 2:
        time.sleep(1000)
    summary = train()
    if index == "2":
        raise LookupError(f"on purpose, after {summary}")
    time.sleep(1000)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["actor", pytest.param("process", marks=pytest.mark.release)])
def test_a_gang_of_four_has_a_loss_trains_and_fails(on_ray, tmp_path, lost):
    """The loss of a host ends attempt 1 on all hosts. In attempt 2 they train, and the exception of
    host 2 reaches the caller unchanged."""
    handle = kinetic.run("tpu-v6e-16", retries=1)(live).run_async(str(tmp_path))
    job = handle.job_id
    wait_for(tmp_path, *(f"1-{host}" for host in range(4)))
    if lost == "actor":
        kill(parent_of(find_pid(f"kinetic-host {job} host 1")))
    else:
        kill(find_pid(f"kinetic-worker {job} host 1"))
    with pytest.raises(LookupError, match=r"on purpose, after \(4, 16, True\)") as caught:
        handle.result(timeout=LIMIT_S)
    assert "host 2 of 4" in "\n".join(caught.value.__notes__)
    store = LocalStore(Path(os.environ["KINETIC_STORE"]))
    reason = attempts.read_verdict(store, job, 1).reason
    assert "host 1 of 4" in reason
    # Ray reports the death, and so does the agent below the actor; either may be first.
    if lost == "actor":
        assert "its actor on 127.0.0.1 died" in reason or "Its program was killed." in reason
    else:
        assert "The worker process was killed by SIGKILL" in reason
    assert "attempt 1\n" in "".join(handle.logs())


@pytest.mark.release
def test_a_job_waits_for_a_slice_that_another_one_has_which_loses_its_node(
    on_ray, held, monkeypatch
):
    """One job holds the only slice. The error of a second job says that it waited for nodes. Then
    the first job loses a raylet, and its error comes before Ray notices the loss."""
    monkeypatch.setenv("KINETIC_START_TIMEOUT_S", "8")
    waiting = kinetic.run("tpu-v6e-16")(hold).run_async("/nowhere")
    with pytest.raises(errors.JobFailed, match="did not join within 8 s") as late:
        waiting.result(timeout=LIMIT_S)
    assert "It waits for 4 nodes with 1 CPU, 4 TPU each" in str(late.value)
    on_ray.kill_node(3)
    with pytest.raises(errors.HostLost, match="host 2 of 4"):
        kinetic.attach(held.job_id).result(timeout=LIMIT_S)


SUBMIT_AND_DIE = """
import os, signal, kinetic
print(kinetic.run("cpu")(int).run_async("7").job_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_job_whose_caller_was_killed_goes_on_and_ray_itself_tells_how_it_ended(on_ray):
    """The caller is killed, and the job goes on. Ray's dashboard also shows SUCCEEDED for it."""
    caller = [sys.executable, "-c", SUBMIT_AND_DIE]
    job_id = subprocess.run(caller, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert kinetic.attach(job_id).result(timeout=LIMIT_S) == 7
    ray_job = JobsApi(on_ray.address, on_ray.token).find(job_id)
    assert ray_job is not None
    assert ray_job.status == "SUCCEEDED"


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        "driver is killed",
        pytest.param("somebody cancels", marks=pytest.mark.release),
    ],
)
def test_the_end_of_a_driver_ends_its_host(on_ray, tmp_path, how):
    """The driver leads the job. When it ends, its host ends too."""
    handle = kinetic.run("cpu")(hold).run_async(str(tmp_path))
    wait_for(tmp_path, "0")
    attached = kinetic.attach(handle.job_id)
    assert "hold" in attached.stacks()[0], "it is asked in the store"
    if how == "somebody cancels":
        attached.cancel()
        with pytest.raises(errors.JobCancelled):
            attached.result(timeout=LIMIT_S)
        return
    kill(find_pid(f"kinetic-host {handle.job_id} head"))
    with pytest.raises(errors.HostLost, match="the head, which led the job"):
        handle.result(timeout=LIMIT_S)


def add_up(folder, times):
    assert hash("kinetic") == int(os.environ["HASH"]), "the interpreter had a seed at its start"
    total = sum(int(file.read_text()) for file in Path(folder).iterdir())
    Path(os.environ["KINETIC_OUTPUT_DIR"], "total").write_text(str(total))
    return total * times


@pytest.mark.long
def test_a_batch_over_declared_data(on_ray, tmp_path):
    (tmp_path / "data").mkdir()
    for number in (1, 2):
        (tmp_path / "data" / str(number)).write_text(str(number))
    data = kinetic.Data(tmp_path / "data")
    env = {"PYTHONHASHSEED": "7"}
    program = [sys.executable, "-c", "print(hash('kinetic'))"]
    env["HASH"] = subprocess.check_output(program, env=os.environ | env, text=True).strip()
    call = kinetic.run("cpu", output_dir=str(tmp_path / "out"), env=env)(add_up)
    batch = call.run_async_map([(data, 1), (data, 10)])
    assert batch.results(progress=False) == [3, 30]
    assert [file.read_text() for file in (tmp_path / "out").rglob("total")]


STEPS = 24


def batch_of(step):
    return np.random.default_rng(step).standard_normal((8, 4), np.float32)


def train_alone():
    """Compute the training without JAX on one machine; return the loss of each step."""
    weights, losses = np.zeros(4, np.float32), []
    for step in range(STEPS):
        x = batch_of(step)
        error = x @ weights - np.sin(x.sum(1))
        losses.append(float((error**2).mean()))
        weights = weights - np.float32(0.1) * 2 * (error @ x) / len(x)
    return losses


def train_in_turns(folder):
    """Train on one slice or more, each with its share of every batch; save every step."""
    import jax
    from jax.experimental import multihost_utils

    hosts, rank, losses = jax.process_count(), jax.process_index(), {}
    with kinetic.Checkpointer(f"{folder}/saved", every=1, local_every=None) as checkpoints:
        state, first = checkpoints.restore({"weights": jax.numpy.zeros(4)})
        Path(folder, f"{kinetic.attempt()}-{hosts}-{rank}").touch()
        for step in range(first, STEPS):
            x = np.split(batch_of(step), hosts)[rank]
            error = x @ np.asarray(state["weights"]) - np.sin(x.sum(1))
            mine = np.append(error @ x, (error**2).sum()).astype(np.float32)
            total = multihost_utils.process_allgather(mine).reshape(hosts, -1).sum(0) / 8
            state["weights"] = state["weights"] - 0.1 * 2 * total[:-1]
            losses[step] = float(total[-1])
            print(f"loss {step} {losses[step]:.6f}", flush=True)
            while step == STEPS // 3 and kinetic.attempt() == 1:
                time.sleep(0.1)  # until a node is killed
            while step == 2 * STEPS // 3 and hosts == 1 and not kinetic.should_reform():
                time.sleep(0.1)  # until the slice is back
            checkpoints.save(step, state)
    return kinetic.attempt(), kinetic.num_slices()


@pytest.mark.long
def test_an_elastic_training_survives_a_node_and_grows_again_with_equal_losses(
    on_ray, home, tmp_path
):
    nodes = [on_ray.add_slice(f"small-{n}", V6E_4)[0] for n in range(2)]
    elastic = kinetic.run("tpu-v6e-4", slices=(1, 2), on_slice_loss="shrink", start_wait="300s")(
        train_in_turns
    )
    job = Watched(home, elastic.run_async(str(tmp_path)))
    wait_for(tmp_path, "1-2-0", "1-2-1")
    wait_until(lambda: f"loss {STEPS // 3} " in "".join(job.handle.logs()), "it does not train")
    on_ray.kill_node(nodes[1])
    wait_for(tmp_path, "2-1-0")
    access = open_access({})

    def waits_for():
        return access.board.read_standing(access.find(job.handle.job_id)).reason

    wait_until(lambda: "it waits for 1 node" in waits_for(), "it does not say what it waits for")
    on_ray.mend()
    wait_for(tmp_path, "3-2-0", "3-2-1")
    wait_until(lambda: waits_for() == "", "it still says that it waits")
    assert job.handle.result(timeout=LIMIT_S) == (3, 2)
    assert [len(slices) for slices in job.slices()] == [2, 1, 2]
    losses_logged = re.findall(r"loss (\d+) (\S+)", "".join(job.handle.logs()))
    losses = {int(step): float(value) for step, value in losses_logged}
    assert [losses[step] for step in range(STEPS)] == pytest.approx(train_alone(), rel=1e-3)


def save_until_told(folder):
    """Train; save only on preemption, which ends attempt 1. Later attempts return where they
    continued."""
    attempt, place = kinetic.attempt(), os.environ["TPU_NAME"]
    with kinetic.Checkpointer(f"{folder}/saved", every=1000, local_every=None) as checkpoints:
        state, first = checkpoints.restore({"total": np.zeros(1)})
        Path(folder, f"{attempt}-{os.environ['KINETIC_HOST_INDEX']}-{place}").touch()
        for step in range(first, 1_000_000):
            if attempt > 1 and kinetic.num_slices() == 1:
                return attempt, place, first, float(state["total"][0])
            state["total"] = state["total"] + 1
            checkpoints.save(step, state)
            time.sleep(0.02)


@pytest.mark.long
def test_a_slice_of_which_a_node_is_drained_saves_and_goes_on_on_another_one(on_ray, tmp_path):
    """A node of the slice is drained: the job saves, and continues on another free slice. The move
    does not count as a retry."""
    _, second = on_ray.add_slice("pair-0", V5P_16)
    handle = kinetic.run("tpu-v5p-8", retries=1)(save_until_told).run_async(str(tmp_path))
    wait_for(tmp_path, "1-0-pair-0", "1-1-pair-0")
    on_ray.add_slice("pair-1", V5P_16)
    on_ray.drain_node(second)
    attempt, place, first, total = handle.result(timeout=LIMIT_S)
    assert (attempt, place) == (2, "pair-1")
    assert first == total > 0, "nothing was saved when it was told"
    store = LocalStore(Path(os.environ["KINETIC_STORE"]))
    outcome = attempts.read_verdict(store, handle.job_id, 1)
    assert outcome.first.exit is Exit.EVICTED
    assert "host 1 of 2" in outcome.reason
    assert attempts.count_taken_away(store, handle.job_id, 2) == 1
    assert "the function has 5 s to save" in handle.logs(attempt=1)


def find_reserved(cluster):
    """Return the name of the multi-host slice that a job has reserved; "" if there is none."""
    api = JobsApi(cluster.address, cluster.token)
    groups = api._call_state("/api/v0/placement_groups", {"detail": "1", "limit": "1000"})["result"]
    held = [g["bundles"] for g in groups if g["state"] == "CREATED" and len(g["bundles"]) > 1]
    labels = {node.node_id: node.labels for node in api.nodes()}
    return labels[held[0][0]["node_id"]]["ray.io/tpu-slice-name"] if held else ""


def name_slice():
    return kinetic.attempt(), os.environ["TPU_NAME"]


@pytest.mark.long
def test_a_slice_that_loses_a_node_before_its_hosts_have_started_is_left_for_another(
    on_ray, monkeypatch
):
    """One node of a reserved slice is lost before the hosts start: the job moves to another slice.
    This counts as no attempt, and does not wait for start_timeout."""
    monkeypatch.setenv("KINETIC_START_TIMEOUT_S", "120")
    nodes = {f"pair-{n}": on_ray.add_slice(f"pair-{n}", V5P_16) for n in range(2)}
    handle = kinetic.run("tpu-v5p-8")(name_slice).run_async()
    chosen = wait_until(lambda: find_reserved(on_ray), "nothing is reserved")
    on_ray.kill_node(nodes[chosen][1])
    (other,) = nodes.keys() - {chosen}
    assert handle.result(timeout=LIMIT_S) == (1, other)


@pytest.mark.release
def test_an_elastic_job_gives_up_a_slice_whose_node_is_drained(on_ray, home, tmp_path):
    nodes = [on_ray.add_slice(f"small-{n}", V6E_4)[0] for n in range(2)]
    elastic = kinetic.run("tpu-v6e-4", slices=(1, 2), on_slice_loss="shrink", start_wait="300s")
    job = Watched(home, elastic(save_until_told).run_async(str(tmp_path)))
    wait_until(lambda: len(list(tmp_path.glob("1-?-small-?"))) == 2, "it has not begun")
    on_ray.drain_node(nodes[1])
    attempt, place, first, total = job.handle.result(timeout=LIMIT_S)
    assert (attempt, place) == (2, "small-0")
    assert first == total > 0
    assert [len(slices) for slices in job.slices()] == [2, 1]


def stay(folder):
    """Wait in attempt 1 until the file "enough" exists, even if preempted. Return the attempt, the
    slice and whether it was preempted."""
    Path(folder, f"{kinetic.attempt()}-{os.environ['TPU_NAME']}").touch()
    while kinetic.attempt() == 1 and not Path(folder, "enough").exists():
        is_preempted = kinetic.preempted()
        time.sleep(0.05)
    return kinetic.attempt(), os.environ["TPU_NAME"], kinetic.attempt() == 1 and is_preempted


@pytest.mark.release
def test_nobody_is_told_of_a_node_that_nothing_of_the_job_uses(on_ray, tmp_path):
    nodes = {f"small-{n}": on_ray.add_slice(f"small-{n}", V6E_4)[0] for n in range(2)}
    handle = kinetic.run("tpu-v6e-4")(stay).run_async(str(tmp_path))
    mark = wait_until(lambda: next(tmp_path.glob("1-*"), None), "it has not begun")
    mine = mark.name.partition("-")[2]
    (other,) = nodes.keys() - {mine}
    on_ray.drain_node(nodes[other])
    wait_until(lambda: not on_ray.nodes()[nodes[other]], "Ray does not end an idle node")
    (tmp_path / "enough").touch()
    assert handle.result(timeout=LIMIT_S) == (1, mine, False)


@pytest.mark.release
def test_a_function_that_outstays_a_drain_is_ended_and_goes_on_elsewhere(
    on_ray, tmp_path, monkeypatch
):
    """A drained node stays up after its deadline: kinetic ends the function and moves the job."""
    monkeypatch.setenv("KINETIC_GRACE_S", "3")
    nodes = {f"small-{n}": on_ray.add_slice(f"small-{n}", V6E_4)[0] for n in range(2)}
    handle = kinetic.run("tpu-v6e-4", retries=1)(stay).run_async(str(tmp_path))
    mark = wait_until(lambda: next(tmp_path.glob("1-*"), None), "it has not begun")
    mine = mark.name.partition("-")[2]
    (other,) = nodes.keys() - {mine}
    on_ray.drain_node(nodes[mine], deadline_s=1)
    assert handle.result(timeout=LIMIT_S) == (2, other, False)
    outcome = attempts.read_verdict(LocalStore(Path(os.environ["KINETIC_STORE"])), handle.job_id, 1)
    assert outcome.first.exit is Exit.EVICTED


@kinetic.run(accelerator="cpu", debug=True, retries=0)
def pause(number):
    total = 2 * number
    breakpoint()
    return total


@pytest.mark.release
def test_a_debugger_is_named_with_its_node_and_port(on_ray, home):
    """The debugger's port can be reached on its own node only. The error names node and port, and
    gives an ssh command that forwards the port."""
    handle = pause.run_async(4)
    with pytest.raises(errors.UsageError, match="ssh -N -L 5678:") as refusal:
        handle.debug_attach()
    debugger = debugging.read(LocalStore(home), handle.ref)
    assert f"on port {debugger.port} of {debugger.address}," in str(refusal.value)
    connect = f"import socket; socket.create_connection(('127.0.0.1', {debugger.port}))"
    assert on_ray.run_inside([sys.executable, "-c", connect]).returncode == 0
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result(timeout=LIMIT_S)


@pytest.mark.release
def test_a_program_that_brings_its_own_distribution_runs_once(on_ray):
    """Ray Train runs its own trainer on the slice that kinetic has reserved. The cluster's address
    comes from RAY_ADDRESS."""
    named = {k: v for k, v in os.environ.items() if k not in ("KINETIC_ADDRESS", "KINETIC_STORE")}
    trainer = [str(TESTS / "doubles/jax_trainer.py"), "4", "4x4", "5"]
    run = ["kinetic", "run", "--backend", "ray", "--once", "--cpu", "0.5"]
    command = [sys.executable, "-m", *run, *trainer]
    env = named | {"RAY_ADDRESS": on_ray.address}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout
    steps = re.findall(r"step (\d+) on 4 loss (\S+)", done.stdout + done.stderr)
    losses = {int(step): float(value) for step, value in steps}
    assert [losses[step] for step in range(5)] == pytest.approx(train_alone()[:5], rel=1e-3)
