"""The cost of checkpoints: a training step with a local save of 200 MB compared with a step
without, a save with digests compared with one without, and a restore from either tier compared with
reading as many bytes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import measure
import numpy as np

import kinetic

LAYERS, WIDTH, TOKENS = 50, 1000, 512
"""50 million parameters of 4 bytes, or 200 MB. A step takes 6 x 50e6 x 512 operations with them."""
RUNS = 8


def state() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    weights = draw.normal(scale=WIDTH**-0.5, size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    return {f"layer {n}": jax.device_put(layer) for n, layer in enumerate(weights)}


def loss(weights: dict[str, Any], batch: Any) -> Any:
    for layer in weights.values():
        batch = jax.numpy.tanh(batch @ layer)
    return (batch**2).mean()


@jax.jit
def update(weights: dict[str, Any], batch: Any) -> dict[str, Any]:
    slopes = jax.grad(loss)(weights, batch)
    return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, slopes)


def steps(folder: Path, memory: Path) -> None:
    batch, now, number = jax.numpy.ones((TOKENS, WIDTH)), state(), 0
    with kinetic.Checkpointer(folder / "run", local_every=1, local_directory=memory) as ckpt:
        now, _ = ckpt.restore(now)
        held_s = []

        def step(save: bool) -> float:
            nonlocal now, number
            begun = time.perf_counter()
            now = jax.block_until_ready(update(now, batch))
            if save:
                called = time.perf_counter()
                ckpt.save(number, now)
                held_s.append(time.perf_counter() - called)
                number += 1
            return time.perf_counter() - begun

        def several(*, save: bool) -> float:
            """Return the time of three steps: a save in the background slows down the next one."""
            taken = statistics.median([step(save) for _ in range(3)])
            ckpt.wait()
            return taken

        several(save=True)
        taken = [(several(save=True), several(save=False)) for _ in range(RUNS)]
    with_save, without = (statistics.median(column) for column in zip(*taken, strict=True))
    measure.heading("a step of a training with 200 MB of state (floor: without a save)")
    measure.row("saved to memory after every step", with_save, without, "<= 1.05x")
    measure.row("of which save() holds the training", statistics.median(held_s), without)


def digests(folder: Path, memory: Path) -> None:
    """Compare saves with and without digests, in turns, each until it is committed."""
    now, number = state(), itertools.count()

    def measured(tier: str, runs: int) -> list[tuple[float, float]]:
        """Return times with and without digests: until the save is committed, and in save()."""
        options: Any = {"at_least_every": None, "local_every": 1 if tier == "memory" else None}
        with contextlib.ExitStack() as stack:
            with_, without = (
                stack.enter_context(
                    kinetic.Checkpointer(
                        folder / f"{tier} {verify}",
                        local_directory=memory,
                        verify=verify,
                        keep=1,
                        **options,
                    )
                )
                for verify in (True, False)
            )

            def save(ckpt: kinetic.Checkpointer) -> tuple[float, float]:
                begun = time.perf_counter()
                ckpt.save(next(number), now, force=tier == "folder")
                held_s = time.perf_counter() - begun
                ckpt.wait()
                return time.perf_counter() - begun, held_s

            for ckpt in (with_, without) * 3:  # The first saves allocate memory.
                save(ckpt)
            taken = [(save(with_), save(without)) for _ in range(runs)]
        return [
            (min(one[kind] for one, _ in taken), min(other[kind] for _, other in taken))
            for kind in (0, 1)
        ]

    # Digests are computed parallel to the copy: compare the fastest saves, which had both cores.
    measure.heading("the quickest save of 200 MB with digests (floor: the same save without)")
    measure.row("to memory", *measured("memory", 5 * RUNS)[0], "<= 1.03x")
    committed, held_s = measured("folder", 2 * RUNS)
    measure.row("to the folder", *committed, "<= 1.05x")
    measure.row("to the folder: save() holds the training", *held_s, "<= 1.1x")


def restores(folder: Path, memory: Path) -> None:
    target = folder / "plain"
    with open(target, "wb") as file:
        for layer in state().values():
            file.write(np.asarray(layer).data)

    def restore(*, local: bool) -> float:
        like = state()
        options: Any = {"local_directory": memory} if local else {"local_every": None}
        with kinetic.Checkpointer(folder / "run", **options) as ckpt:
            begun = time.perf_counter()
            restored, _ = ckpt.restore(like)
            jax.block_until_ready(restored)
            taken = time.perf_counter() - begun
            assert ckpt.restored is not None
            assert ckpt.restored.tier == ("local" if local else "persistent")
            return taken

    with kinetic.Checkpointer(folder / "run", local_directory=memory) as ckpt:
        saved, start = ckpt.restore(state())
        ckpt.save(start, saved, force=True)
        ckpt.save(start + 10 - start % 10, saved)  # The local tier must have the newest step.
    columns: list[Callable[[], float]] = [
        lambda: measure.seconds(lambda: np.fromfile(target, np.uint8).sum()),
        lambda: restore(local=True),
        lambda: restore(local=False),
    ]
    taken = [[column() for column in columns] for _ in range(5)]
    floor, local, persistent = (statistics.median(column) for column in zip(*taken, strict=True))
    measure.heading("200 MB of state back on the devices (floor: reading them from a file)")
    measure.row("restore from memory", local, floor, "<= the persistent tier")
    measure.row("restore from the persistent tier", persistent, floor)


def main() -> None:
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # Hide warnings that a save waits for the previous one.
    memory = Path(tempfile.mkdtemp(prefix="kn-bench-", dir="/dev/shm"))
    try:
        with measure.home() as home:
            steps(Path(home), memory)
            digests(Path(home), memory)
            restores(Path(home), memory)
    finally:
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
