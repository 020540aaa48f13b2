"""Damage in the folder of a gang: found on every mesh, by all hosts alike.

In: a state that is saved over the rows of two hosts, a flipped bit. Out: the step before it, on
both hosts, cut along other axes; and no false alarm.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kinetic

pytestmark = pytest.mark.timeout(600)


def save_and_restore():
    """Return for each restore: the step, and whether this host's part is what was saved."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("hosts", "chips"))
    specs = {
        "as saved": P(("hosts", "chips")),
        "whole on each host": P("chips"),
        "columns": P(None, ("hosts", "chips")),
        "other rows": P("chips", "hosts"),
    }

    def content(step):
        return np.random.default_rng(step).normal(size=(64, 96)).astype(np.float32)

    def state(spec, step, dtype=np.float32):
        over, whole = NamedSharding(mesh, spec), content(step).astype(dtype)
        w = jax.make_array_from_callback(whole.shape, over, lambda part: whole[part])
        half = w.astype(jax.numpy.bfloat16)
        own = jax.numpy.arange(3.0) + step
        return {"w": w, "half": half, "n": step, "nan": float("nan"), "own": own}

    def restored(spec, dtype=np.float32, **options):
        with kinetic.Checkpointer(folder, local_every=None, **options) as ckpt:
            found, _ = ckpt.restore(state(spec, 0, dtype))
        step = ckpt.restored.step
        right = all(
            np.array_equal(np.asarray(a.data), content(step).astype(a.data.dtype)[a.index])
            for name in ("w", "half")
            for a in found[name].addressable_shards
        )
        return step, right and found["n"] == step

    folder = Path(os.environ["KINETIC_OUTPUT_DIR"], "checkpoints")
    rows = specs["as saved"]
    for step in (1, 2):
        with kinetic.Checkpointer(folder, every=1, local_every=None) as ckpt:
            if step == 2:
                ckpt.restore(state(rows, 0))
            ckpt.save(step, state(rows, step))
    found = {name: restored(spec) for name, spec in specs.items()}
    found["cast"] = restored(rows, np.float64)
    if jax.process_index() == 0:  # of what the other host has written
        files = Path(folder, "2/state/ocdbt.process_1/d").iterdir()
        file = max(files, key=lambda each: each.stat().st_size)
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 3] ^= 1
        file.write_bytes(damaged)
    multihost_utils.sync_global_devices("damaged")
    for name, spec in specs.items():
        found[f"{name}, damaged"] = restored(spec)
    found["not verified"] = restored(rows, verify=False)
    return found


def restore_alone():
    import jax
    import numpy as np

    like = {"w": np.zeros((64, 96), np.float32), "n": 0, "nan": float("nan")}
    like |= {"half": jax.numpy.zeros((64, 96), "bfloat16"), "own": np.zeros(3, np.float32)}
    with kinetic.Checkpointer(local_every=None) as ckpt:
        found, _ = ckpt.restore(like)
    content = np.random.default_rng(ckpt.restored.step).normal(size=(64, 96)).astype(np.float32)
    return ckpt.restored.step, bool((found["w"] == content).all())


def test_damage_is_found_on_every_mesh(tmp_path):
    run = kinetic.run("cpu:2", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_and_restore).run_async()
    job.result()
    zero, one = job.results()
    for name in zero:
        step = 1 if name.endswith("damaged") else 2
        assert (name, *zero[name]) == (name, step, True)
        assert (name, *one[name]) == (name, step, name != "not verified")
    told = [line for line in job.logs().splitlines() if "leaf ['w'] is not what was saved" in line]
    assert len(told) == 4, job.logs()
    assert "step 2 in" in told[0]
    alone = kinetic.run("cpu", output_dir=str(tmp_path))(restore_alone).run_async()
    assert alone.result() == (1, True)
    assert "leaf ['w'] is not what was saved" in alone.logs()
