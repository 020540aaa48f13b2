"""The programs that JAX compiles in a worker, kept for the compiler of the real slice: with
`compile_check`, on the leader.

In: a folder of the job's records. Out: a description and a StableHLO module for each program, or
why there is none; how many were too small to look at.
"""

from __future__ import annotations

import contextlib
import json
import sys
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
from kinetic._host.worker.startup.kinetic_awaiting import Awaiting
from kinetic._store import files

MOST = 200
"""Programs kept for one attempt: a script that compiles more of this size compiles in a loop."""
_LITTLE = (1 << 18, 12)
"""Bytes and equations of single operations."""
_OWN_OF_JAX = (1 << 26, 64)
"""The same of those that JAX itself defines: even if the compiler pads them to its tiles a
hundredfold, every chip has room for less."""
_KERNELS = ("pallas_call", "mpmd_map", "core_map")
"""What `pl.pallas_call`, `pl.kernel` and `pl.core_map` make."""


def record(folder: Path, tree: str, accelerator: str) -> None:
    """Keep from now on what JAX compiles in this process, whose source lies in this tree, for this
    slice."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    recorder = Recorder(folder, tree, resolve(accelerator).family)
    if "jax._src.pjit" in sys.modules:
        lowering.replace_entrance(recorder.lower)
    else:
        start = lambda: lowering.replace_entrance(recorder.lower)  # noqa: E731
        sys.meta_path.insert(0, Awaiting("jax._src.pjit", start))


class Recorder:
    """Writes each program down, once. A fault of its own costs the program's record, never the
    function's run."""

    def __init__(self, folder: Path, tree: str = "", family: str = "v6e") -> None:
        self._folder = folder
        self._family = family
        self._digests: set[str] = set()
        self._skipped = Skipped(tree)
        self._lock = threading.Lock()
        self._save_skipped()

    def lower(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lower as JAX wants it, and once more for the real chip: also where the simulated one has
        no way, such as for a kernel of Pallas."""
        try:
            return original(*args, **kwargs)
        finally:
            if not kwargs.get("lowering_platforms"):
                with contextlib.suppress(Exception):
                    self._record(original, args, kwargs)

    def _record(self, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        jaxpr = args[0]
        weight = sum(map(lowering.size_of, (*jaxpr.in_avals, *jaxpr.out_avals)))
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
            with lowering.answering_for_chip(self._family):
                computation = original(*args, **(kwargs | {"lowering_platforms": TPU}))
            if computation.compile_args["host_callbacks"]:
                return _refuse(name, source, weight, lowering.CALLBACKS)
            return lowering.describe(computation, None, source, name)
        except Exception as error:  # noqa: BLE001 - whatever JAX says is what is to be shown
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
            if number & (number - 1) == 0:  # 1, 2, 4, ...: few writes, and "at least" is enough
                self._save_skipped()

    def _save_skipped(self) -> None:
        text = json.dumps(self._skipped.to_json())
        files.save(self._folder / SKIPPED, [text.encode()])


def _is_operation(closed: Any, weight: int) -> bool:
    """Whether it is no function of the user's, and every chip has room for it: one with few
    equations and little data, such as those that make parameters, or one of JAX's own that was
    called outside of `jax.jit`. One that has a kernel in it, which somebody wrote for the chip, is
    none."""
    name, source = lowering.find_origin(closed)
    if origins.is_own(name, source):
        return False
    most_bytes, most_equations = _OWN_OF_JAX if origins.is_of_jax(source) else _LITTLE
    if weight >= most_bytes or lowering.count_equations(closed) >= most_equations:
        return False
    text = str(closed.jaxpr)
    return not any(name in text for name in _KERNELS)


def _refuse(name: str, source: str, weight: int, why: str) -> Lowered:
    program = LoweredProgram(name, (), f"{name} {source} {why}", source, weight=weight, refused=why)
    return Lowered(program, b"")
