"""`kinetic.compile_for` compared with JAX's bare `lower().compile()` of the same step in the same
process, in CPU time.

Compiles a small transformer and one with a billion parameters for 16 chips of v6e. Needs libtpu.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import measure
import transformers

import kinetic
from kinetic._compile import topologies
from kinetic._compile.slice import CompileSlice
from kinetic._core.accelerators.resolve import resolve

ROUNDS = {"small": (5, 256), "1B": (1, 2048)}
"""Number of compiles and of tokens, by model."""
SMALL = dataclasses.replace(
    transformers.SIZES["1B"], layers=2, width=256, hidden=512, heads=2, groups=1, vocabulary=2048
)
"""A model that compiles in seconds, so that the start of a process (half a second) matters."""


def cpu_seconds(act: Callable[[], object]) -> float:
    """Return the CPU time of one call, with its child processes. Other work on the machine distorts
    the wall time."""

    def total() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    before = total()
    act()
    return total() - before


def main() -> None:
    measure.heading("the real compiler (floor: lower().compile() in one process)")
    if not topologies.is_installed():
        print("  libtpu is not installed: pip install '.[tpu-compile]'")
        return
    transformers.SIZES["small"] = SMALL
    for name, (rounds, transformers.LENGTH) in ROUNDS.items():
        compare(name, rounds)


def compare(name: str, rounds: int) -> None:
    """Print rows for a model's training step."""
    target = topologies.make_target(resolve("tpu-v6e-16"))
    with tempfile.TemporaryDirectory() as cache, CompileSlice(target, Path(cache)) as slice:
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": 4})
        with jax.set_mesh(mesh):
            step, *arguments = transformers.build(name, mesh)
            uncached = CompileSlice(target)

            def compile_bare() -> Any:
                jax.clear_caches()
                return step.lower(*arguments).compile()

            def compile_with_kinetic() -> Any:
                jax.clear_caches()
                return uncached.compile(step, *arguments)

            taken = [
                (cpu_seconds(compile_bare), cpu_seconds(compile_with_kinetic))
                for _ in range(rounds)
            ]
            bare_s, own_s = map(statistics.median, zip(*taken, strict=True))
            goal = () if name == "small" else ("<= 1.1x",)
            measure.row(f"{name}: uncached", own_s, bare_s, *goal)
            if rounds > 1:
                slice.compile(step, *arguments)
                cached_s = cpu_seconds(lambda: slice.compile(step, *arguments))
                measure.row(f"{name}: cached", cached_s, bare_s)


if __name__ == "__main__":
    main()
