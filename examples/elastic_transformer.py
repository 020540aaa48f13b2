"""A small transformer on three slices: one is killed, and the loss continues where it was.

    python examples/elastic_transformer.py [loss.png]

Each slice has the whole model, split over its devices; the slices share the batch. The job saves
every tenth step. After the second save, this script kills slice 1, like by the loss of its
machines. The other two slices keep their hosts and wait for slice 1. All three continue from the
last saved step: the steps since then are repeated, with the same losses.

With a path and matplotlib, it draws the loss over time and marks when the slice was killed.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import kinetic

STEPS, KILL_AFTER = 60, 22
RECORD = "losses.jsonl"
WIDTH, HEADS, LAYERS, TOKENS, LENGTH, BATCH = 64, 4, 1, 32, 32, 48


@kinetic.run(accelerator="cpu:2", slices=(3, 3), max_failures=3)
def train(steps):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh(dcn={"data": 3}, ici={"fsdp": -1})
    split = NamedSharding(mesh, P("fsdp"))  # weights: split within a slice, equal on all
    batch = NamedSharding(mesh, P(("data", "fsdp")))  # sequences: spread over all devices

    def make_weights():
        generator = np.random.default_rng(0)  # NumPy needs no compilation.

        def normal(*shape):
            whole = (generator.standard_normal(shape) / shape[0] ** 0.5).astype("float32")
            return jax.make_array_from_callback(shape, split, lambda part: whole[part])

        layer = lambda: {  # noqa: E731
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        return {
            "tokens": normal(TOKENS, WIDTH),
            "places": normal(LENGTH, WIDTH),
            "layers": [layer() for _ in range(LAYERS)],
        }

    def normed(x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def attention(x, layer):
        parts = (normed(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
        return mixed.reshape(x.shape) @ layer["out"]

    def loss(weights, rows):
        x = weights["tokens"][rows[:, :-1]] + weights["places"]
        for layer in weights["layers"]:
            x = x + attention(x, layer)
            x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
        predicted = jax.nn.log_softmax(normed(x) @ weights["tokens"].T)
        correct = jnp.take_along_axis(predicted, rows[:, 1:, None], axis=-1)
        return -correct[:, LENGTH // 2 :].mean()  # The second half repeats the first.

    def make_rows(step):
        generator = np.random.default_rng(step)
        first = generator.integers(0, TOKENS, (BATCH, LENGTH // 2))
        return np.concatenate([first, first, first[:, :1]], axis=1)

    @jax.jit
    def train_step(weights, rows):
        rows = jax.lax.with_sharding_constraint(rows, batch)
        value, slopes = jax.value_and_grad(loss)(weights, rows)
        return jax.tree.map(lambda weight, slope: weight - 0.7 * slope, weights, slopes), value

    with kinetic.Checkpointer(every=10, local_every=None) as checkpoints:
        weights, start = checkpoints.restore(make_weights())
        print(f"attempt {kinetic.attempt()} begins with step {start}", flush=True)
        for step in range(start, steps):
            weights, value = train_step(weights, make_rows(step))
            if jax.process_index() == 0:
                record_loss(kinetic.attempt(), step, float(value))
            checkpoints.save(step, weights)
    return float(value)


def record_loss(attempt, step, loss):
    """Append a line to the record of the run, which outlives attempts."""
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss:.4f}", flush=True)
    with open(Path(os.environ["KINETIC_OUTPUT_DIR"], RECORD), "a") as file:
        line = {"attempt": attempt, "step": step, "loss": loss, "time": time.time()}
        print(json.dumps(line), file=file)


def main(picture):
    with tempfile.TemporaryDirectory(prefix="kinetic-elastic-") as folder:
        job = train.with_options(output_dir=folder).run_async(STEPS)
        record = Path(folder, RECORD)
        while not job.done() and len(read(record)) <= KILL_AFTER:
            time.sleep(0.05)
        killed = time.time()
        job.kill_hosts(slice=1)
        job.logs(follow=True)
        value, rows = job.result(), read(record)
    report(rows, value)
    if picture:
        draw(rows, killed, picture)


def read(record):
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def report(rows, value):
    first = {row["step"]: row["loss"] for row in rows if row["attempt"] == 1}
    second = {row["step"]: row["loss"] for row in rows if row["attempt"] == 2}
    repeated = sorted(first.keys() & second.keys())
    equal = all(first[step] == second[step] for step in repeated)
    steps = f"steps {repeated[0]} to {repeated[-1]} were" if repeated else "no step was"
    print(f"{steps} repeated, with equal losses: {equal}")
    print(f"loss {value:.3f} after {STEPS} steps")


def draw(rows, killed, picture):
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture was drawn, because matplotlib is missing: pip install matplotlib")
        return
    mpl.use("agg")
    import matplotlib.pyplot as plt

    begun = rows[0]["time"]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for attempt in sorted({row["attempt"] for row in rows}):
        part = [row for row in rows if row["attempt"] == attempt]
        times, losses = [row["time"] - begun for row in part], [row["loss"] for row in part]
        axes.plot(times, losses, marker=".", label=f"attempt {attempt}")
    axes.axvline(killed - begun, color="firebrick", linestyle="--", label="slice 1 is killed")
    title = "A transformer on 3 slices that loses one"
    axes.set(xlabel="seconds since the first step", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    print(f"the loss over time: {picture}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
