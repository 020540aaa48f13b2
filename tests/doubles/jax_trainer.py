"""A program with its own distributed training: Ray Train's `JaxTrainer`, on slices of a cluster.

    python jax_trainer.py NUM_WORKERS TOPOLOGY STEPS

Arguments: the number of workers, or the smallest and largest number ("1,2"); the topology of a v6e
slice; the number of steps. The program prints each step's loss and time.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["RAY_DEDUP_LOGS"] = "0"  # Otherwise Ray drops lines that differ only in numbers.
# On a busy machine, workers need more than Ray's limit of a minute to start.
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")

import ray
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def train_loop_per_worker(config):
    import time

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    hosts, rank = jax.process_count(), jax.process_index()
    weights = np.zeros(4, np.float32)
    for step in range(config["steps"]):
        batch = np.random.default_rng(step).standard_normal((8, 4), np.float32)
        x = np.split(batch, hosts)[rank]
        error = x @ weights - np.sin(x.sum(1))
        mine = np.append(error @ x, (error**2).sum()).astype(np.float32)
        total = multihost_utils.process_allgather(mine).reshape(hosts, -1).sum(0) / 8
        weights = weights - 0.1 * 2 * total[:-1]
        if rank == 0:
            print(f"step {step} on {hosts} loss {total[-1]:.6f} at {time.time()}", flush=True)
        time.sleep(config["pause_s"])


def main(workers: str, topology: str, steps: str, pause_s: str = "0") -> None:
    numbers = tuple(map(int, workers.split(",")))
    trainer = JaxTrainer(
        train_loop_per_worker=train_loop_per_worker,
        train_loop_config={"steps": int(steps), "pause_s": float(pause_s)},
        scaling_config=ScalingConfig(
            use_tpu=True,
            num_workers=numbers[0] if len(numbers) == 1 else numbers,
            topology=topology,
            accelerator_type="TPU-V6E",
            resources_per_worker={"TPU": 4, "CPU": 0.5},  # leaves CPU for the actor
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name="jax_trainer",
            storage_path=tempfile.mkdtemp(),
            failure_config=FailureConfig(max_failures=3),
            # The chips are simulated.
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    )
    trainer.fit()
    print("Training complete!")
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
