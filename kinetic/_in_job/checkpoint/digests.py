"""Digests of what is saved: the only module that imports xxhash.

In: arrays of bytes, JSON objects. Out: short texts, which differ if a bit does.

XXH3 finds damage, not forgery. It is quicker than copying, and lets other threads run meanwhile.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from kinetic.errors import CorruptRecord

_NAME = "digest"


def is_available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("xxhash") is not None


def digest_of(content: Any) -> str:
    """Return the digest of bytes, or of an array of bytes."""
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(content))


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of itself; as it is where the library is missing."""
    if not is_available():
        return dict(record)
    return {_NAME: digest_of(json.dumps(record).encode()), **record}


def check_signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object without its digest; one that has none is not checked.

    Raises:
        CorruptRecord: it is another one than was signed.
    """
    rest = {name: value for name, value in record.items() if name != _NAME}
    digest = record.get(_NAME)
    if digest is not None and is_available() and digest != digest_of(json.dumps(rest).encode()):
        raise CorruptRecord("its record is not what was written")
    return rest


class Digesting:
    """Digests in a thread of its own, so that contents can be copied meanwhile. They may change
    after `finish`."""

    def __init__(self) -> None:
        self._contents: SimpleQueue[Any] = SimpleQueue()
        self._digests: list[str] = []
        self._thread = threading.Thread(target=self._run, name="kinetic-digests", daemon=True)

    def add(self, content: Any) -> None:
        """Digest this, too."""
        self._contents.put(content)

    def finish(self) -> list[str]:
        """Return the digests, in the order of the contents."""
        self._contents.put(None)
        self._thread.join()
        return self._digests

    def __enter__(self) -> Digesting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _run(self) -> None:
        while (content := self._contents.get()) is not None:
            self._digests.append(digest_of(content))
