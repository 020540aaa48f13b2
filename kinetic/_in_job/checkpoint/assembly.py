"""Restore a state from the pieces in the hosts' local tiers.

A piece is a part of one array, stored on one host. The result has the layout of the current state,
whatever layout was saved. If any piece is damaged, the caller must discard the result.
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
    locate_box,
    overlap,
    plan_transfers,
)
from kinetic._in_job.checkpoint.tree import Leaf, TreeState, list_boxes, make_box
from kinetic._in_job.peers import Peers
from kinetic.errors import CheckpointError

_ROOM_BYTES = 1 << 24
"""Largest broadcast in bytes. Every device holds its data until it has ended."""
_LEAST_ROOM = 1 << 12


class LocalRestore:
    """Assembles one step from all hosts' pieces. All hosts must call it together.

    Args:
        tier: This host's local tier.
        peers: The hosts.
        whole: The step, with the pieces that each host has.

    Attributes:
        received_from: Hosts that have sent a piece to this one.
        damaged: Why pieces that this host has read are damaged, by (host, part).
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
        """Exchange pieces between the hosts, so that each has what `state` needs in its current
        layout."""
        needed: list[Mapping[int, set[Box]]] = [{} for _ in self._whole.leaves]
        for number, value in state.arrays():
            needed[self._numbers[state.leaves[number].name]] = list_boxes(value)
        for transfer in plan_transfers(self._whole, needed, self._peers.count):
            self._send_piece(transfer)

    def _send_piece(self, transfer: Transfer) -> None:
        import numpy as np

        source, piece, needed_by = transfer
        is_source, is_needed = self._peers.index == source, self._peers.index in needed_by
        content = (
            self._read_piece(piece)
            if is_source
            else np.empty(piece.size_bytes if is_needed else 0, np.uint8)
        )
        for start in range(0, piece.size_bytes, _ROOM_BYTES):
            size = min(_ROOM_BYTES, piece.size_bytes - start)
            # Round up to a power of two: JAX compiles the broadcast once for each size.
            room = np.zeros(max(1 << (size - 1).bit_length(), _LEAST_ROOM), np.uint8)
            if is_source:
                room[:size] = content[start : start + size]
            received = self._peers.broadcast(room, source)
            if is_needed:
                content[start : start + size] = received[:size]
        if is_needed:
            self.received_from.add(source)
            self._content[piece.part] = content
            if not self._tier.is_copy(piece, content):
                self.damaged[source, piece.part] = (
                    f"a part of step {self._whole.step} from host {source} differs from what was "
                    "saved."
                )

    def _read_piece(self, piece: Piece) -> Any:
        """Read a piece of this host. If the piece is damaged, record that and return zeros: the
        broadcast must take place nevertheless, because other hosts wait for it."""
        import numpy as np

        assert self._own is not None
        try:
            return self._tier.read(self._own, piece)
        except CheckpointError as error:
            self.damaged[self._peers.index, piece.part] = str(error)
            return np.zeros(piece.size_bytes, np.uint8)

    def value(self, leaf: Leaf, like: Any) -> Any:
        """Return the saved content of a leaf, with the layout and dtype of `like`."""
        import jax

        number = self._numbers[leaf.name]
        saved = self._whole.leaves[number]
        if not leaf.dtype:
            return (self._own or self._whole).leaves[number].value
        if getattr(like, "sharding", None) is None:
            content = self._fill_box(number, saved, ((0,) * len(saved.shape), saved.shape))
            return content.astype(like.dtype, copy=False)

        def make_part(index: tuple[slice, ...]) -> Any:
            content = self._fill_box(number, saved, make_box(index, saved.shape))
            return content.astype(like.dtype, copy=False)

        return jax.make_array_from_callback(saved.shape, like.sharding, make_part)

    def _fill_box(self, number: int, saved: Leaf, wanted: Box) -> Any:
        """Return the box `wanted` of leaf `number`, assembled from pieces in new memory."""
        import numpy as np

        dtype = np.dtype(saved.dtype)
        result = np.empty(wanted[1], dtype)
        for (leaf, part), content in self._list_pieces(number):
            common = overlap(part, wanted)
            if leaf != number or common is None:
                continue
            raw = content() if callable(content) else content
            array = raw.view(dtype).reshape(part[1])
            result[locate_box(common, wanted)] = array[locate_box(common, part)]
        return result

    def _list_pieces(self, number: int) -> list[tuple[Region, Any]]:
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
