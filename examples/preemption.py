"""A machine is preempted: all hosts save the same step, and the next attempt continues from it.

    python examples/preemption.py

A cluster sends SIGTERM some seconds before it preempts a spot machine. This script sends SIGTERM to
host 1 of a running training, whose Checkpointer would otherwise save only at step 1000. In `save`,
all hosts agree on a step, save it and end the attempt. A preempted attempt does not count against
`retries`.
"""

import math
import os
import tempfile
import time
from pathlib import Path

import kinetic

os.environ.setdefault("KINETIC_GRACE_S", "30")
STEPS = 200


@kinetic.run(accelerator="tpu-v6e-8", retries=1)
def train(steps):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, progress = kinetic.attempt(), Path(os.environ["KINETIC_OUTPUT_DIR"], "progress")
    split = NamedSharding(kinetic.make_mesh(ici={"fsdp": 8}), P("fsdp"))

    @jax.jit
    def update(weights, step):
        return jax.lax.with_sharding_constraint(weights * 0.99 + jnp.sin(step), split)

    with kinetic.Checkpointer(every=1000, local_every=None) as checkpoints:
        weights = jax.device_put(np.zeros(64, np.float32), split)
        weights, start = checkpoints.restore(weights)
        print(f"attempt {attempt} begins with step {start}", flush=True)
        for step in range(start, steps):
            weights = update(weights, step)
            if jax.process_index() == 0:
                progress.write_text(str(step))
            time.sleep(0.03)  # A real model computes meanwhile.
            checkpoints.save(step, weights)  # Also ends the attempt once a host is to be preempted.
    mean = jax.jit(jnp.mean, out_shardings=NamedSharding(split.mesh, P()))(weights)
    return float(mean)


def main():
    with tempfile.TemporaryDirectory(prefix="kinetic-preemption-") as folder:
        job, progress = (
            train.with_options(output_dir=folder).run_async(STEPS),
            Path(folder, "progress"),
        )
        while not job.done() and not (progress.exists() and int(progress.read_text() or 0) > 20):
            time.sleep(0.05)
        job.kill_hosts(host=1, signal="TERM", agents=True)
        job.logs(follow=True)
        mean = job.result()
    expected = 0.0
    for step in range(STEPS):
        expected = expected * 0.99 + math.sin(step)
    print(f"mean {mean:.4f}; it should be {expected:.4f}")


if __name__ == "__main__":
    main()
