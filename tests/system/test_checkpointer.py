"""`kinetic.Checkpointer` in jobs: real processes, real collectives, Orbax's real files.

In: trainings that are killed, or lose what they had saved. Out: the step that they go on with, and
what the state is then.
"""

from __future__ import annotations

import functools
import os
import shutil

import pytest

import kinetic
from kinetic._system import memory_folder

pytestmark = pytest.mark.timeout(600)


def train(
    steps,
    *,
    every=4,
    local_every=1,
    die=None,
    lose=(),
    shape=None,
    folder=None,
):
    """Train, and say where it went on from, on which tier, and how it ended.

    Args:
        die: (attempt, step, host) that is killed.
        lose: (attempt, host): the local copies that are gone when that attempt begins.
    """
    import signal

    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    attempt, host = int(os.environ["KINETIC_ATTEMPT"]), jax.process_index()
    if (attempt, host) in lose or (attempt, -1) in lose:
        shutil.rmtree(memory_folder.of_job(os.environ["KINETIC_JOB_ID"]) / f"host-{host}")
    slices = kinetic.num_slices()
    devices = np.array(jax.devices()).reshape(slices, -1)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp"))
    inside = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def made(shape, sharding):
        return jax.make_array_from_callback(
            shape, sharding, lambda part: np.zeros(shape, np.float32)[part]
        )

    state = {"w": made(shape or (8, 3), inside), "b": made((3,), everywhere), "n": 0}

    batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    ones = jax.make_array_from_callback((8,), batch, lambda part: np.ones(8, np.float32)[part])

    @functools.partial(jax.jit, out_shardings=(inside, everywhere))
    def step_of(w, b, n, x):  # needs all hosts
        return w + n, b * 2 + w.sum(axis=0) + x.mean()

    said = []
    with kinetic.Checkpointer(folder, every=every, local_every=local_every) as ckpt:
        state, start = ckpt.restore(state)
        said.append((attempt, start, ckpt.restored and tuple(ckpt.restored)))
        for step in range(start, steps):
            w, b = step_of(state["w"], state["b"], step, ones)
            state = {"w": w, "b": b, "n": state["n"] + step}
            tiers = ckpt.save(step, state, metrics={"n": state["n"]})
            if die == (attempt, step, host):
                ckpt.wait()  # else it depends on luck what is committed
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
    print(f"attempt {attempt} went on at {start}", flush=True)
    total = jax.jit(lambda w, b: w.sum() + b.sum(), out_shardings=everywhere)
    return said, float(total(state["w"], state["b"])), state["n"], tiers


def result_of(job):
    """The value, and that nothing stays in memory."""
    value = job.result()
    job.cleanup()
    assert not memory_folder.of_job(job.job_id).exists()
    return value


def alone(steps):
    """What `train` computes, in plain Python."""
    w, b, n = [[0.0] * 3 for _ in range(8)], [0.0] * 3, 0
    for step in range(steps):
        sums = [sum(row[i] for row in w) for i in range(3)]
        w = [[each + step for each in row] for row in w]
        b = [each * 2 + more + 1 for each, more in zip(b, sums, strict=True)]
        n += step
    return sum(map(sum, w)) + sum(b), n


def test_a_host_that_was_killed_goes_on_from_memory(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1))
    job.result()
    for said, total, n, _ in job.results():
        assert said == [(2, 7, (6, "local", ()))]
        assert (total, n) == alone(11)
    result_of(job)
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {"0", "4", "8"}


def test_a_host_that_lost_its_copy_gets_it_from_the_other_slice(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1), lose=[(2, 1)])
    job.result()
    zero, one = job.results()
    assert zero[0][0][2][1:] == ("local", ())
    assert one[0][0][2][1:] == ("local", (0,))
    assert zero[1:3] == one[1:3] == alone(11)
    result_of(job)


def test_without_local_copies_it_goes_on_from_the_folder(tmp_path):
    run = kinetic.run("cpu:2", slices=2, retries=1, all_hosts=True, output_dir=str(tmp_path))
    job = run(train).run_async(11, die=(1, 6, 1), lose=[(2, -1)])
    job.result()
    for said, total, n, _ in job.results():
        assert said == [(2, 5, (4, "persistent", ()))]
        assert (total, n) == alone(11)
    result_of(job)
