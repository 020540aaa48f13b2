"""kill -9 of hosts at any moment of saves and restores of a gang: what is restored afterwards is
whole, and of one step on all hosts.

In: four hosts on two slices that save as fast as they can, in both tiers; one of them is killed in
each attempt. Out: what each attempt has restored; nothing that was cut off is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import kinetic
from kinetic._system import memory_folder

pytestmark = [pytest.mark.timeout(900), pytest.mark.settles_within(60)]
KILLS = int(os.environ.get("KINETIC_TEST_KILLS", "1"))
ROWS = 1 << 14
"""256 KiB of the state are on each device."""


def save_and_be_killed(folder, kills, seed):
    """Save step after step; in each of the first attempts a host is killed at a random moment."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, host = int(os.environ["KINETIC_ATTEMPT"]), jax.process_index()
    luck = random.Random(seed * 1000 + attempt)  # the same on all hosts
    victim = luck.randrange(jax.process_count())
    when = luck.choice(["restore", *range(1, 8)])  # how many saves have begun
    moment_s, waits = luck.uniform(0.0, 0.3), luck.random() < 0.5

    def die():
        time.sleep(moment_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def may_die(now):
        if attempt <= kills and host == victim and when == now:
            threading.Thread(target=die, daemon=True).start()

    mesh = kinetic.make_mesh()  # "data" over slices, "fsdp" within
    split, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    blank = np.full((ROWS, 16), -1.0, np.float32)
    state = {
        name: jax.make_array_from_callback(blank.shape, sharding, lambda part: blank[part])
        for name, sharding in (("split", split), ("everywhere", everywhere))
    }
    steps_of = jax.jit(
        lambda state, step: jax.tree.map(lambda array: array * 0 + step, state),
        out_shardings={"split": split, "everywhere": everywhere},
    )
    largest = jax.jit(lambda x: x.max(), out_shardings=everywhere)  # needs all hosts

    may_die("restore")
    with kinetic.Checkpointer(
        Path(folder, "run"), every=3, local_every=1, keep=2, at_least_every=None
    ) as ckpt:
        state, start = ckpt.restore(state)
        parts = [s.data for array in state.values() for s in array.addressable_shards]
        values = sorted({float(value) for part in parts for value in (part.min(), part.max())})
        tier = ckpt.restored and ckpt.restored.tier
        found = Path(folder, f"{attempt}-{host}")
        found.with_suffix(".new").write_text(json.dumps([start, values, tier]))
        found.with_suffix(".new").rename(found)
        step = start
        while attempt <= kills or step < start + 3:
            state = steps_of(state, float(step))
            assert float(largest(state["split"])) == step
            may_die(step - start + 1)
            ckpt.save(step, state)
            if waits:
                ckpt.wait()
            # All hosts were alive at this step, and had waited for that one before it.
            Path(folder, f"done-{attempt}-{host}").write_text(str(step - 1 if waits else step - 2))
            step += 1
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"slices": 2, "retries": KILLS},
        {"slices": (1, 2), "on_slice_loss": "shrink", "max_failures": KILLS},
    ],
    ids=["retries", "elastic"],
)
def test_what_a_gang_restores_is_whole_and_of_one_step(tmp_path, options):
    seed = int(os.environ.get("KINETIC_TEST_SEED", "1"))
    remote = kinetic.run("tpu-v6e-8", **options)(save_and_be_killed)
    job = remote.run_async(str(tmp_path), KILLS, seed)
    last = job.result(timeout=600)
    before, seen = 0, []
    attempts = {int(path.name.split("-")[0]) for path in tmp_path.glob("[0-9]*-[0-9]")}
    for attempt in sorted(attempts):  # without those that ended while they restored
        hosts = [json.loads(p.read_text()) for p in tmp_path.glob(f"{attempt}-[0-9]")]
        assert all(each == hosts[0] for each in hosts), (attempt, hosts)
        start, values, tier = hosts[0]
        assert values == [start - 1.0], "all of one step"
        assert start >= before, "nothing that was restored once is lost"
        done = [
            int(path.read_text() or -1)
            for path in tmp_path.glob("done-*")
            if int(path.name.split("-")[1]) < attempt
        ]
        assert start > max(done, default=-1), "nothing that was committed is lost"
        before = start
        seen.append(tier)
    assert last == before + 3
    assert "local" in seen
    job.cleanup()
    assert not memory_folder.of_job(job.job_id).exists()
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert not [name for name in left if "tmp" in name], left
    assert len([name for name in left if name.isdigit()]) <= 2
