"""Resolve names of accelerators, such as "tpu-v6e-16", "a100x4" or "gpu:4:spot", to slices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kinetic._core.accelerators import catalog
from kinetic._core.accelerators.catalog import Shape
from kinetic._core.accelerators.families import (
    CPU_DEVICES_MAX,
    DEFAULTS,
    FAMILIES,
    Family,
    GpuFamily,
    TpuFamily,
)
from kinetic._core.accelerators.topology import Topology
from kinetic.errors import UnknownAccelerator, UsageTypeError

SPOT = ":spot"
LONGEST_NAME = 64  # Longer than any valid name; keeps huge texts from int() and difflib.


class _Refusal(NamedTuple):
    """The reason why a name is refused, and the nearest valid names."""

    why: str
    nearest: tuple[str, ...] = ()


def resolve(name: str, *, spot: bool = False) -> Topology:
    """Return the slice with this name.

    Case does not matter, and the prefix "tpu-" or "gpu-" may be left out.
    `resolve(resolve(name).name)` returns the same slice.

    Args:
        name: "cpu", "cpu:4", "l4", "gpu-a100x4", "gpu:4", "tpu-v6e-16", "v5p-2x2x2", ..., with or
            without ":spot".
        spot: request preemptible machines, like the suffix ":spot".

    Raises:
        UnknownAccelerator: no slice has this name; `suggestions` holds the nearest names.
        UsageTypeError: the name is not text.
    """
    if not isinstance(name, str):
        raise UsageTypeError(
            "The name of an accelerator must be a string such as 'tpu-v6e-16'; got "
            f"{type(name).__name__}."
        )
    text = name.strip().lower()
    plain = text.removesuffix(SPOT)
    topology = _find(plain)
    if isinstance(topology, _Refusal):
        raise _build_error(name, topology, SPOT if plain != text else "")
    if spot or plain != text:
        return replace(topology, name=topology.name + SPOT, spot=True)
    return topology


def _build_error(name: str, refusal: _Refusal, suffix: str) -> UnknownAccelerator:
    short = name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…"
    nearest = [near + suffix for near in dict.fromkeys(refusal.nearest)]
    hint = f" Nearest: {', '.join(nearest)}." if nearest else ""
    message = (
        f"There is no accelerator {short!r}: {refusal.why}.{hint} `kinetic accelerators` lists all "
        "names."
    )
    return UnknownAccelerator(message, name=name, suggestions=nearest)


def _find(text: str) -> Topology | _Refusal:
    if not text:
        return _Refusal("the name is empty", ("cpu", "gpu-l4", "tpu-v5litepod-4"))
    if len(text) > LONGEST_NAME:
        return _Refusal("no name is that long")
    if text == "cpu":
        return _find_count("cpu", 1)
    text = DEFAULTS.get(text, text)
    kind, rest = _split_kind(text)
    number = _parse_number(rest)
    return _find_in_family(kind, rest) if number is None or not kind else _find_count(kind, number)


def _split_kind(text: str) -> tuple[str, str]:
    kind, rest = text[:3], text[4:]
    return (kind, rest) if kind in ("cpu", "gpu", "tpu") and text[3:4] in ("-", ":") else ("", text)


def _find_count(kind: str, number: int) -> Topology | _Refusal:
    if kind == "cpu":
        limit = CPU_DEVICES_MAX
        return catalog.cpu_slice(number) or _Refusal(
            f"a cpu slice has 1 to {limit} devices", ("cpu", f"cpu:{limit}")
        )
    families = catalog.preferred_families(kind)
    candidates = (catalog.slice_of(family, number) for family in families)
    available = sorted({count for family in families for count in catalog.counts(family)})
    nearest = tuple(f"{kind}:{count}" for count in _suggest_counts(available, number))
    return next(
        (topology for topology in candidates if topology),
        _Refusal(f"no {kind} slice has {number} {'GPUs' if kind == 'gpu' else 'chips'}", nearest),
    )


def _find_in_family(kind: str, text: str) -> Topology | _Refusal:
    if kind == "cpu":
        return _Refusal("cpu must be followed by a number of devices", ("cpu", "cpu:4"))
    family, tail = _split_family(text)
    if family is None:
        return _refuse_family(kind, text)
    if kind not in ("", family.kind):
        return _Refusal(f"{family.name} is a {family.kind}, not a {kind}", _suggest_names("", text))
    return _find_gpu(family, tail) if isinstance(family, GpuFamily) else _find_tpu(family, tail)


def _split_family(text: str) -> tuple[Family | None, str]:
    by_alias = {alias: family for family in FAMILIES for alias in _list_names(family)}
    fitting = [
        alias
        for alias in by_alias
        if text.startswith(alias) and text[len(alias) : len(alias) + 1] in ("", "-", ":", "x")
    ]
    longest = max(fitting, key=len, default="")
    return by_alias.get(longest), text[len(longest) :]


def _list_names(family: Family) -> tuple[str, ...]:
    label = (family.label,) if isinstance(family, GpuFamily) else ()
    return (family.name, *family.aliases, *label)


def _find_gpu(family: GpuFamily, tail: str) -> Topology | _Refusal:
    number = _parse_number(tail[1:]) if tail else catalog.counts(family)[0]
    if number is None or tail[:1] not in ("", "x", ":"):
        return _refuse_size(family, tail, number, f"write {family.name}xN for N GPUs")
    return catalog.gpu_slice(family, number) or _refuse_count(family, number)


def _find_tpu(family: TpuFamily, tail: str) -> Topology | _Refusal:
    size, dash, machine = tail[1:].partition("-") if tail else (str(family.default_chips), "", "")
    number, shape = _parse_number(size), _parse_shape(size)
    per_host = _parse_number(machine.removesuffix("t")) if machine.endswith("t") else None
    if (
        tail[:1] not in ("", "-", ":")
        or (number is None and shape is None)
        or (dash and per_host is None)
    ):
        return _refuse_size(
            family,
            tail,
            number,
            f"write {family.name}-N for N chips, or {family.name}-AxB for a topology",
        )
    wanted = shape or catalog.shape_for(family, number or 0)
    if wanted is None:
        return _refuse_count(family, number or 0)
    return catalog.tpu_slice(family, wanted, per_host) or _refuse_shape(family, wanted)


def _refuse_size(family: Family, tail: str, number: int | None, how: str) -> _Refusal:
    meant = catalog.slice_of(family, number) if number is not None else None
    nearest = ((meant.name,) if meant else ()) + _suggest_names(family.kind, family.name + tail)
    return _Refusal(f"{tail!r} after {family.name} is not a size; {how}", nearest)


def _refuse_family(kind: str, text: str) -> _Refusal:
    candidates = [family for family in FAMILIES if kind in ("", family.kind)]
    names = ", ".join(family.name for family in candidates)
    why = (
        f"no {kind.upper() or 'accelerator'} family is called {re.split('[-:]', text)[0]!r}; "
        f"families: {names}"
    )
    return _Refusal(why, _suggest_names(kind, text) or _suggest_families(candidates, text))


def _suggest_families(candidates: Sequence[Family], text: str) -> tuple[str, ...]:
    """Return slices of the families whose names start with the text or are spelt like it."""
    import difflib  # Only an error needs it.

    by_alias = {alias: family for family in candidates for alias in _list_names(family)}
    begin = [alias for alias in by_alias if alias.startswith(text)]
    near = begin or difflib.get_close_matches(text, by_alias, n=3, cutoff=0.5)
    topologies = (
        catalog.slice_of(by_alias[alias], catalog.counts(by_alias[alias])[0]) for alias in near
    )
    return tuple(dict.fromkeys(topology.name for topology in topologies if topology))[:3]


def _refuse_count(family: Family, number: int) -> _Refusal:
    available = catalog.counts(family)
    nearest = [catalog.slice_of(family, count) for count in _suggest_counts(available, number)]
    if number > available[-1]:
        nearest += [
            catalog.slice_of(other, number) for other in catalog.preferred_families(family.kind)
        ]
    unit = "GPUs" if family.kind == "gpu" else "chips"
    why = f"{family.name} comes with {_list_counts(family, available)} {unit}, not {number}"
    return _Refusal(why, tuple(topology.name for topology in nearest if topology)[:3])


def _refuse_shape(family: TpuFamily, shape: Shape) -> _Refusal:
    meant = [catalog.tpu_slice(family, shape), catalog.tpu_slice(family, tuple(sorted(shape)))]
    meant += [
        catalog.slice_of(family, count)
        for count in _suggest_counts(catalog.counts(family), math.prod(shape))
    ]
    nearest = tuple(topology.name for topology in meant if topology)
    if meant[0]:
        why = f"{family.name} has no {meant[0].shape_text} on machines with that number of chips"
        return _Refusal(why, nearest)
    return _Refusal(f"{family.name} has no such topology; it has {_list_shapes(family)}", nearest)


def _list_counts(family: Family, available: Sequence[int]) -> str:
    if isinstance(family, TpuFamily) and family.cube_limit_chips:
        small = ", ".join(str(count) for count in available if count < 64)
        return f"{small} or a multiple of 64 up to {family.cube_limit_chips}"
    *first, last = (str(count) for count in available)
    return f"{', '.join(first)} or {last}" if first else last


def _list_shapes(family: TpuFamily) -> str:
    shapes = sorted(set(catalog.shapes(family)), key=lambda shape: (math.prod(shape), shape))
    small = ", ".join(
        catalog.shape_text(shape) for shape in shapes if not catalog.is_cube(family, shape)
    )
    order = " in ascending order" if family.ascending else ""
    rule = f", and AxBxC of multiples of 4{order} up to {family.cube_limit_chips} chips"
    return small + rule if family.cube_limit_chips else small


def _suggest_counts(available: Sequence[int], number: int) -> list[int]:
    """Return the count if available, else the next lower and the next higher one, nearer first."""
    if number in available:
        return [number]
    below = [count for count in available if count < number][-1:]
    above = [count for count in available if count > number][:1]
    return sorted(below + above, key=lambda count: (abs(count - number), count))


def _suggest_names(kind: str, text: str) -> tuple[str, ...]:
    """Return canonical names with a spelling similar to the text, in any of their forms."""
    import difflib  # Only an error needs it.

    spelled = {form: name for name, form in _list_spellings(kind)}
    close = difflib.get_close_matches(text, spelled, n=6, cutoff=0.6)
    return tuple(dict.fromkeys(spelled[form] for form in close))[:3]


def _list_spellings(kind: str) -> list[tuple[str, str]]:
    families: dict[str, Family] = {family.name: family for family in FAMILIES}
    rows = [
        row for row in catalog.catalog_rows() if row.family in families and kind in ("", row.kind)
    ]
    pairs = [
        (row.name, alias + row.name.partition(row.family)[2])
        for row in rows
        for alias in _list_names(families[row.family])
    ]
    return pairs + [
        (resolve(bare).name, bare) for bare in ("cpu", "gpu", "tpu") if kind in ("", bare)
    ]


def _parse_number(text: str) -> int | None:
    # isdigit() alone lets "²" through.
    return int(text) if text.isascii() and text.isdigit() else None


def _parse_shape(text: str) -> Shape | None:
    axes = [_parse_number(axis) for axis in text.split("x")]
    numbers = tuple(axis for axis in axes if axis is not None)
    return numbers if len(numbers) == len(axes) > 1 else None
