"""The compiler of the real chip, asked through `kinetic.compile_for`: beside JAX's bare
`lower().compile()` of the same step in the same process, in CPU time.

In: a small transformer, and one of a billion parameters, on 16 chips of v6e. Out: three rows.
Without libtpu it says so and ends.
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
"""How often each model is compiled, and for how many tokens."""
SMALL = dataclasses.replace(
    transformers.SIZES["1B"], layers=2, width=256, hidden=512, heads=2, groups=1, vocabulary=2048
)
"""Its compile takes seconds, as the shortest that anybody waits for: the start of a process, which
takes half a second, is seen in it."""


def cpu_seconds(act: Callable[[], object]) -> float:
    """CPU time of one call, with the processes that it waits for: other work on the machine changes
    the wall time of a compile more than what is measured here."""

    def total() -> float:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(each.ru_utime + each.ru_stime for each in used)

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
    """Print rows for the step of a model."""
    target = topologies.make_target(resolve("tpu-v6e-16"))
    with tempfile.TemporaryDirectory() as cache, CompileSlice(target, Path(cache)) as slice:
        mesh = kinetic.make_mesh(ici={"fsdp": -1, "tensor": 4})
        with jax.set_mesh(mesh):
            step, *arguments = transformers.build(name, mesh)
            uncached = CompileSlice(target)

            def compile_bare() -> Any:
                jax.clear_caches()
                return step.lower(*arguments).compile()

            def compile_here() -> Any:
                jax.clear_caches()
                return uncached.compile(step, *arguments)

            taken = [(cpu_seconds(compile_bare), cpu_seconds(compile_here)) for _ in range(rounds)]
            bare_s, own_s = map(statistics.median, zip(*taken, strict=True))
            goal = () if name == "small" else ("<= 1.1x",)
            measure.row(f"{name}: a step that was not compiled before", own_s, bare_s, *goal)
            if rounds > 1:
                slice.compile(step, *arguments)
                again_s = cpu_seconds(lambda: slice.compile(step, *arguments))
                measure.row(f"{name}: a step that was", again_s, bare_s)


if __name__ == "__main__":
    main()
