"""Save to the hosts' memory at every step, lose a host with its memory, and restore from another.

    python examples/emergency_checkpoint.py

Two slices train with data parallelism: weights are split within a slice, so each slice has a whole
copy. Every step is saved to the memory of each host, every fourth step to disk. In the first
attempt, a host is killed after step 6 and loses its memory. In the second attempt, it gets its part
of step 6 from the other slice. Then both copies are lost, and the third attempt reads step 4 from
disk. The result equals that of an undisturbed training.
"""

import shutil
import sys
import tempfile

import kinetic

STEPS = 12
FOLDER = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="kinetic-emergency-")


@kinetic.run(accelerator="cpu:2", slices=2, retries=2, output_dir=FOLDER)
def train(steps, failures):
    import os
    import signal

    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, host = int(os.environ["KINETIC_ATTEMPT"]), jax.process_index()
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "fsdp"))

    def array(shape, spec, value):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda part: value[part])

    @jax.jit
    def update(weights, batch):  # The batch is split over both slices, so both are needed.
        return weights + batch.mean()

    weights = array((16,), P("fsdp"), np.zeros(16, np.float32))
    with kinetic.Checkpointer(every=4, local_every=1) as ckpt:
        state, start = ckpt.restore({"weights": weights})
        if ckpt.restored and host == 1:
            step, tier, senders = ckpt.restored
            source = f"host {senders[0]}" if senders else f"the {tier} tier"
            print(f"attempt {attempt}: host 1 has step {step} from {source}", flush=True)
        for step in range(start, steps):
            batch = array((8,), P(("data", "fsdp")), np.full(8, step, np.float32))
            state = {"weights": update(state["weights"], batch)}
            ckpt.save(step, state)
            if failures.get(attempt, (None, ()))[0] == step:
                ckpt.wait()  # So that this example always restores the same step.
                multihost_utils.sync_global_devices("saved")
                if host in failures[attempt][1]:  # Lose the memory, too, as with a machine.
                    shutil.rmtree(ckpt.local_directory)
                multihost_utils.sync_global_devices("lost")
                if host == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(state["weights"])
    return float(total)


def main():
    failures = {1: (6, [1]), 2: (7, [0, 1])}  # attempt: (last step, hosts that lose their memory)
    job = train.run_async(STEPS, failures)
    total = job.result()
    for line in job.logs(host=1).splitlines():
        if line.startswith("attempt"):
            print(line)
    expected = 16.0 * sum(range(STEPS))
    print(f"the weights sum to {total:g}; expected {expected:g}")


if __name__ == "__main__":
    try:
        main()
    finally:
        if len(sys.argv) == 1:
            shutil.rmtree(FOLDER, ignore_errors=True)
