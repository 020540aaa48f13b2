"""Time from the death of a slice to the next training step, by phase: an elastic job compared with
a job that restarts as a whole (`retries=`)."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure
import orbax.checkpoint  # noqa: F401 - as in scripts: hosts import the caller's modules in advance

import kinetic
from kinetic._core import layout
from kinetic._core.events import EventKind, parse

WIDTH, LAYERS, STEPS, LOST_AFTER = 128, 8, 12, 6
RUNS = 3
PHASES = ("detect", "form", "import", "restore", "compile and step")


def train(folder: str) -> None:
    """Write the time of each phase to a file. In the first attempt, a host of the last slice dies
    after a step."""
    import signal
    import time
    from pathlib import Path

    attempt = int(os.environ["KINETIC_ATTEMPT"])
    notes = {"enter": time.time()}

    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    notes["imported"] = time.time()
    mesh = kinetic.make_mesh(dcn={"data": -1}, ici={"fsdp": -1})
    split, spread = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P(("data", "fsdp")))

    def loss(weights: Any, x: Any) -> Any:
        for layer in weights:
            x = x + jnp.tanh(x @ layer) * jax.nn.softmax(x @ layer.T)
        return (x**2).mean()

    @jax.jit
    def update(weights: Any, step: Any) -> Any:
        x = jax.random.normal(jax.random.key(step), (96, WIDTH))
        slope = jax.grad(loss)(weights, jax.lax.with_sharding_constraint(x, spread))
        return jax.lax.with_sharding_constraint(
            jax.tree.map(lambda w, s: w - 0.01 * s, weights, slope), split
        )

    def begin() -> Any:
        return [jnp.eye(WIDTH) / (n + 2) for n in range(LAYERS)]

    with kinetic.Checkpointer(Path(folder, "saved"), every=5, local_every=1) as checkpoints:
        weights, first = checkpoints.restore(jax.jit(begin, out_shardings=[split] * LAYERS)())
        notes["restored"] = time.time()
        for step in range(first, STEPS):
            weights = jax.block_until_ready(update(weights, step))
            if step == first:
                notes["stepped"] = time.time()
                if jax.process_index() == 0:
                    Path(folder, f"notes-{attempt}").write_text(json.dumps(notes))
            checkpoints.save(step, weights)
            if attempt == 1 and step == LOST_AFTER:
                checkpoints.wait()
                multihost_utils.sync_global_devices("saved")
                if jax.process_index() == jax.process_count() - 1:
                    Path(folder, "killed").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)


def recovery(options: dict[str, Any], accelerator: str = "tpu-v6e-8") -> list[float]:
    """Return the seconds of each phase."""
    with tempfile.TemporaryDirectory(prefix="kn-recovery-") as folder:
        job = kinetic.run(accelerator, **options)(train).run_async(folder)
        job.result()
        killed = float(Path(folder, "killed").read_text())
        notes = json.loads(Path(folder, "notes-2").read_text())
        recorded = Path(os.environ["KINETIC_HOME"], layout.JobKeys(job.job_id).events).read_bytes()
    ends = (EventKind.SLICE_LOST, EventKind.STOP, EventKind.ENDED)
    noticed = min(e.time for e in parse(recorded) if e.kind in ends and e.time > killed)
    times = [killed, noticed, *(notes[n] for n in ("enter", "imported", "restored", "stepped"))]
    return [after - before for before, after in pairwise(times)]


def compare(jobs: dict[str, dict[str, Any]]) -> None:
    taken = [{name: recovery(options) for name, options in jobs.items()} for _ in range(RUNS)]
    phases = {
        name: map(statistics.median, zip(*(run[name] for run in taken), strict=True))
        for name in jobs
    }
    floor = statistics.median(sum(run["restart"]) for run in taken)
    measure.heading("from the death of a slice to the next step (floor: the whole job again)")
    for name, parts in phases.items():
        total = statistics.median(sum(run[name]) for run in taken)
        goal = "<= 0.33x" if name == "elastic" else ""
        measure.row(name, total, floor, goal)
        for phase, figure in zip(PHASES, parts, strict=True):
            measure.row(f"  {phase}", figure, floor)


def grow() -> None:
    """Compare numbers of slices. Each has one host, because the machine is small."""
    counts = (2, 4, 6)
    jobs = [{"slices": (count, count)} for count in counts]
    taken = [[sum(recovery(options, "cpu:2")) for options in jobs] for _ in range(RUNS)]
    floor, *more = (statistics.median(column) for column in zip(*taken, strict=True))
    measure.heading("the same with more slices (floor: 2 slices, of one host each)")
    for count, total in zip(counts[1:], more, strict=True):
        measure.row(f"{count} slices", total, floor)


def main() -> None:
    with measure.home():
        compare(
            {
                "restart": {"slices": 2, "retries": 1},
                "elastic": {"slices": (2, 2)},
            }
        )
        grow()


if __name__ == "__main__":
    sys.exit(main())
