"""The seam to storage.

In: keys with "/" between parts, bytes. Out: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class Store(Protocol):
    """A flat space of keys.

    Promises:
        1. `put` is atomic: a reader sees the old content, the new content or none, never a part.
        2. `put(..., if_absent=True)` returns True for exactly one of any number of concurrent
           writers of a key.
        3. `get` of a missing key raises `NotFound`; nothing else does.
        4. Keys are relative, without "..", empty or absolute parts; others raise `UsageError`.
        5. A full disk raises `StoreFull` and leaves no partial object; other I/O errors raise
           `StoreError`, chained.
        6. Parts that end with an exception leave nothing, and the exception comes out as it is.
        7. `list` is sorted and never shows temporary files.
    """

    @property
    def uri(self) -> str:
        """Root of the store, from which `storage.open_store` opens it again."""
        ...

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        ...

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts as they come; return whether this call
        wrote."""
        ...

    def has(self, key: str) -> bool:
        """Return whether the key exists."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix (a whole part: "jobs" matches "jobs/a", not "jobsx"),
        sorted."""
        ...

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects went."""
        ...
