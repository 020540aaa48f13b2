"""Digests of all shards in the persistent tier: made when a state is saved, compared when it is
restored on any devices.

Each shard is digested by the process that has its first replica, in the background, from the copy
in the host's memory that Orbax writes as well. The regions are those of the saving mesh: a host
checks each of them that lies within its part of today's arrays. Regions that no host has whole,
since the state is cut otherwise now, are read once more, by one of the hosts.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kinetic._in_job.checkpoint.digests import digest_of
from kinetic._in_job.checkpoint.pieces import Box, Region, overlap, slices_of
from kinetic._in_job.checkpoint.tree import Leaf, TreeState, parts_here
from kinetic._in_job.checkpoint.tree import box as box_of
from kinetic._in_job.peers import Peers

_NARROW = ("int2", "int4", "uint2", "uint4", "float4", "float6")
"""Types of which not every bit in memory counts."""


class ShardDigests:
    """The digests of the shards of which this process has the first replica.

    Args:
        state: that is saved.
        process: this one. What lies on no devices the first process saves for all.
    """

    def __init__(self, state: TreeState, process: int) -> None:
        import jax

        self._rows: list[list[Any]] = []
        self._shards: list[tuple[int, tuple[int, ...], Any, Any]] = []
        if "proxy" in (jax.config.jax_platforms or ""):
            return  # Their content would have to come here from all machines.
        for number, value in state.arrays():
            if state.leaves[number].is_empty:
                continue
            if hasattr(value, "sharding"):
                self._shards += [
                    (number, value.shape, shard.index, shard.data)
                    for shard in value.addressable_shards
                    if shard.replica_id == 0
                ]
            elif process == 0:  # Now: the function may change it in place.
                (part,) = parts_here(value)
                self._rows.append([number, part.start, part.shape, _digest(part.data)])

    def fetch(self) -> None:
        """Keep the copies in the host's memory, which JAX makes once for all who ask: the devices'
        memory may be used for something else after this."""
        import numpy as np

        for *_, data in self._shards:
            data.copy_to_host_async()
        self._shards = [(*shard, np.asarray(data)) for *shard, data in self._shards]

    def compute(self) -> list[list[Any]]:
        """Return the digests, as JSON: leaf, start, shape, digest. Called in the background."""
        while self._shards:
            leaf, shape, index, data = self._shards.pop()
            self._rows.append([leaf, *box_of(index, shape), _digest(data)])
        return self._rows


def _digest(content: Any) -> str:
    """The digest of an array's numbers, however they lie in memory."""
    import numpy as np

    array = np.asarray(content)
    if array.dtype.name.startswith(_NARROW):
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return digest_of(array.reshape(-1).view(np.uint8))


class Verification:
    """Compares a step with its digests; collective.

    Args:
        peers: the hosts.
        exchange: gives each host's text to all.
        saved: the leaves, as they were saved.
        read_again: reads a leaf as it was saved; None if that is not possible.
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
        """Return the names of leaves that are not what was saved.

        Args:
            own: a share of the digests, such that all hosts together have them all.
            now: the state as it is laid out today.
            values: its restored leaves.
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
        open_: list[int] = []
        parts: dict[int, list[tuple[Box, Any]]] = {}
        for number, region in enumerate(regions):
            saved = self._saved[region[0]]
            _, value = new[saved.name]
            content = None
            if value.dtype.name == saved.dtype:
                if region[0] not in parts:
                    parts = {region[0]: [((p.start, p.shape), p.data) for p in parts_here(value)]}
                content = cut_out(parts[region[0]], region[1])
            if content is None:
                open_.append(number)
            elif _digest(content) != digests[region]:
                wrong.add(region[0])
        for number, leaf in enumerate(self._saved):
            if not leaf.dtype and not _is_same(new[leaf.name][1], leaf.value):
                wrong.add(number)
        answers = [json.loads(each) for each in self._exchange(json.dumps([[*wrong], open_]))]
        wrong = {number for bad, _ in answers for number in bad}
        unread = set.intersection(*(set(nobody) for _, nobody in answers))
        wrong |= self._differing_in_files(sorted(regions[number] for number in unread), digests)
        return [self._saved[number].name for number in sorted(wrong)]

    def _differing_in_files(
        self, regions: Sequence[Region], digests: Mapping[Region, str]
    ) -> set[int]:
        """The leaves of which these regions differ; each is read by one of the hosts."""
        leaves = sorted({leaf for leaf, _ in regions})
        wrong = []
        for leaf in leaves[self._peers.index :: self._peers.count]:
            those = [box for number, box in regions if number == leaf]
            value = self._read_again(self._saved[leaf])
            whole = [] if value is None else [(((0,) * value.ndim, value.shape), value)]
            for box in those:
                content = cut_out(whole, box)
                if content is None or _digest(content) != digests[leaf, box]:
                    wrong.append(leaf)
        if not leaves:
            return set()
        return {leaf for text in self._exchange(json.dumps(wrong)) for leaf in json.loads(text)}


def cut_out(parts: Sequence[tuple[Box, Any]], wanted: Box) -> Any:
    """Return the content of a box that lies within these parts, each of other numbers than the
    others; None if it does not."""
    import numpy as np

    for box, data in parts:
        if box == wanted:
            return data
    common = [(box, data, both) for box, data in parts if (both := overlap(box, wanted))]
    if not common or sum(math.prod(both[1]) for _, _, both in common) < math.prod(wanted[1]):
        return None
    result = np.empty(wanted[1], common[0][1].dtype)
    for box, data, both in common:
        result[slices_of(both, wanted)] = np.asarray(data)[slices_of(both, box)]
    return result


def _is_same(one: Any, other: Any) -> bool:
    import numpy as np

    return bool(np.array_equal(one, other, equal_nan=isinstance(other, float)))
