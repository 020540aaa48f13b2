"""A slice to compile for: what `kinetic.compile_for` returns.

In: functions with their arguments. Out: `CompileReport`s; meshes of the real slice's devices while
the slice is entered.
"""

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
from kinetic._compile.report import CompileReport, describe_refusal, first_sentence
from kinetic._compile.topologies import CompileTarget
from kinetic._core.accelerators import catalog
from kinetic._core.accelerators.families import TPUS
from kinetic._core.accelerators.prices import Price, price_of
from kinetic._core.accelerators.topology import Topology
from kinetic._core.duration import Duration, patience_s
from kinetic.errors import UsageError, UsageTypeError

MOST_SIZES = 12
FIT_WITHIN = "1h"
"""Where a search ends: a family has up to 20 sizes, and a compile takes minutes."""
_CHIPS = ("/dev/accel0", "/dev/vfio/0")
"""Of which JAX finds one on a machine with TPUs."""
Built = tuple[Any, ...]
"""A function and its arguments."""


class CompileSlice:
    """Slices that nobody has, for their compiler.

    As a context, `kinetic.make_mesh` and `kinetic.num_slices` answer as in a job on them. Nothing
    of a model's size is made: describe arrays by `jax.ShapeDtypeStruct`, and make those of a whole
    state by `jax.eval_shape`.
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
        """The slices, as a value."""
        return self._target

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of the slices, slice by slice, for meshes: nothing can be put on them."""
        return topologies.describe(self._target)

    def compile(self, function: Any, /, *args: Any, **kwargs: Any) -> CompileReport:
        """Compile a call of a function for these slices, and return what the compiler says.

        Args:
            function: a function, or one that `jax.jit`, `nnx.jit` or `eqx.filter_jit` has wrapped:
                what is donated, static or split stays so.
            args: its arguments: arrays, of which only the shape is used, `jax.ShapeDtypeStruct`
                with a `sharding` over the devices of the mesh, or trees of them, such as modules
                of Flax NNX and Equinox.
            kwargs: likewise.
        """
        _check_callable("compile", function, "and its arguments")
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
        """Compile for each size of this family, smallest first, until one fits; return the reports,
        of which only the last may fit. If the search ends before, the last says which sizes were
        left out.

        Args:
            build: is called for each size, where `kinetic.make_mesh` makes its mesh, and returns
                the function and its arguments for `compile`. A `ValueError`, such as of a mesh or a
                batch that cannot be split over a size, leaves that size out: its report says why.
            most_sizes: how many are compiled for.
            within: how long all of it may take; a compile that runs then is ended.

        Raises:
            ValueError: it was raised for every size.
            UsageTypeError: `build` does not return a function and its arguments.
        """
        _check_callable("find_fit", build, "that returns a function and its arguments")
        reports = list[CompileReport]()
        unsuited = list[ValueError]()
        until = time.monotonic() + patience_s(within)
        sizes = _find_sizes(self._target)
        for number, target in enumerate(sizes):
            left_s = until - time.monotonic()
            if left_s <= 0 or len(reports) - len(unsuited) >= most_sizes:
                reports.append(_describe_rest(build, sizes[number:], number))
                break
            tried = CompileSlice(
                target,
                self._cache,
                timeout_s=min(self._timeout_s, left_s),
                watch=self._watch,
                find_price=self._find_price,
                find_flags=self._find_flags,
            )
            try:
                with tried:
                    function, *args = call_build(build)
                    reports.append(tried.compile(function, *args))
            except UsageTypeError:  # a ValueError, too, and the same for every size
                raise
            except ValueError as error:
                unsuited.append(error)
                reports.append(_describe_skip(build, target, first_sentence(str(error))))
            if reports[-1].fits:
                break
        if len(unsuited) == len(reports):
            raise unsuited[-1]
        return reports


def call_build(build: Callable[[], Built]) -> Built:
    """Return the function to compile and its arguments, which the caller's function returns.

    Raises:
        UsageTypeError: it returns something else.
    """
    built: object = build()
    if not isinstance(built, tuple) or not built:
        what = type(built).__name__ if built != () else "an empty tuple"
        raise UsageTypeError(
            f"{_name_build(build)}() must return the function to compile and its arguments, as "
            f"`return step, params, batch`; it returned {what}."
        )
    return built


def _name_build(build: Callable[[], Built]) -> str:
    return getattr(build, "__name__", "build")


def _check_callable(method: str, value: object, rest: str) -> None:
    if not callable(value):
        raise UsageTypeError(
            f"{method}() takes a function {rest}, not {type(value).__name__} {value!r:.60}."
        )


def _describe_rest(
    build: Callable[[], Built], rest: Sequence[CompileTarget], tried: int
) -> CompileReport:
    first, last = rest[0].topology.name, rest[-1].topology.name
    left_out = first if first == last else f"the {len(rest)} from {first} to {last}"
    after = f"{tried} size{'' if tried == 1 else 's'}"
    why = f"The search ended after {after} without one that fits, and left out {left_out}."
    return _describe_skip(build, rest[0], why)


def _describe_skip(build: Callable[[], Built], target: CompileTarget, why: str) -> CompileReport:
    return describe_refusal(_name_build(build), "", target.topology, target.slices, detail=why)


def _find_sizes(target: CompileTarget) -> list[CompileTarget]:
    """The slices of a family, smallest first; each number of chips once."""
    family = next(family_row for family_row in TPUS if family_row.name == target.topology.family)
    rows = [row for row in catalog.catalog_rows() if row.family == family.name]
    if not rows:
        raise UsageError(f"There is no slice of {family.name} that could be compiled for.")
    by_chips = {row.chips: row for row in reversed(rows)}
    return [replace(target, topology=row) for _, row in sorted(by_chips.items())]
