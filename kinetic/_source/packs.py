"""Packs: many small contents in one object, so that a tree is few objects and few calls.

In: contents by digest. Out: packs; from a pack's index, where each content lies in it.

A pack is its index, then its contents one after the other. The index is also an object of its own,
which tells a submission what need not be sent. A pack is named by its index's SHA-256, and each
content is verified by its own digest, so the whole pack is.

    index       magic, number of members, then for each member
                its SHA-256, its length in the pack, and whether it is deflated

Lists of folders are deflated, because half of a list is hexadecimal digests. Files are stored as
is.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

SMALL_BYTES = 256 << 10
"""Larger files are objects of their own."""
PACK_BYTES = 16 << 20
"""A pack takes contents until it reaches this size."""
MOST_LIST_BYTES = 2 << 20
"""A list of a folder has at most 64 entries; longer ones are split (`manifest`)."""
_MOST_PARTIAL = 6
_SCHEMA = 1
_MAGIC = b"KNPACK1\n"
_HEAD = struct.Struct(">8sI")
_ROW = struct.Struct(">32sIB")
HEAD_BYTES = _HEAD.size


class Span(NamedTuple):
    """Where a content lies in its pack."""

    offset: int
    stored_bytes: int
    deflated: bool


@dataclass(frozen=True)
class Index:
    """What a pack holds.

    Attributes:
        name: of the pack: the SHA-256 of the index.
        data: the index as it is stored.
        spans: where each content lies, by its digest.
    """

    name: str
    data: bytes
    spans: Mapping[str, Span]


@dataclass(frozen=True)
class Contents:
    """Where everything in a tree lies.

    Attributes:
        packs: names of packs.
        blobs: digests of the files that are objects of their own.
    """

    packs: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the record of a tree."""
        document = {"schema": _SCHEMA, "packs": self.packs, "blobs": self.blobs}
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Contents:
        """Read the record of a tree.

        Raises:
            CorruptRecord: it is damaged, or written by another version.
        """
        try:
            document = json.loads(data)
            if document["schema"] != _SCHEMA:
                raise ValueError(f"it has schema {document['schema']!r}, not {_SCHEMA}")
            return cls(_names(document["packs"]), _names(document["blobs"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CorruptRecord(f"The record of the source tree is damaged: {error}.") from error


def _names(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(
        isinstance(each, str) and len(each) == 64 and each.isalnum() for each in found
    ):
        raise ValueError(f"{found!r} is not a list of digests")
    return tuple(found)


def build(files: Mapping[str, bytes], lists: Mapping[str, bytes]) -> tuple[Index, list[bytes]]:
    """Return the index of a pack with these contents, and the parts that follow it in the pack."""
    deflated = {digest: zlib.compress(data) for digest, data in lists.items()}
    members = [(digest, data, 0) for digest, data in files.items() if digest not in deflated]
    members += [(digest, data, 1) for digest, data in deflated.items()]
    rows = [_ROW.pack(bytes.fromhex(digest), len(data), flag) for digest, data, flag in members]
    index = parse(_HEAD.pack(_MAGIC, len(members)) + b"".join(rows))
    return index, [data for _, data, _ in members]


def index_bytes(head: bytes) -> int:
    """Return the length of the index that begins with these `HEAD_BYTES` bytes.

    Raises:
        CorruptRecord: they do not begin an index.
    """
    try:
        magic, count = _HEAD.unpack(head)
    except struct.error:
        magic, count = b"", 0
    if magic != _MAGIC:
        raise CorruptRecord("The index of a pack is damaged.")
    return _HEAD.size + int(count) * _ROW.size


def parse(data: bytes) -> Index:
    """Read an index.

    Raises:
        CorruptRecord: it is damaged.
    """
    if len(data) != index_bytes(data[:HEAD_BYTES]):
        raise CorruptRecord("The index of a pack is damaged: it is cut off.")
    rows = _ROW.iter_unpack(data[HEAD_BYTES:])
    digests, sizes, flags = zip(*rows, strict=True) if len(data) > HEAD_BYTES else ((), (), ())
    places = zip(accumulate(sizes, initial=len(data)), sizes, map(bool, flags))  # noqa: B905 - one place more: the end
    spans = dict(zip(map(bytes.hex, digests), map(Span._make, places), strict=True))
    return Index(hashlib.sha256(data).hexdigest(), data, spans)


def parse_many(data: bytes) -> Iterator[Index]:
    """Read indexes that follow one another.

    Raises:
        CorruptRecord: one of them is damaged.
    """
    while data:
        size = index_bytes(data[:HEAD_BYTES])
        yield parse(data[:size])
        data = data[size:]


def inflate_list(data: bytes) -> bytes:
    """Return a list that is stored deflated; "" if it is damaged, or larger than any list."""
    inflating = zlib.decompressobj()
    try:
        found = inflating.decompress(data, MOST_LIST_BYTES)
    except zlib.error:
        return b""
    return found if inflating.eof and not inflating.unused_data else b""


def choose(needed: Mapping[str, int], there: Iterable[Index]) -> list[Index]:
    """Return the packs from which a tree takes contents that need not be sent again.

    A host fetches every pack of a tree, whole, in one call each. So a tree uses few packs, and none
    that is less than half useful to it; the rest goes into the pack that is sent. Over time this
    merges the packs of single changes.

    Args:
        needed: sizes of what the tree needs, by digest.
        there: the packs that the store has.
    """
    most = _MOST_PARTIAL + sum(needed.values()) // PACK_BYTES
    left = set(needed)
    open_to_choice = [each for each in there if not left.isdisjoint(each.spans)]
    chosen: list[Index] = []
    while open_to_choice and len(chosen) < most:
        weights = {each.name: _weight(each, left) for each in open_to_choice}
        best = max(open_to_choice, key=lambda each: (weights[each.name], each.name))
        open_to_choice.remove(best)
        if (use := weights[best.name]) and 2 * use >= _weight(best, best.spans):
            chosen.append(best)
            left -= best.spans.keys()
    return chosen


def _weight(pack: Index, wanted: Collection[str]) -> int:
    """The cost of sending the wanted members of a pack; an empty one counts its row in the
    index."""
    sizes = [span.stored_bytes for digest, span in pack.spans.items() if digest in wanted]
    return _ROW.size * len(sizes) + sum(sizes)


def groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Distribute contents to packs, in order."""
    packs: list[list[str]] = [[]]
    filled = 0
    for digest, size_bytes in sizes.items():
        if filled + size_bytes > PACK_BYTES and packs[-1]:
            packs.append([])
            filled = 0
        packs[-1].append(digest)
        filled += size_bytes
    return packs


def locate_contents(needed: Collection[str], packs: Sequence[Index]) -> Contents:
    """Return where these contents lie; some of the packs may not be needed."""
    used = [pack for pack in packs if not pack.spans.keys().isdisjoint(needed)]
    packed = {digest for pack in used for digest in pack.spans}
    return Contents(
        tuple(dict.fromkeys(pack.name for pack in used)), tuple(sorted(set(needed) - packed))
    )
