"""Metrics: what `kinetic.log` costs a training, and what reading a million steps takes."""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from pathlib import Path

import measure

import kinetic
from kinetic._client.metrics import read_metrics
from kinetic._core import layout
from kinetic._core.log_format import STDOUT
from kinetic._core.metric_format import Frame
from kinetic._host.agent.log_writer import open_log

CALLS = 1_000
STEPS = 200
ROUNDS = 9


def call_costs() -> list[tuple[float, float]]:
    """Median seconds of 1,000 calls: with a float, with two scalars of JAX; and of a list that is
    appended to."""
    import jax.numpy as jnp

    loss, kept = jnp.float32(1.0), []
    steps = iter(range(10**9))

    def log_float() -> None:
        kinetic.log(step=next(steps), loss=1.0)

    def log_arrays() -> None:
        kinetic.log(step=next(steps), loss=loss, norm=loss)

    def append() -> None:
        kept.append((time.monotonic(), next(steps), {"loss": 1.0}))

    def timed(act) -> float:
        time.sleep(0.3)  # let the last ones be sent
        begun = time.perf_counter()
        for _ in range(CALLS):
            act()
        return time.perf_counter() - begun

    found = [[timed(act) for act in (log_float, log_arrays, append)] for _ in range(ROUNDS)]
    one, two, floor = (statistics.median(column) for column in zip(*found, strict=True))
    return [(one, floor), (two, floor)]


def step_costs() -> tuple[float, float, float]:
    """Median seconds of 200 steps: with `kinetic.log`, with `float(loss)`, with neither."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def update(w):
        w = w - 0.01 * jnp.tanh(w @ w)
        return w, jnp.mean(w)

    def train(note) -> float:
        w = jnp.ones((256, 256)) / 256
        begun = time.perf_counter()
        for step in range(STEPS):
            w, loss = update(w)
            note(step, loss)
        w.block_until_ready()
        return time.perf_counter() - begun

    notes = (
        lambda step, loss: kinetic.log(step=step, loss=loss),
        lambda step, loss: float(loss),
        lambda step, loss: None,
    )
    train(notes[-1])
    found = [[train(note) for note in notes] for _ in range(ROUNDS)]
    return tuple(statistics.median(column) for column in zip(*found, strict=True))


def million_steps(store) -> tuple[kinetic.JobHandle, Path]:
    """A job whose host has logged a million steps, 100 at a time."""
    handle = kinetic.run(accelerator="cpu")(int).run_async()
    handle.result()
    key = layout.metrics(handle.job_id, 1, 0)
    log = open_log(store, key, (store.as_folder() / key, store.as_folder() / f"{key}.idx"))
    for begin in range(0, 1_000_000, 100):
        steps = range(begin, begin + 100)
        times, values = array("d", map(float, steps)), array("d", [1.0] * 100)
        log.write(STDOUT, Frame(("loss",), times, array("q", steps), [values]).encode())
    log.close()
    return handle, store.as_folder() / key


def main() -> None:
    with measure.home():
        run = kinetic.run(accelerator="cpu")
        (one, floor), (two, _) = run(call_costs)()
        measure.heading(f"{CALLS} calls of kinetic.log (floor: the same appended to a list)")
        measure.row("a float", one, floor, "<= 20 ms: 20 us a call")
        measure.row("two scalars of JAX", two, floor, "<= 20 ms: 20 us a call")
        logged, fetched, bare = run(step_costs)()
        measure.heading(f"{STEPS} steps of a training (floor: without kinetic.log)")
        measure.row("each step logged", logged, bare, "<= 1.05x")
        measure.row("float(loss) instead, which waits", fetched, bare)
        handle, path = million_steps(kinetic.attach(kinetic.list_jobs()[0].job_id)._store)
        read_s, floor_s = measure.medians(
            lambda: read_metrics(handle._store, handle.ref), path.read_bytes, runs=3
        )
        measure.heading("a million steps read (floor: the bytes of the file)")
        measure.row("read_metrics", read_s, floor_s, "<= 1 s")


if __name__ == "__main__":
    sys.exit(main())
