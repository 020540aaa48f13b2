"""Lose a host in the middle of training, and continue from the last checkpoint.

    python examples/checkpoint.py [FOLDER]

Two hosts train together and save after every step with Orbax: each host writes its part of the
arrays below KINETIC_OUTPUT_DIR. After step 3 of the first call, a host is killed, like by the loss
of its machine. The second call finds the checkpoint and does only the remaining steps.

Both calls use the same `output_dir`; by default, every job has its own folder. The checkpoints stay
in FOLDER. Without it, they go to a temporary folder, which is removed at the end.
"""

import shutil
import sys
import tempfile

import kinetic

STEPS = 6
FOLDER = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="kinetic-checkpoints-")


@kinetic.run(accelerator="tpu-v6e-8", output_dir=FOLDER)
def train(steps, lost_after=None):
    import os
    import signal
    from pathlib import Path

    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    # Sixteen weights, split over the 8 devices of both hosts. Every step adds one to each.
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("chips",)), P("chips"))
    weights = jax.make_array_from_callback(
        (16,), sharding, lambda part: np.zeros(16, np.float32)[part]
    )
    state = {"weights": weights, "step": 0}
    update = jax.jit(lambda x: x + 1)
    add_up = jax.jit(jax.numpy.sum)

    folder = Path(os.environ["KINETIC_OUTPUT_DIR"], "steps")
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as checkpoints:
        restored_step = checkpoints.latest_step() or 0
        if restored_step:
            state = checkpoints.restore(restored_step, args=ocp.args.StandardRestore(state))
            print(f"found a checkpoint of step {restored_step}", flush=True)
        while state["step"] < steps:
            state = {"weights": update(state["weights"]), "step": state["step"] + 1}
            checkpoints.save(state["step"], args=ocp.args.StandardSave(state))
            # Saving is asynchronous: wait, so that this example always stops at the same step.
            checkpoints.wait_until_finished()
            print(
                f"step {state['step']} of {steps}: the weights sum to "
                f"{float(add_up(state['weights'])):g}",
                flush=True,
            )
            if state["step"] == lost_after:
                multihost_utils.sync_global_devices("all have printed the step")
                if jax.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    return {"restored_step": restored_step, "sum": float(add_up(state["weights"]))}


def main():
    try:
        train(STEPS, lost_after=3)
    except kinetic.errors.HostLost as error:
        print(f"host {error.host} was lost")
    answer = train(STEPS)
    print(f"went on after step {answer['restored_step']}, the weights sum to {answer['sum']:g}")


if __name__ == "__main__":
    try:
        main()
    finally:
        if len(sys.argv) == 1:
            shutil.rmtree(FOLDER)
