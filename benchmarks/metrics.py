"""Metrics: the cost of `kinetic.log` in a training, and the time to read a million steps."""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from pathlib import Path

import measure

import kinetic
from kinetic._client.metrics import MetricsReader
from kinetic._core import layout
from kinetic._core.metrics import Rows
from kinetic._store.base import folder_of

CALLS = 1_000
STEPS = 200
_ROUNDS = range(9)


def call_costs() -> tuple[list[float], list[float]]:
    """Return median seconds of 1,000 calls with a float, with two JAX scalars, and of appending to
    a list: wall time, and processor time of the calling thread."""
    import jax.numpy as jnp

    loss, rows = jnp.float32(1.0), []
    steps = iter(range(10**9))

    def log_float() -> None:
        kinetic.log(step=next(steps), loss=1.0)

    def log_arrays() -> None:
        kinetic.log(step=next(steps), loss=loss, norm=loss)

    def append() -> None:
        rows.append((time.monotonic(), next(steps), {"loss": 1.0}))

    def timed(act) -> tuple[float, float]:
        time.sleep(0.3)  # Until previous values have been sent.
        begun, used = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            act()
        return time.perf_counter() - begun, time.thread_time() - used

    return _medians([[timed(act) for act in (log_float, log_arrays, append)] for _ in _ROUNDS])


def _medians(rounds: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """Return the medians of wall time and of processor time of each measured call."""
    columns = [[*zip(*column, strict=True)] for column in zip(*rounds, strict=True)]
    passed, used = zip(*columns, strict=True)
    return [*map(statistics.median, passed)], [*map(statistics.median, used)]


def step_costs() -> tuple[list[float], list[float]]:
    """Return median seconds of 200 steps with `kinetic.log`, with `float(loss)` and with neither,
    in turn: wall time, and processor time of the process."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def update(w):
        w = w - 0.01 * jnp.tanh(w @ w)
        return w, jnp.mean(w)

    def train(note) -> tuple[float, float]:
        w = jnp.ones((256, 256)) / 256
        begun, used = time.perf_counter(), time.process_time()
        for step in range(STEPS):
            w, loss = update(w)
            note(step, loss)
        w.block_until_ready()
        return time.perf_counter() - begun, time.process_time() - used

    notes = (
        lambda step, loss: kinetic.log(step=step, loss=loss),
        lambda step, loss: float(loss),
        lambda step, loss: None,
    )
    train(notes[-1])
    return _medians([[train(note) for note in notes] for _ in _ROUNDS])


def million_steps(store, at_once: int) -> tuple[kinetic.JobHandle, Path]:
    """Create a job whose host has logged a million steps, `at_once` in a line."""
    handle = kinetic.run(accelerator="cpu")(int).run_async()
    handle.result()
    path = folder_of(store) / layout.HostKeys(handle.job_id, 1, 0).metrics
    with path.open("ab") as file:
        for begin in range(0, 1_000_000, at_once):
            steps = range(begin, begin + at_once)
            times = array("d", (1.8e9 + 0.001 * step for step in steps))
            values = array("d", (1.0 / (step + 3) for step in steps))
            file.write(Rows(("loss",), times, array("q", steps), [values]).encode())
    return handle, path


def main() -> None:
    with measure.home():
        run = kinetic.run(accelerator="cpu")
        (one, two, floor), (one_cpu, two_cpu, floor_cpu) = run(call_costs)()
        measure.heading(f"{CALLS} calls of kinetic.log (floor: the same appended to a list)")
        measure.row("a float, processor time", one_cpu, floor_cpu, "<= 20 ms: 20 us a call")
        measure.row("two scalars of JAX, processor time", two_cpu, floor_cpu, "<= 20 ms")
        measure.row("a float", one, floor)
        measure.row("two scalars of JAX", two, floor)
        (logged, fetched, bare), (logged_cpu, fetched_cpu, bare_cpu) = run(step_costs)()
        measure.heading(f"{STEPS} steps of a training (floor: without kinetic.log)")
        measure.row("each step logged, processor time", logged_cpu, bare_cpu, "<= 1.05x")
        measure.row("float(loss) instead, processor time", fetched_cpu, bare_cpu)
        measure.row("each step logged", logged, bare)
        measure.row("float(loss) instead, which waits", fetched, bare)
        store = kinetic.attach(kinetic.list_jobs()[0].job_id)._store
        measure.heading("a million steps read (floor: the bytes of the file)")
        for at_once in (100, 1):
            read_million(*million_steps(store, at_once), at_once)


def read_million(handle: kinetic.JobHandle, path: Path, at_once: int) -> None:
    """Measure reading a job that has logged a million steps, `at_once` in a line."""
    used: list[float] = []

    def read() -> None:
        begun = time.process_time()
        reader = MetricsReader(handle._store, handle.ref)
        reader.read_new()
        reader.recording.series()
        used.append(time.process_time() - begun)

    read_s, floor_s = measure.medians(read, path.read_bytes, runs=3)
    goal = "<= 2 s" if at_once > 1 else ""
    measure.row(f"{at_once} in a line, processor time", statistics.median(used), floor_s, goal)
    measure.row(f"{at_once} in a line", read_s, floor_s)


if __name__ == "__main__":
    sys.exit(main())
