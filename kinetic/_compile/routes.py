"""Where devices lie in the mesh: which axis a group of them lies along, and whether it leaves its
slice.

In: the sizes of the mesh, the positions of a slice's devices in it; groups as the compiler writes
them. Out: members of a group, names of axes. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from kinetic._core.values import dataclass

_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclass(frozen=True)
class DeviceLayout:
    """The mesh of a program, as one slice's part of the program sees it.

    Attributes:
        axes: (name, size), in order; none for a program of one device.
        members: for each partition of the compiled program, its position in the mesh.
        slices: for each of them, which slice it is in.
        between_slices: the axes along which slices follow each other, as text.
        slice_count: how many slices there are.
    """

    axes: tuple[tuple[str, int], ...]
    members: tuple[int, ...]
    slices: tuple[int, ...]
    between_slices: str = ""
    slice_count: int = 1

    def read_group(self, attributes: str) -> tuple[int, ...]:
        """Return the partitions of the first group in these attributes of an instruction; none if
        it is written in a way that is not known here."""
        if match := _PAIRS.search(attributes):
            return (int(match[1]), int(match[2]))
        if match := _LISTED.search(attributes):
            return _numbers(match[1])
        if match := _IOTA.search(attributes):
            return _first_of_iota(_numbers(match[1]), _numbers(match[2]), _numbers(match[3] or ""))
        if match := _NAMED.search(attributes):
            return _first_of_named(match[1], match[2])
        if "replica_groups={}" in attributes:
            return tuple(range(len(self.members)))
        return ()

    def name_axes(self, group: Sequence[int]) -> str:
        """Return the axes in which the members of a group differ: "fsdp", "fsdp, tensor"."""
        sizes = [size for _, size in self.axes]
        if not sizes or max(group) >= len(self.members):
            return "?"
        places = [_unravel(self.members[each], sizes) for each in group]
        differ = [len({place[axis] for place in places}) > 1 for axis in range(len(sizes))]
        return ", ".join(itertools.compress((name for name, _ in self.axes), differ)) or "?"

    def crosses(self, group: Sequence[int]) -> bool:
        """Return whether a group has members in several slices."""
        return len({self.slices[member] for member in group if member < len(self.slices)}) > 1


def name_axes_between(axes: Sequence[tuple[str, int]], slices: Sequence[int]) -> str:
    """Return the axes along which the slice changes: "data"."""
    sizes, names = [size for _, size in axes], []
    for axis, (name, size) in enumerate(axes):
        step = math.prod(sizes[axis + 1 :])
        first = [slices[index * step] for index in range(size) if index * step < len(slices)]
        if len(set(first)) > 1:
            names.append(name)
    return ", ".join(names)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


def _first_of_iota(
    shape: Sequence[int], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, ...]:
    """The first row of `arange(n).reshape(sizes).transpose(order).reshape(shape)`."""
    order = order or range(len(sizes))
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    ranges = [range(sizes[axis]) for axis in order]
    moved = [steps[axis] for axis in order]
    places = itertools.islice(itertools.product(*ranges), math.prod(shape[1:]))
    return tuple(sum(at * step for at, step in zip(place, moved, strict=True)) for place in places)


def _first_of_named(mesh: str, chosen: str) -> tuple[int, ...]:
    """The group of partition 0 along the chosen axes of a mesh: `'a'=4,'b'=2` and `'b'`."""
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)]
    parts = dict(re.findall(r"'([^']+)'(?::\((\d+\)\d+))?", chosen))
    group = [0]
    for axis, (name, size) in enumerate(sizes):
        if name not in parts:
            continue
        step, length = math.prod(size_of_axis for _, size_of_axis in sizes[axis + 1 :]), size
        if parts[name]:  # a part of the axis: (what is outside it)its size
            outside, length = (int(number) for number in parts[name].split(")"))
            step *= size // outside // length
        group = [at + step * index for at in group for index in range(length)]
    return tuple(group)
