"""Which packs in the store a tree could use, found with few calls.

In: a bundle, a store. Out: indexes of packs, possibly fewer than the store has. No sweep takes
these packs before a plan names the tree.

A note in the user's cache says as what a tree was sent last. The next submission checks that the
store still has the record of that, which vouches for its packs. Without a note (another machine, a
removed cache, a record that a host found broken) it lists the indexes in the store and reads some
of them. A damaged cache is treated as absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic._core import layout
from kinetic._source import cache, packs
from kinetic._source.packs import Contents, Index
from kinetic._store.base import Store
from kinetic._store.many import get_many, renew_many
from kinetic.errors import CorruptRecord, NotFound

if TYPE_CHECKING:
    from kinetic._source.bundle import Bundle

_log = logging.getLogger("kinetic.packaging")

_MOST_LEARNED = 100
_DIGEST_BYTES = 64


def choose_packs(bundle: Bundle, store: Store, needed: Mapping[str, int]) -> list[Index]:
    """Return packs in the store from which a tree takes contents; `needed` has their sizes."""
    digest, noted = _read_note(_note(bundle, store))
    if digest and store.renew(layout.tree(digest)):  # What it names stays as long as it does.
        with suppress(NotFound, CorruptRecord):
            vouched = Contents.from_json(store.get(layout.tree(digest))).packs
            return packs.choose(needed, [index for index in noted if index.name in vouched])
    keys = list(islice(store.list(layout.PACK_INDEXES), _MOST_LEARNED))
    found = packs.choose(needed, _parse_sound(get_many(store, keys)))
    there = renew_many(store, [layout.pack(index.name) for index in found])
    return [index for index in found if layout.pack(index.name) in there]


def remember(bundle: Bundle, store: Store, indexes: Iterable[Index]) -> None:
    """Note how the tree was sent; failure to do so is ignored."""
    content = bundle.tree.manifest.digest.encode() + b"".join(index.data for index in indexes)
    note = _note(bundle, store)
    if note is not None:
        try:
            cache.write(note, content)
        except OSError as error:
            _log.debug("what was sent could not be remembered in %s: %s", note, error)


def _note(bundle: Bundle, store: Store) -> Path | None:
    return None if bundle.note is None else cache.note_of_sent(bundle.note, store.uri)


def _read_note(note: Path | None) -> tuple[str, list[Index]]:
    """Return the digest of the tree that was sent last, "" for none, and its packs."""
    if note is None:
        return "", []
    try:
        content = cache.read(note)
        return content[:_DIGEST_BYTES].decode(), [*packs.parse_many(content[_DIGEST_BYTES:])]
    except (OSError, ValueError, CorruptRecord):
        return "", []


def _parse_sound(stored: Mapping[str, bytes]) -> Iterator[Index]:
    """Yield the indexes that are not damaged."""
    for key, data in stored.items():
        with suppress(CorruptRecord):
            index = packs.parse(data)
            if layout.pack_index(index.name) == key:
                yield index
