"""`kinetic.CompileSlice`: a slice to compile for, from `kinetic.compile_for`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kinetic._compile import lowering, topologies
from kinetic._compile.processes import TIMEOUT_S, Compilers, Watch
from kinetic._compile.report import CompileReport, describe_refusal, take_first_line
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators import catalog
from kinetic._core.accelerators.families import TPUS
from kinetic._core.accelerators.prices import Price, price_of
from kinetic._core.accelerators.topology import Topology
from kinetic._core.duration import Duration, patience_s
from kinetic.errors import UsageError, UsageTypeError

MOST_SIZES = 12
FIT_WITHIN = "1h"
"""Default time limit of `find_fit`: a family has up to 20 sizes, and a compile takes minutes."""
_CHIPS = ("/dev/accel0", "/dev/vfio/0")
"""Device files of TPU chips. On a machine with TPUs, JAX finds at least one of these."""
Built = tuple[Any, ...]
"""A function, and the arguments to compile it with."""


class CompileSlice:
    """Slices to compile for, on a machine without them; made by `kinetic.compile_for`.

    As a context manager, `kinetic.make_mesh` and `kinetic.num_slices` answer as in a job on these
    slices. No array of a model is allocated: describe arrays by `jax.ShapeDtypeStruct`, and a whole
    state by `jax.eval_shape`.

    Example:
        <!-- not run: the compiler takes many seconds -->
        ```python
        with kinetic.compile_for("tpu-v6e-16", slices=2) as slice:
            mesh = kinetic.make_mesh(ici={"fsdp": 16})
            print(slice.compile(step, params, batch))
        ```
    """

    def __init__(
        self,
        target: CompileTarget,
        cache: Path | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        watch: Watch | None = None,
        find_price: Callable[[Topology], Price | None] = price_of,
        find_flags: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._target = target
        self._cache = cache
        self._timeout_s = timeout_s
        self._watch = watch
        self._find_price = find_price
        self._find_flags = find_flags
        self._tokens: list[Token[CompileTarget | None]] = []

    def __repr__(self) -> str:
        many = f"{self._target.slices} slices of " if self._target.slices > 1 else ""
        return f"<CompileSlice: {many}{self._target.topology.name}>"

    def __enter__(self) -> Self:
        topologies.find_compiler()
        self._tokens.append(topologies.current.set(self._target))
        return self

    def __exit__(self, *_: object) -> None:
        topologies.current.reset(self._tokens.pop())

    @property
    def target(self) -> CompileTarget:
        """The slices and their topology."""
        return self._target

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of the slices, slice by slice, for meshes. They hold no arrays."""
        return topologies.describe(self._target)

    def compile(self, function: Any, /, *args: Any, **kwargs: Any) -> CompileReport:
        """Compile a call of a function for these slices.

        Args:
            function: A function, also one wrapped by `jax.jit`, `nnx.jit` or `eqx.filter_jit`:
                donated, static and split arguments stay so.
            args: Its arguments: arrays, of which only the shape is used, `jax.ShapeDtypeStruct`
                with a `sharding` over the devices of the mesh, or trees of them, such as modules of
                Flax NNX and Equinox.
            kwargs: Keyword arguments, likewise.

        Returns:
            The report; it also says if the program is too large or does not compile.

        Raises:
            UsageError: The function cannot be lowered for a TPU.
        """
        _check_callable("compile", function, "to compile")
        has_chips = any(map(os.path.exists, _CHIPS))
        with self, contextlib.nullcontext() if has_chips else topologies.hide_machine():
            lowered = lowering.lower(self._target, function, args, kwargs)
        compilers = Compilers(
            self._target,
            self._cache,
            timeout_s=self._timeout_s,
            watch=self._watch,
            price=self._find_price(self._target.topology),
            flags=self._find_flags(),
        )
        return next(report for _, report in compilers.compile([lowered]))

    def find_fit(
        self,
        build: Callable[[], Built],
        *,
        most_sizes: int = MOST_SIZES,
        within: Duration = FIT_WITHIN,
    ) -> list[CompileReport]:
        """Compile for each size of this family, smallest first, until one fits.

        Args:
            build: Returns the function and its arguments for `compile`. It is called for each size,
                in a context in which `kinetic.make_mesh` makes that size's mesh. A `ValueError`,
                such as for a batch that cannot be split over a size, skips that size; its report
                has the reason.
            most_sizes: Number of sizes to compile for.
            within: Time limit of the search; a running compile is stopped.

        Returns:
            The reports, of which only the last may fit. If the search ended early, the last one
                names the sizes that were left out.

        Raises:
            ValueError: `build` raised it for every size.
            UsageTypeError: `build` does not return a function and its arguments.

        Example:
            <!-- not run: the compiler takes many seconds -->
            ```python
            reports = kinetic.compile_for("tpu-v6e-1").find_fit(lambda: (step, params, batch))
            print(reports[-1].accelerator)
            ```
        """
        _check_callable("find_fit", build, "that returns a function and its arguments")
        reports = list[CompileReport]()
        unsuited = list[ValueError]()
        until = time.monotonic() + patience_s(within)
        sizes = _find_sizes(self._target)
        for number, target in enumerate(sizes):
            remaining_s = until - time.monotonic()
            if remaining_s <= 0 or len(reports) - len(unsuited) >= most_sizes:
                reports.append(_describe_rest(build, sizes[number:], number))
                break
            candidate = CompileSlice(
                target,
                self._cache,
                timeout_s=min(self._timeout_s, remaining_s),
                watch=self._watch,
                find_price=self._find_price,
                find_flags=self._find_flags,
            )
            try:
                with candidate:
                    function, *args = call_build(build)
                    reports.append(candidate.compile(function, *args))
            except UsageTypeError:  # Also a ValueError, but not about this size.
                raise
            except ValueError as error:
                unsuited.append(error)
                reports.append(_describe_skip(build, target, take_first_line(str(error))))
            if reports[-1].fits:
                break
        if len(unsuited) == len(reports):
            raise unsuited[-1]
        return reports


def call_build(build: Callable[[], Built]) -> Built:
    """Call `build`, and return the function to compile and its arguments.

    Raises:
        UsageTypeError: `build` returns something else.
    """
    built: object = build()
    if not isinstance(built, tuple) or not built:
        kind = type(built).__name__ if built != () else "an empty tuple"
        raise UsageTypeError(
            f"{_name_build(build)}() must return the function to compile and its arguments, as in "
            f"`return step, params, batch`; it returned {kind}."
        )
    return built


def _name_build(build: Callable[[], Built]) -> str:
    return getattr(build, "__name__", "build")


def _check_callable(method: str, value: object, rest: str) -> None:
    if not callable(value):
        raise UsageTypeError(
            f"The first argument of {method}() must be a function {rest}; got "
            f"{type(value).__name__} {value!r:.60}."
        )


def _describe_rest(
    build: Callable[[], Built], rest: Sequence[CompileTarget], tried: int
) -> CompileReport:
    first, last = rest[0].topology.name, rest[-1].topology.name
    names = first if first == last else f"the {len(rest)} from {first} to {last}"
    after = f"{tried} size{'' if tried == 1 else 's'}"
    why = f"The search ended after {after} without one that fits, and left out {names}."
    return _describe_skip(build, rest[0], why)


def _describe_skip(build: Callable[[], Built], target: CompileTarget, why: str) -> CompileReport:
    return describe_refusal(_name_build(build), "", target.topology, target.slices, detail=why)


def _find_sizes(target: CompileTarget) -> list[CompileTarget]:
    """Return the slices of this family to try, smallest first, one for each number of chips."""
    family = next(family_row for family_row in TPUS if family_row.name == target.topology.family)
    rows = [row for row in catalog.catalog_rows() if row.family == family.name]
    if not rows:
        raise UsageError(f"kinetic knows no slice of {family.name} for which it could compile.")
    by_chips = {row.chips: row for row in reversed(rows)}
    return [replace(target, topology=row) for _, row in sorted(by_chips.items())]
