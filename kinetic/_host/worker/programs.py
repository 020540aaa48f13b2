"""Records the programs that JAX compiles on the leader of a job with `compile_check`, so that the
compiler of the real slice can check them.

In: a folder of the job's records. Out: a description and a StableHLO module of each program, or the
reason why it has none; the number of programs that were too small to record.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._compile import lowering, origins
from kinetic._compile.checked import SKIPPED, Skipped, name_files
from kinetic._compile.lowering import TPU, Lowered
from kinetic._compile.program import LoweredProgram
from kinetic._core.accelerators.resolve import resolve
from kinetic._host.worker.startup.kinetic_awaiting import act_when_imported
from kinetic._store import files

MOST = 200
"""Largest number of programs to record in one attempt: a script with more compiles in a loop."""
_SMALL = (1 << 18, 12)
"""Limits, in bytes and equations, below which a program counts as a single operation."""
_SMALL_OF_JAX = (1 << 26, 64)
"""The same limits for functions of JAX itself: every chip has room for them even if the compiler
pads them to its tiles a hundredfold."""
_KERNELS = ("pallas_call", "mpmd_map", "core_map")
"""Primitives of `pl.pallas_call`, `pl.kernel` and `pl.core_map`."""


def record(folder: Path, tree: str, accelerator: str) -> None:
    """Record the programs that JAX compiles in this process from now on.

    Args:
        folder: folder of the records.
        tree: folder of the process's source.
        accelerator: name of the slice.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    recorder = Recorder(folder, tree, resolve(accelerator).family)
    act_when_imported("jax._src.pjit", lambda: lowering.replace_entrance(recorder.lower))


class Recorder:
    """Records each program once. If that fails, the program has no record, and the function goes
    on."""

    def __init__(self, folder: Path, tree: str = "", family: str = "v6e") -> None:
        self._folder = folder
        self._family = family
        self._digests: set[str] = set()
        self._skipped = Skipped(tree)
        self._lock = threading.Lock()
        self._save_skipped()

    def lower(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lower a program for JAX, and again for the real chip, even if the first lowering fails
        because the simulated chip does not support it (a kernel of Pallas, for example)."""
        try:
            return original(*args, **kwargs)
        finally:
            if not kwargs.get("lowering_platforms"):
                with contextlib.suppress(Exception):
                    self._record(original, args, kwargs)

    def _record(self, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        jaxpr = args[0]
        weight = sum(map(lowering.measure_size, (*jaxpr.in_avals, *jaxpr.out_avals)))
        if _is_operation(jaxpr, weight):
            self._count("small")
        elif len(self._digests) >= MOST:
            self._count("beyond")
        else:
            self._keep(self._lower_again(original, args, kwargs, weight))

    def _lower_again(
        self, original: Callable[..., Any], args: Any, kwargs: Any, weight: int
    ) -> Lowered:
        name, source = lowering.find_origin(args[0])
        try:
            with lowering.emulate_chip(self._family):
                computation = original(*args, **(kwargs | {"lowering_platforms": TPU}))
            if computation.compile_args["host_callbacks"]:
                return _refuse(name, source, weight, lowering.CALLBACKS)
            return lowering.describe(computation, None, source, name)
        except Exception as error:  # noqa: BLE001 - any error of JAX is the reason to show
            reason = f"JAX cannot lower it for TPUs: {error}"
            why = lowering.CALLBACKS if lowering.calls_back(error) else reason
            return _refuse(name, source, weight, why)

    def _keep(self, lowered: Lowered) -> None:
        program = lowered.program
        with self._lock:
            if program.digest in self._digests:
                return
            self._digests.add(program.digest)
            description, module = name_files(len(self._digests))
        files.save(self._folder / module, [lowered.module])
        files.save(self._folder / description, [json.dumps(program.to_json()).encode()])

    def _count(self, which: str) -> None:
        with self._lock:
            number = getattr(self._skipped, which) + 1
            self._skipped = replace(self._skipped, **{which: number})
            if number & (number - 1) == 0:  # at 1, 2, 4, …: a lower bound is enough
                self._save_skipped()

    def _save_skipped(self) -> None:
        text = json.dumps(self._skipped.to_json())
        files.save(self._folder / SKIPPED, [text.encode()])


def _is_operation(closed: Any, weight: int) -> bool:
    """True if a program comes from a library (an initializer, or a function of JAX called outside
    of `jax.jit`), and so small that it fits on every chip; `weight` is its size in bytes. False if
    it has a kernel, because kernels are written for one kind of chip."""
    name, source = lowering.find_origin(closed)
    if origins.is_own(name, source):
        return False
    most_bytes, most_equations = _SMALL_OF_JAX if origins.is_from_jax(source) else _SMALL
    if weight >= most_bytes or lowering.count_equations(closed) >= most_equations:
        return False
    text = str(closed.jaxpr)
    return not any(name in text for name in _KERNELS)


def _refuse(name: str, source: str, weight: int, why: str) -> Lowered:
    program = LoweredProgram(name, (), f"{name} {source} {why}", source, weight=weight, refused=why)
    return Lowered(program, b"")
