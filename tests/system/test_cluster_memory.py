"""Pods have a folder in memory: what functions find there, also in the next attempt.

In: functions on a cluster whose pods are processes of this machine. Out: what each host sees, which
tier a training is restored from.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import kinetic

pytestmark = pytest.mark.double
TWO_HOSTS = "tpu-v6e-8"


def look_again():
    """Leave a mark, see what there is; in the first attempt, host 1 is killed then."""
    import jax
    from jax.experimental import multihost_utils

    folder = Path(os.environ["KINETIC_LOCAL_DIR"])
    before = sorted(path.name for path in folder.iterdir())
    (folder / f"{os.environ['KINETIC_ATTEMPT']}-{jax.process_index()}").touch()
    multihost_utils.sync_global_devices("marked")
    if os.environ["KINETIC_ATTEMPT"] == "1" and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = (folder / "jax-init-info.txt").read_text().split("\n")[0]
    multihost_utils.sync_global_devices("read")
    return before, told


def test_each_pod_has_a_folder_of_its_own_that_stays_between_attempts(on_cluster):
    handle = kinetic.run(TWO_HOSTS, retries=1, all_hosts=True)(look_again).run_async()
    seen = handle.results(timeout=300)
    init = "jax-init-info.txt"
    assert seen == [(["1-0", init], "0"), (["1-1", init], "1")]
    handle.cleanup()
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def train(steps):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spread = NamedSharding(mesh, P("data"))
    weights = jax.make_array_from_callback((16,), spread, lambda part: np.zeros(16)[part])
    with kinetic.Checkpointer(every=100, at_least_every=None, local_every=1) as ckpt:
        state, start = ckpt.restore({"weights": weights})
        for step in range(start, steps):
            state = {"weights": jax.jit(lambda weights: weights + 1)(state["weights"])}
            ckpt.save(step, state)
            if step == 3 and os.environ["KINETIC_ATTEMPT"] == "1":
                ckpt.wait()
                if jax.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    first = float(state["weights"].addressable_shards[0].data[0])
    return start > 0 and ckpt.restored.tier, first


def test_a_training_goes_on_from_the_memory_of_its_pods(on_cluster, home):
    pytest.importorskip("orbax.checkpoint")
    run = kinetic.run(TWO_HOSTS, retries=1, output_dir=home.parent / "run")
    assert run(train)(6) == ("local", 6.0)
