"""Which pieces of local checkpoints make up a whole one, and which host sends what to whom. Pure.

In: what each host has. Out: the newest whole step; the transfers between hosts.
"""

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
"""Where a part of an array begins, and its shape."""
Region = tuple[int, Box]
"""The number of a leaf, and a part of it."""


class Piece(NamedTuple):
    """A part of a leaf in a host's file.

    Attributes:
        leaf: the number of the leaf.
        start, shape: the part of the array.
        offset: of its content in the file.
        size_bytes: of its content.
        digest: of its content; "" where none was made.
    """

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: str = ""

    @property
    def part(self) -> Region:
        """What it is a copy of."""
        return self.leaf, (self.start, self.shape)

    def is_copy(self, content: Any) -> bool:
        """Whether a content is what was saved, as far as its digest tells."""
        return not self.digest or digest_of(content) == self.digest


@dataclass(frozen=True)
class Local:
    """A local checkpoint on one host, as its index describes it.

    Attributes:
        step: of the training.
        writer: the run that has written it: two runs of one job may both have come to a step.
        hosts: how many hosts that run had.
        leaves: of the state.
        pieces: what of it lies on this host.
        data: the positions of iterators, by host; None where none was given.
        metrics: of the step, if it was to be saved to the persistent tier as well; else None.
    """

    step: int
    writer: str
    hosts: int
    leaves: tuple[Leaf, ...]
    pieces: tuple[Piece, ...]
    data: Any = None
    metrics: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
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
        """Rebuild from `to_json`.

        Raises:
            CorruptRecord: it is something else.
        """
        try:
            if data["format"] != 1:
                raise CorruptRecord(f"The local checkpoint has format {data['format']!r}.")
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
            raise CorruptRecord(f"The local checkpoint's index is damaged: {error!r}.") from error


class CompleteStep(NamedTuple):
    """A step that the hosts have whole together.

    Attributes:
        step: of the training.
        on: what each host has of it, by its index; hosts that have nothing are not in it.
    """

    step: int
    on: dict[int, Local]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Of the state."""
        return self._any.leaves

    @property
    def writer(self) -> str:
        """The run that has written it."""
        return self._any.writer

    @property
    def data(self) -> list[Any]:
        """The positions of iterators, by host."""
        return self._any.data or []

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """If it was to be saved to the persistent tier as well; else None."""
        return self._any.metrics

    @property
    def _any(self) -> Local:
        return next(iter(self.on.values()))


def newest(on_hosts: Sequence[Sequence[Local]]) -> CompleteStep | None:
    """Return the newest step of which the hosts have every part; `on_hosts`: what each host has."""
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


def without(
    on_hosts: Sequence[Sequence[Local]],
    whole: CompleteStep,
    damaged: Collection[tuple[int, Region]],
) -> list[list[Local]]:
    """Return what each host has but for these regions of a step on these hosts."""

    def rest(host: int, local: Local) -> Local:
        if (local.step, local.writer) != (whole.step, whole.writer):
            return local
        return replace(
            local, pieces=tuple(p for p in local.pieces if (host, p.part) not in damaged)
        )

    return [[rest(host, local) for local in each] for host, each in enumerate(on_hosts)]


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
    """Whether two hosts describe different states; plain values may be each host's own."""
    return [(leaf.name, leaf.shape, leaf.dtype) for leaf in one] != [
        (leaf.name, leaf.shape, leaf.dtype) for leaf in other
    ]


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes; None if there is none, also of empty ones."""
    begin = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = [
        min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)
    ]
    shape = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return None if any(size <= 0 for size in shape) else (begin, shape)


def slices_of(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return where a box lies within another one."""
    return tuple(
        slice(start - offset, start - offset + size)
        for start, size, offset in zip(inner[0], inner[1], outer[0], strict=True)
    )


class Transfer(NamedTuple):
    """A piece that other hosts need.

    Attributes:
        source: the host that sends it.
        piece: of the source's file.
        needed_by: the hosts.
    """

    source: int
    piece: Piece
    needed_by: frozenset[int]


def transfers(
    whole: CompleteStep, needed: Sequence[Mapping[int, set[Box]]], hosts: int
) -> list[Transfer]:
    """Return the transfers that bring each host what it needs, in the same order on all hosts.

    Args:
        whole: what is where.
        needed: for each leaf, the boxes that each host needs; those under -1 every host.
        hosts: how many there are.
    """
    holders: dict[tuple[int, Box], dict[int, Piece]] = {}
    for host, local in sorted(whole.on.items()):
        for piece in local.pieces:
            holders.setdefault(piece.part, {}).setdefault(host, piece)
    sending: list[Transfer] = []
    for (leaf, part), having in sorted(holders.items()):
        for_all = needed[leaf].get(-1, set())
        wanting = frozenset(
            host
            for host in range(hosts)
            if host not in having
            and any(overlap(part, transfer) for transfer in needed[leaf].get(host, set()) | for_all)
        )
        if wanting:
            # Spread over those that have it.
            sources = sorted(having)
            source = sources[len(sending) % len(sources)]
            sending.append(Transfer(source, having[source], wanting))
    return sorted(sending, key=lambda transfer: (transfer.source, transfer.piece.offset))
