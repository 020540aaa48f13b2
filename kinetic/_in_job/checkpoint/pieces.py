"""Pieces of local checkpoints: find the newest step of which the hosts together have every part,
and plan the transfers that bring each host the pieces it needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kinetic._core.values import dataclass
from kinetic._in_job.checkpoint.digests import digest_of
from kinetic._in_job.checkpoint.tree import Leaf
from kinetic.errors import CorruptRecord

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a part of an array."""
Region = tuple[int, Box]
"""Number of a leaf in the state, and a box of its array."""


class Piece(NamedTuple):
    """A part of a leaf in a host's file.

    Attributes:
        leaf: Number of the leaf.
        start, shape: The part of the array.
        offset: Offset of its content in the file, in bytes.
        size_bytes: Size of its content.
        digest: Digest of its content; "" if none was computed.
    """

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: str = ""

    @property
    def part(self) -> Region:
        """The leaf and the part of it that the piece holds."""
        return self.leaf, (self.start, self.shape)

    def is_copy(self, content: Any) -> bool:
        """True if `content` matches the piece's digest, or the piece has no digest."""
        return not self.digest or digest_of(content) == self.digest


@dataclass(frozen=True)
class Local:
    """A local checkpoint on one host, as its index describes it.

    Attributes:
        step: Step of the training run.
        writer: Id of the run that wrote it. Two runs of one job may have saved the same step.
        hosts: Number of hosts of that run.
        leaves: Leaves of the state.
        pieces: Pieces that this host has.
        data: Positions of iterators, by host; None without an iterator.
        metrics: Metrics of a step that was due in the persistent tier as well; else None.
    """

    step: int
    writer: str
    hosts: int
    leaves: tuple[Leaf, ...]
    pieces: tuple[Piece, ...]
    data: Any = None
    metrics: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": 1,
            "step": self.step,
            "writer": self.writer,
            "hosts": self.hosts,
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "pieces": [list(piece) for piece in self.pieces],
            "data": self.data,
            "metrics": self.metrics,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Local:
        """Rebuild a checkpoint from `to_json`.

        Raises:
            CorruptRecord: The record is malformed.
        """
        try:
            if data["format"] != 1:
                raise CorruptRecord(f"its index has the unknown format {data['format']!r}")
            return cls(
                int(data["step"]),
                str(data["writer"]),
                int(data["hosts"]),
                tuple(Leaf.from_json(leaf) for leaf in data["leaves"]),
                tuple(
                    Piece(int(n), tuple(start), tuple(shape), int(offset), int(size), str(digest))
                    for n, start, shape, offset, size, digest in data["pieces"]
                ),
                data.get("data"),
                data.get("metrics"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptRecord(f"its index has a missing or wrong field: {error!r}") from error


class CompleteStep(NamedTuple):
    """A step of which the hosts together have every part.

    Attributes:
        step: Step of the training run.
        on: Local checkpoints of this step, by index of their host.
    """

    step: int
    on: dict[int, Local]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Leaves of the state."""
        return self._any.leaves

    @property
    def writer(self) -> str:
        """Id of the run that has written the step."""
        return self._any.writer

    @property
    def data(self) -> list[Any]:
        """Positions of iterators, by host."""
        return self._any.data or []

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """Metrics, if the step was due in the persistent tier as well; else None."""
        return self._any.metrics

    @property
    def _any(self) -> Local:
        return next(iter(self.on.values()))


def find_newest(on_hosts: Sequence[Sequence[Local]]) -> CompleteStep | None:
    """Return the newest step of which the hosts together have every part; None if there is none.

    Args:
        on_hosts: Local checkpoints of each host.
    """
    kinds = {(local.step, local.writer) for local_steps in on_hosts for local in local_steps}
    for step, writer in sorted(kinds, reverse=True):
        on = {
            host: local
            for host, local_steps in enumerate(on_hosts)
            for local in local_steps
            if (local.step, local.writer) == (step, writer)
        }
        if _is_whole(on.values()):
            return CompleteStep(step, on)
    return None


def drop_pieces(
    on_hosts: Sequence[Sequence[Local]],
    whole: CompleteStep,
    damaged: Collection[tuple[int, Region]],
) -> list[list[Local]]:
    """Return the local checkpoints of each host without the damaged pieces.

    Args:
        on_hosts: Local checkpoints of each host.
        whole: The step that the damaged pieces belong to.
        damaged: Damaged pieces, as (host, region).
    """

    def drop_from(host: int, local: Local) -> Local:
        if (local.step, local.writer) != (whole.step, whole.writer):
            return local
        return replace(
            local, pieces=tuple(p for p in local.pieces if (host, p.part) not in damaged)
        )

    return [[drop_from(host, local) for local in row] for host, row in enumerate(on_hosts)]


def _is_whole(locals_: Iterable[Local]) -> bool:
    copies = list(locals_)
    leaves = copies[0].leaves
    if any(local.leaves != leaves and differ(local.leaves, leaves) for local in copies):
        return False
    parts = {piece.part for local in copies for piece in local.pieces}
    sizes = [0] * len(leaves)
    for leaf, (_, shape) in parts:
        sizes[leaf] += math.prod(shape)
    return all(
        size == math.prod(leaf.shape)
        for leaf, size in zip(leaves, sizes, strict=True)
        if leaf.dtype
    )


def differ(one: Sequence[Leaf], other: Sequence[Leaf]) -> bool:
    """True if names, shapes or types of two lists of leaves differ, whatever their values."""
    return [(leaf.name, leaf.shape, leaf.dtype) for leaf in one] != [
        (leaf.name, leaf.shape, leaf.dtype) for leaf in other
    ]


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes; None if they have none."""
    begin = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = [
        min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)
    ]
    shape = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return None if any(size <= 0 for size in shape) else (begin, shape)


def locate_box(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select a box within an outer one."""
    return tuple(
        slice(start - offset, start - offset + size)
        for start, size, offset in zip(inner[0], inner[1], outer[0], strict=True)
    )


class Transfer(NamedTuple):
    """A piece that a host sends to others.

    Attributes:
        source: Host that sends the piece.
        piece: Piece in the source's file.
        needed_by: Hosts that need the piece.
    """

    source: int
    piece: Piece
    needed_by: frozenset[int]


def plan_transfers(
    whole: CompleteStep, needed: Sequence[Mapping[int, set[Box]]], hosts: int
) -> list[Transfer]:
    """Plan the transfers that bring each host the pieces it needs. All hosts get the same plan.

    Args:
        whole: The step, with the pieces of each host.
        needed: For each leaf, the boxes that each host needs; key -1 means all hosts.
        hosts: Number of hosts.
    """
    holders: dict[tuple[int, Box], dict[int, Piece]] = {}
    for host, local in sorted(whole.on.items()):
        for piece in local.pieces:
            holders.setdefault(piece.part, {}).setdefault(host, piece)
    plan: list[Transfer] = []
    for (leaf, part), copies in sorted(holders.items()):
        for_all = needed[leaf].get(-1, set())
        needed_by = frozenset(
            host
            for host in range(hosts)
            if host not in copies
            and any(overlap(part, box) for box in needed[leaf].get(host, set()) | for_all)
        )
        if needed_by:
            # Spread the load over the hosts that have a copy.
            sources = sorted(copies)
            source = sources[len(plan) % len(sources)]
            plan.append(Transfer(source, copies[source], needed_by))
    return sorted(plan, key=lambda transfer: (transfer.source, transfer.piece.offset))
