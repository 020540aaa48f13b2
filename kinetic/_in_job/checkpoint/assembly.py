"""A state made from the pieces that hosts have in their local tiers.

In: a whole step, the state of today as a pattern. Out: the same state with the saved content, laid
out as today's; which pieces are damaged: then that state is worth nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kinetic._in_job.checkpoint.local_tier import LocalTier
from kinetic._in_job.checkpoint.pieces import (
    Box,
    CompleteStep,
    Piece,
    Region,
    Transfer,
    overlap,
    slices_of,
    transfers,
)
from kinetic._in_job.checkpoint.tree import Leaf, TreeState, box, boxes_of
from kinetic._in_job.peers import Peers
from kinetic.errors import CheckpointError

_ROOM_BYTES = 1 << 24
"""How much is sent at a time: it lies on every device for a moment."""
_LEAST_ROOM = 1 << 12


class LocalRestore:
    """Puts a step together; collective.

    Args:
        tier: of this host.
        peers: the hosts.
        whole: what they have.

    Attributes:
        received_from: the hosts that have sent something to this one.
        damaged: pieces that are not what was saved, as far as this host has seen, by the host that
            has them; and why.
    """

    def __init__(self, tier: LocalTier, peers: Peers, whole: CompleteStep) -> None:
        self._tier = tier
        self._peers = peers
        self._whole = whole
        self._own = whole.on.get(peers.index)
        self._numbers = {leaf.name: number for number, leaf in enumerate(whole.leaves)}
        self._content: dict[Region, Any] = {}
        self.received_from: set[int] = set()
        self.damaged: dict[tuple[int, Region], str] = {}

    def fetch(self, state: TreeState) -> None:
        """Bring here what today's layout needs on this host and other hosts have."""
        needed: list[Mapping[int, set[Box]]] = [{} for _ in self._whole.leaves]
        for number, value in state.arrays():
            needed[self._numbers[state.leaves[number].name]] = boxes_of(value)
        for transfer in transfers(self._whole, needed, self._peers.count):
            self._carry_out(transfer)

    def _carry_out(self, transfer: Transfer) -> None:
        import numpy as np

        source, piece, needed_by = transfer
        mine, wanted = self._peers.index == source, self._peers.index in needed_by
        content = (
            self._read_piece(piece)
            if mine
            else np.empty(piece.size_bytes if wanted else 0, np.uint8)
        )
        for start in range(0, piece.size_bytes, _ROOM_BYTES):
            size = min(_ROOM_BYTES, piece.size_bytes - start)
            # Few different sizes: each is compiled once.
            room = np.zeros(max(1 << (size - 1).bit_length(), _LEAST_ROOM), np.uint8)
            if mine:
                room[:size] = content[start : start + size]
            sent = self._peers.broadcast(room, source)
            if wanted:
                content[start : start + size] = sent[:size]
        if wanted:
            self.received_from.add(source)
            self._content[piece.part] = content
            if not self._tier.is_copy(piece, content):
                self.damaged[source, piece.part] = (
                    f"what host {source} has sent of step {self._whole.step} is not what was saved."
                )

    def _read_piece(self, piece: Piece) -> Any:
        """The content of a piece of this host; anything, once it is known to be damaged: other
        hosts wait for it, and nobody uses what comes of it."""
        import numpy as np

        assert self._own is not None
        try:
            return self._tier.read(self._own, piece)
        except CheckpointError as error:
            self.damaged[self._peers.index, piece.part] = str(error)
            return np.zeros(piece.size_bytes, np.uint8)

    def value(self, leaf: Leaf, like: Any) -> Any:
        """Return the saved content of a leaf, as `like` is laid out; an array's type is that of
        `like`."""
        import jax

        number = self._numbers[leaf.name]
        saved = self._whole.leaves[number]
        if not leaf.dtype:
            return (self._own or self._whole).leaves[number].value
        if getattr(like, "sharding", None) is None:
            content = self._box(number, saved, ((0,) * len(saved.shape), saved.shape))
            return content.astype(like.dtype, copy=False)

        def part(index: tuple[slice, ...]) -> Any:
            content = self._box(number, saved, box(index, saved.shape))
            return content.astype(like.dtype, copy=False)

        return jax.make_array_from_callback(saved.shape, like.sharding, part)

    def _box(self, number: int, saved: Leaf, wanted: Box) -> Any:
        """The content of a part of a leaf, in memory of its own."""
        import numpy as np

        dtype = np.dtype(saved.dtype)
        result = np.empty(wanted[1], dtype)
        for (leaf, part), content in self._pieces(number):
            common = overlap(part, wanted)
            if leaf != number or common is None:
                continue
            raw = content() if callable(content) else content
            array = raw.view(dtype).reshape(part[1])
            result[slices_of(common, wanted)] = array[slices_of(common, part)]
        return result

    def _pieces(self, number: int) -> list[tuple[Region, Any]]:
        pieces: list[tuple[Region, Any]] = [
            (part, content) for part, content in self._content.items() if part[0] == number
        ]
        if self._own is not None:
            pieces += [
                (piece.part, functools.partial(self._read_piece, piece))
                for piece in self._own.pieces
                if piece.leaf == number
            ]
        return pieces
