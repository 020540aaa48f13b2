"""Whether what the persistent tier gives back is what was saved: digests of all shards.

In: a state when it is saved, and its leaves when they are restored, on any devices. Out: digests by
leaf and region; the leaves that are not what they were.

The regions are those of the saving mesh. A host checks each of them that lies within its part of
today's arrays. Regions that no host has whole, since the state is cut otherwise now, are read once
more, by one of the hosts.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kinetic._in_job.checkpoint.digests import digest_of
from kinetic._in_job.checkpoint.pieces import Box, Region, overlap, slices_of
from kinetic._in_job.checkpoint.tree import Leaf, TreeState, parts_here
from kinetic._in_job.peers import Peers

Digests = dict[Region, set[str]]
"""Of the saving hosts; where they have differed, the region cannot be checked."""
_NARROW = ("int2", "int4", "uint2", "uint4", "float4", "float6")
"""Types of which not every bit in memory counts."""
_THREADS = 4


def digests_here(state: TreeState, process: int) -> list[list[Any]]:
    """Return the digests of this process's shards, as JSON: leaf, start, shape, digest. What lies
    on no devices the first process saves for all."""
    import jax

    if "proxy" in (jax.config.jax_platforms or ""):
        return []  # their content would have to come here from all machines
    parts = [
        (number, part)
        for number, value in state.arrays()
        if not state.leaves[number].is_empty and (process == 0 or hasattr(value, "sharding"))
        for part in parts_here(value)
    ]
    for _, part in parts:
        if hasattr(part.data, "copy_to_host_async"):
            part.data.copy_to_host_async()
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing does not hold the interpreter
        found = pool.map(_digest, (part.data for _, part in parts))
        return [[n, part.start, part.shape, d] for (n, part), d in zip(parts, found, strict=True)]


def _digest(content: Any) -> str:
    """The digest of an array's numbers, however they lie in memory."""
    import numpy as np

    array = np.asarray(content)
    if array.dtype.name.startswith(_NARROW):
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return digest_of(array.reshape(-1).view(np.uint8))


def merge_digests(said: Sequence[Sequence[Any]]) -> Digests:
    """Return what the files of all hosts say."""
    found: Digests = {}
    for leaf, start, shape, digest in said:
        found.setdefault((leaf, (tuple(start), tuple(shape))), set()).add(digest)
    return found


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
        said = [json.loads(zlib.decompress(each)) for each in self._peers.gather(packed)]
        digests = merge_digests([each for host in said for each in host])
        regions = sorted(region for region, those in digests.items() if len(those) == 1)
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
            elif _digest(content) not in digests[region]:
                wrong.add(region[0])
        for number, leaf in enumerate(self._saved):
            if not leaf.dtype and not _is_same(new[leaf.name][1], leaf.value):
                wrong.add(number)
        answers = [json.loads(each) for each in self._exchange(json.dumps([[*wrong], open_]))]
        wrong = {number for bad, _ in answers for number in bad}
        left = set.intersection(*(set(nobody) for _, nobody in answers))
        wrong |= self._differing_in_files(sorted(regions[number] for number in left), digests)
        return [self._saved[number].name for number in sorted(wrong)]

    def _differing_in_files(self, regions: Sequence[Region], digests: Digests) -> set[int]:
        """The leaves of which these regions differ; each is read by one of the hosts."""
        leaves = sorted({leaf for leaf, _ in regions})
        wrong = []
        for leaf in leaves[self._peers.index :: self._peers.count]:
            those = [box for number, box in regions if number == leaf]
            value = self._read_again(self._saved[leaf])
            whole = [] if value is None else [(((0,) * value.ndim, value.shape), value)]
            for box in those:
                content = cut_out(whole, box)
                if content is None or _digest(content) not in digests[leaf, box]:
                    wrong.append(leaf)
        if not leaves:
            return set()
        return {leaf for said in self._exchange(json.dumps(wrong)) for leaf in json.loads(said)}


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
