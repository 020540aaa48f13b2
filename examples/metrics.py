"""Two jobs log their loss; one loses its host and continues its curve.

python examples/metrics.py [loss.png]
"""

import os
import signal
import subprocess
import sys
import time

import kinetic


@kinetic.run(accelerator="cpu", retries=1)
def train(rate: float, fails_at: int = -1) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    draw = np.random.default_rng(0)
    x = draw.normal(size=(256, 8)).astype(np.float32)
    y = x @ draw.normal(size=8).astype(np.float32)

    @jax.jit
    def update(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - rate * gradient, loss

    with kinetic.Checkpointer(every=10) as checkpointer:
        w, start = checkpointer.restore(jnp.zeros(8))
        for step in range(start, 60):
            w, loss = update(w)
            kinetic.log(step=step, loss=loss)  # A JAX scalar: log() does not wait for it.
            checkpointer.save(step, w)
            if step == fails_at and kinetic.attempt() == 1:
                checkpointer.wait()
                time.sleep(1)  # Usually a machine fails later.
                os.kill(os.getpid(), signal.SIGKILL)
    return float(loss)


if __name__ == "__main__":
    jobs = [train.run_async(0.02), train.run_async(0.05, fails_at=25)]
    for job in jobs:
        job.result()
        loss = job.metrics()["loss"]
        print(f"{len(loss)} steps from {loss.steps[0]} to {loss.steps[-1]}, ", end="")
        print(f"loss from {loss.values[0]:.3f} to {loss.values[-1]:.3f}, ", end="")
        print(f"logged by attempts {sorted(set(loss.attempts.tolist()))}")
    repeats = jobs[1].metrics(repeats=True)["loss"]
    print(
        f"before the host was lost, attempt 1 came to step "
        f"{repeats.steps[repeats.attempts == 1][-1]}"
    )
    if sys.argv[1:]:
        command = [sys.executable, "-m", "kinetic", "jobs", "metrics", "--name", "loss"]
        ids = [job.job_id for job in jobs]
        subprocess.run([*command, "--plot", sys.argv[1], *ids], check=True)
