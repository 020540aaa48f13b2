"""Digests of checkpoints: the only module that imports xxhash.

XXH3 detects damage, not forgery. It is faster than a copy and releases the GIL.
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
    """True if xxhash is installed."""
    return importlib.util.find_spec("xxhash") is not None


def digest_of(content: Any) -> str:
    """Return the hex digest of bytes, or of an array of bytes."""
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(content))


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its digest as a field; the same object if xxhash is missing."""
    if not is_available():
        return dict(record)
    return {_NAME: digest_of(json.dumps(record).encode()), **record}


def check_signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Check a JSON object against the digest in it, if any; return it without the digest.

    Raises:
        CorruptRecord: The object is not the one that was signed.
    """
    rest = {name: value for name, value in record.items() if name != _NAME}
    digest = record.get(_NAME)
    if digest is not None and is_available() and digest != digest_of(json.dumps(rest).encode()):
        raise CorruptRecord("its metadata differs from what was written")
    return rest


class Digesting:
    """Computes digests in a thread, while the caller copies the same contents. The contents must
    not change before `finish` returns."""

    def __init__(self) -> None:
        self._contents: SimpleQueue[Any] = SimpleQueue()
        self._digests: list[str] = []
        self._thread = threading.Thread(target=self._run, name="kinetic-digests", daemon=True)

    def add(self, content: Any) -> None:
        """Queue bytes, or an array of bytes, to be digested."""
        self._contents.put(content)

    def finish(self) -> list[str]:
        """Wait for the thread and return the digests, in the order of the contents."""
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
