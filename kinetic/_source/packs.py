"""Packs: many small files in one object, so that a tree needs few objects and few calls.

In: contents by digest. Out: packs; the position of each content in a pack, from its index; the
record of a tree, which locates all its contents.

A tree is stored as a base and deltas. The base is a tree that was sent completely: packs with its
small files and its list. Later changes are stored in the tree's record (rows of the list) and in a
few further packs, the deltas (contents). Larger files are separate objects.

A pack is its index followed by its contents. Its name is the SHA-256 of its index; since the index
has the digest of each content, the name verifies the whole pack.

    index       magic, number of members, then for each member its SHA-256 and its length
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from itertools import accumulate

from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord

SMALL_BYTES = 256 << 10
"""Size in bytes above which a file is a separate object."""
PACK_BYTES = 16 << 20
"""Largest size of a pack's contents, in bytes. A larger content is alone in its pack."""
MOST_LIST_BYTES = 1 << 30
_SCHEMA = 2
_MAGIC = b"KNPACK2\n"
_HEAD = struct.Struct(">8sI")
_ROW = struct.Struct(">32sI")
HEAD_BYTES = _HEAD.size


@dataclass(frozen=True)
class Index:
    """The list of a pack's contents.

    Attributes:
        name: name of the pack: the SHA-256 of the index.
        data: the index as it is stored.
        spans: offset and length of each content, by its digest.
    """

    name: str
    data: bytes
    spans: Mapping[str, tuple[int, int]]


def build(contents: Mapping[str, bytes]) -> Index:
    """Return the index of a pack whose contents follow it in this order."""
    rows = [_ROW.pack(bytes.fromhex(digest), len(data)) for digest, data in contents.items()]
    return parse(_HEAD.pack(_MAGIC, len(rows)) + b"".join(rows))


def index_bytes(head: bytes) -> int:
    """Return the length of an index from its first `HEAD_BYTES` bytes.

    Raises:
        CorruptRecord: the bytes are not the head of an index.
    """
    try:
        magic, count = _HEAD.unpack(head)
    except struct.error:
        magic, count = b"", 0
    if magic != _MAGIC:
        raise CorruptRecord("An archive of the job's files is damaged.")
    return _HEAD.size + int(count) * _ROW.size


def parse(data: bytes) -> Index:
    """Parse an index.

    Raises:
        CorruptRecord: it is damaged.
    """
    if len(data) != index_bytes(data[:HEAD_BYTES]):
        raise CorruptRecord("An archive of the job's files is cut off.")
    rows = list(_ROW.iter_unpack(data[HEAD_BYTES:]))
    offsets = accumulate((size for _, size in rows), initial=len(data))
    spans = {digest.hex(): (offset, size) for (digest, size), offset in zip(rows, offsets)}  # noqa: B905 - the last offset is the end
    return Index(hashlib.sha256(data).hexdigest(), data, spans)


def groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Distribute contents to packs, in order. Return each pack's digests, for at least one."""
    packs: list[list[str]] = [[]]
    filled_bytes = 0
    for digest, size_bytes in sizes.items():
        if filled_bytes + size_bytes > PACK_BYTES and packs[-1]:
            packs.append([])
            filled_bytes = 0
        packs[-1].append(digest)
        filled_bytes += size_bytes
    return packs


def deflate_list(data: bytes) -> bytes:
    """Compress a tree's list for a pack."""
    return zlib.compress(data, 1)


def inflate_list(data: bytes) -> bytes:
    """Decompress a list from a pack.

    Raises:
        CorruptRecord: it is damaged, or larger than any list.
    """
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, MOST_LIST_BYTES)
    except zlib.error as error:
        raise CorruptRecord("The stored list of the job's files is damaged.") from error
    if not inflating.eof or inflating.unused_data:
        raise CorruptRecord("The stored list of the job's files is damaged.")
    return text


@dataclass(frozen=True)
class TreeRecord:
    """The locations of all contents of a tree: those of an earlier tree, its base, and the
    differences from it.

    Attributes:
        packs: names of all packs: those of the base, and the deltas.
        blobs: digests of the files that are separate objects.
        base_list: digest of the base's compressed list in one of the packs.
        removed: paths of the base that the tree does not have.
        changed: rows of the tree's list that the base's list does not have.
    """

    packs: tuple[str, ...]
    blobs: tuple[str, ...]
    base_list: str
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the record as it is stored."""
        document = {"schema": _SCHEMA} | vars(self)
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TreeRecord:
        """Read the record of a tree.

        Raises:
            CorruptRecord: it is damaged, or written by another version.
        """
        try:
            document = json.loads(data)
            if document["schema"] != _SCHEMA:
                raise CorruptRecord(
                    "The stored index of the job's files was written by another version of kinetic."
                )
            texts: dict[str, tuple[str, ...]] = {}
            for name in _TEXTS:
                value = document[name]
                if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                    raise ValueError(f"its field {name!r} is {value!r}, not a list of texts")
                texts[name] = tuple(value)
            (base_list,) = _check_digests((document["base_list"],))
            packs, blobs = _check_digests(texts["packs"]), _check_digests(texts["blobs"])
            return cls(packs, blobs, base_list, texts["removed"], texts["changed"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"it has no field {error}" if isinstance(error, KeyError) else error
            raise CorruptRecord(
                f"The stored index of the job's files is damaged: {why}."
            ) from error


_TEXTS = ("packs", "blobs", "removed", "changed")


def _check_digests(texts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(len(text) == 64 and text.isalnum() for text in texts):
        raise ValueError(f"{texts!r} are not digests")
    return texts
