"""Functions whose hosts are preempted or die while a checkpoint is saved. Hosts import this module
instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import json
import time
from pathlib import Path

import kinetic


def step_without_end(folder):
    """Save step after step: for ever in the first attempt, three steps in later ones. Each host
    notes the step and the state from which it continues."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, host = kinetic.attempt(), jax.process_index()
    everywhere = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "x"), P())
    blank = np.zeros(4, np.float32)
    state = {"w": jax.make_array_from_callback((4,), everywhere, lambda part: blank[part])}
    update = jax.jit(lambda w: w + 1, out_shardings=everywhere)
    with kinetic.Checkpointer(Path(folder, "run"), local_every=None) as ckpt:
        state, start = ckpt.restore(state)
        Path(folder, f"{attempt}-{host}").write_text(json.dumps([start, float(state["w"][0])]))
        step = start
        while attempt == 1 or step < start + 3:
            state = {"w": update(state["w"])}
            ckpt.save(step, state)
            Path(folder, f"step-{attempt}-{host}").write_text(str(step))
            step += 1
            time.sleep(0.02)
    return step, float(state["w"][0])
