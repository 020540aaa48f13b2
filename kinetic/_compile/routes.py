"""Routes between devices in the mesh: the axes along which a group of devices communicates, and
whether the group crosses slices. Pure."""

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
    """The mesh of a compiled program. The program is compiled for one slice only.

    Attributes:
        axes: (name, size), in order; none for a program of one device.
        members: Position in the mesh of each partition of the compiled program.
        slices: Index of the slice of each partition.
        between_slices: Names of the axes along which the slices are laid out.
        slice_count: Number of slices.
    """

    axes: tuple[tuple[str, int], ...]
    members: tuple[int, ...]
    slices: tuple[int, ...]
    between_slices: str = ""
    slice_count: int = 1

    def read_group(self, attributes: str) -> tuple[int, ...]:
        """Return the partitions of the first group in an instruction's attributes; () if their
        format is unknown."""
        if match := _PAIRS.search(attributes):
            return (int(match[1]), int(match[2]))
        if match := _LISTED.search(attributes):
            return _read_numbers(match[1])
        if match := _IOTA.search(attributes):
            return _read_iota_group(
                _read_numbers(match[1]), _read_numbers(match[2]), _read_numbers(match[3] or "")
            )
        if match := _NAMED.search(attributes):
            return _read_named_group(match[1], match[2])
        if "replica_groups={}" in attributes:
            return tuple(range(len(self.members)))
        return ()

    def name_axes(self, group: Sequence[int]) -> str:
        """Return the mesh axes along which a group's members differ, such as "fsdp, tensor"."""
        sizes = [size for _, size in self.axes]
        if not sizes or max(group) >= len(self.members):
            return "?"
        indices = [_unravel(self.members[member], sizes) for member in group]
        differ = [len({index[axis] for index in indices}) > 1 for axis in range(len(sizes))]
        return ", ".join(itertools.compress((name for name, _ in self.axes), differ)) or "?"

    def crosses(self, group: Sequence[int]) -> bool:
        """True if a group has members in several slices."""
        return len({self.slices[member] for member in group if member < len(self.slices)}) > 1


def name_axes_between(axes: Sequence[tuple[str, int]], slices: Sequence[int]) -> str:
    """Return the axes along which devices belong to different slices, such as "data"."""
    sizes, names = [size for _, size in axes], []
    for axis, (name, size) in enumerate(axes):
        step = math.prod(sizes[axis + 1 :])
        first = [slices[index * step] for index in range(size) if index * step < len(slices)]
        if len(set(first)) > 1:
            names.append(name)
    return ", ".join(names)


def _read_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    indices = []
    for size in reversed(sizes):
        index, within = divmod(index, size)
        indices.append(within)
    return tuple(reversed(indices))


def _read_iota_group(
    shape: Sequence[int], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, ...]:
    """Return the first row of `arange(n).reshape(sizes).transpose(order).reshape(shape)`."""
    order = order or range(len(sizes))
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    ranges = [range(sizes[axis]) for axis in order]
    steps = [steps[axis] for axis in order]
    rows = itertools.islice(itertools.product(*ranges), math.prod(shape[1:]))
    return tuple(sum(at * step for at, step in zip(row, steps, strict=True)) for row in rows)


def _read_named_group(mesh: str, chosen: str) -> tuple[int, ...]:
    """Return the partitions in the group of partition 0, along the axes `chosen` of a mesh.
    Example: mesh `'a'=4,'b'=2`, chosen `'b'`."""
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)]
    parts = dict(re.findall(r"'([^']+)'(?::\((\d+\)\d+))?", chosen))
    group = [0]
    for axis, (name, size) in enumerate(sizes):
        if name not in parts:
            continue
        step, length = math.prod(size_of_axis for _, size_of_axis in sizes[axis + 1 :]), size
        if parts[name]:  # "(size outside)size": a part of the axis.
            outside, length = (int(number) for number in parts[name].split(")"))
            step *= size // outside // length
        group = [at + step * index for at in group for index in range(length)]
    return tuple(group)
