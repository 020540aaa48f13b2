"""Digests of all shards in the persistent tier: computed when a state is saved, checked when it is
restored on any devices.

The process with the first replica of a shard digests it in the background, from the copy in the
host's memory that Orbax writes as well. So each digest is for a region of the mesh at the time of
the save. A host checks the regions that lie within its part of the current arrays. The other
regions, which no host has as a whole, are read a second time by one host.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinetic._in_job.checkpoint.digests import digest_of
from kinetic._in_job.checkpoint.pieces import Box, Region, locate_box, overlap
from kinetic._in_job.checkpoint.tree import Leaf, TreeState, list_parts, make_box
from kinetic._in_job.peers import Peers

_NARROW = ("int2", "int4", "uint2", "uint4", "float4", "float6")
"""Prefixes of types that do not use all bits of their memory."""


class ShardDigests:
    """The digests of the shards of which this process has the first replica.

    Args:
        state: The state being saved.
        process: Index of this process. Process 0 also digests arrays that are on no device.
    """

    def __init__(self, state: TreeState, process: int) -> None:
        import jax

        self._rows: list[list[Any]] = []
        self._shards: list[tuple[int, tuple[int, ...], Any, Any]] = []
        if "proxy" in (jax.config.jax_platforms or ""):
            return  # The content of all machines' shards would have to come to this process.
        for number, value in state.arrays():
            if state.leaves[number].is_empty:
                continue
            if hasattr(value, "sharding"):
                self._shards += [
                    (number, value.shape, shard.index, shard.data)
                    for shard in value.addressable_shards
                    if shard.replica_id == 0
                ]
            elif process == 0:  # Digest at once: the function may change the array in place.
                (part,) = list_parts(value)
                self._rows.append([number, part.start, part.shape, _digest(part.data)])

    def fetch(self) -> None:
        """Copy the shards to the host's memory. JAX shares the copy with Orbax. Afterwards the
        shards on the devices may be freed."""
        import numpy as np

        for *_, data in self._shards:
            data.copy_to_host_async()
        self._shards = [(*shard, np.asarray(data)) for *shard, data in self._shards]

    def compute(self) -> list[list[Any]]:
        """Return the digests as JSON rows of leaf, start, shape and digest. Runs in a thread."""
        while self._shards:
            leaf, shape, index, data = self._shards.pop()
            self._rows.append([leaf, *make_box(index, shape), _digest(data)])
        return self._rows


def _digest(content: Any) -> str:
    """Return the digest of an array's numbers, which does not depend on their layout in memory."""
    import numpy as np

    array = np.asarray(content)
    if array.dtype.name.startswith(_NARROW):
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return digest_of(array.reshape(-1).view(np.uint8))


class Verification:
    """Compares a step with its digests. All hosts must call it together.

    Args:
        peers: The hosts.
        exchange: Sends a text to all hosts and returns the texts of all, by host.
        saved: Leaves as they were saved.
        read_again: Reads a leaf in its saved form; returns None if that fails.
    """

    def __init__(
        self,
        peers: Peers,
        exchange: Callable[[str], list[str]],
        saved: Sequence[Leaf],
        read_again: Callable[[Leaf], Any],
    ) -> None:
        self._peers = peers
        self._exchange = exchange
        self._saved = saved
        self._read_again = read_again

    def find_differing(
        self, own: Sequence[Any], now: TreeState, values: Sequence[Any]
    ) -> list[str]:
        """Return the names of leaves that differ from what was saved.

        Args:
            own: This host's share of the digests; all hosts together have all of them.
            now: The state in its current layout.
            values: Its restored leaves.
        """
        packed = zlib.compress(json.dumps(own).encode(), 1)
        shares = [json.loads(zlib.decompress(share)) for share in self._peers.gather(packed)]
        digests = {
            (leaf, (tuple(start), tuple(shape))): digest
            for share in shares
            for leaf, start, shape, digest in share
        }
        regions = sorted(digests)
        new = {leaf.name: (leaf, value) for leaf, value in zip(now.leaves, values, strict=True)}
        wrong: set[int] = set()
        unchecked: list[int] = []
        parts: dict[int, list[tuple[Box, Any]]] = {}
        for number, region in enumerate(regions):
            saved = self._saved[region[0]]
            _, value = new[saved.name]
            content = None
            if value.dtype.name == saved.dtype:
                if region[0] not in parts:
                    parts = {region[0]: [((p.start, p.shape), p.data) for p in list_parts(value)]}
                content = cut_out(parts[region[0]], region[1])
            if content is None:
                unchecked.append(number)
            elif _digest(content) != digests[region]:
                wrong.add(region[0])
        for number, leaf in enumerate(self._saved):
            if not leaf.dtype and not _is_same(new[leaf.name][1], leaf.value):
                wrong.add(number)
        answers = [json.loads(text) for text in self._exchange(json.dumps([[*wrong], unchecked]))]
        wrong = {number for bad, _ in answers for number in bad}
        unread = set.intersection(*(set(open_) for _, open_ in answers))
        wrong |= self._check_files(sorted(regions[number] for number in unread), digests)
        return [self._saved[number].name for number in sorted(wrong)]

    def _check_files(self, regions: Sequence[Region], digests: Mapping[Region, str]) -> set[int]:
        """Return the leaves whose content in these regions differs. One host reads each leaf."""
        leaves = sorted({leaf for leaf, _ in regions})
        wrong = []
        for leaf in leaves[self._peers.index :: self._peers.count]:
            boxes = [box for number, box in regions if number == leaf]
            value = self._read_again(self._saved[leaf])
            whole = [] if value is None else [(((0,) * value.ndim, value.shape), value)]
            for box in boxes:
                content = cut_out(whole, box)
                if content is None or _digest(content) != digests[leaf, box]:
                    wrong.append(leaf)
        if not leaves:
            return set()
        return {leaf for text in self._exchange(json.dumps(wrong)) for leaf in json.loads(text)}


def cut_out(parts: Sequence[tuple[Box, Any]], wanted: Box) -> Any:
    """Return the content of the box `wanted`, cut out of parts that do not overlap; None if the
    parts do not cover the box."""
    import numpy as np

    for box, data in parts:
        if box == wanted:
            return data
    common = [(box, data, both) for box, data in parts if (both := overlap(box, wanted))]
    if not common or sum(math.prod(both[1]) for _, _, both in common) < math.prod(wanted[1]):
        return None
    result = np.empty(wanted[1], common[0][1].dtype)
    for box, data, both in common:
        result[locate_box(both, wanted)] = np.asarray(data)[locate_box(both, box)]
    return result


def _is_same(one: Any, other: Any) -> bool:
    import numpy as np

    return bool(np.array_equal(one, other, equal_nan=isinstance(other, float)))
