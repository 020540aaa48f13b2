"""The seam to storage.

In: keys with "/" between parts, bytes. Out: bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from kinetic.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


LEAST_PAUSE_S = 0.05
FRESH_S = 86400.0
"""What was written or renewed within this time need not be renewed again, which saves a call."""


class Entry(NamedTuple):
    """An object, as of when it was listed.

    Attributes:
        key: its key.
        size_bytes: of its content.
        written_at: when it was written or renewed last, in seconds since the epoch, by the clock
            of the store.
    """

    key: str
    size_bytes: int
    written_at: float


class Store(Protocol):
    """A flat space of keys.

    Promises:
        1. `put` is atomic: a reader sees the old content, the new content or none, never a part.
        2. `put(..., if_absent=True)` returns True for exactly one of any number of concurrent
           writers of a key with different contents.
        3. `get` and `fetch` of a missing key raise `NotFound`; nothing else does.
        4. Keys are relative, without "..", empty or absolute parts, or line ends (which buckets do
           not take); others raise `UsageError`.
        5. A full disk raises `StoreFull` and leaves no partial object; other I/O errors raise
           `StoreError`, chained.
        6. If the iterator of parts raises, nothing is written and the exception propagates.
        7. `list` is sorted and never shows temporary files.
        8. `fetch` is atomic: the file has the whole content, or is unchanged.
        9. All calls are thread-safe.

    `_store.many` makes many calls, `calls_at_once` at a time. What only some stores can do has a
    protocol of its own: `Files`, `Swaps`, `Watchable`, `Unmetered`.
    """

    @property
    def uri(self) -> str:
        """Root of the store, from which `open_store` opens it again."""
        ...

    @property
    def calls_at_once(self) -> int:
        """How many calls to make at the same time: 1 if calls have no latency to hide."""
        ...

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        ...

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically and without holding all of it
        in memory.

        Args:
            key: the key.
            path: the file, in an existing folder; replaced if it exists.
            sha256: the digest that the content must have, as hex digits; "" for any.

        Raises:
            CorruptRecord: the content has another digest; the file is unchanged.
        """
        ...

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return whether this
        call wrote."""
        ...

    def has(self, key: str) -> bool:
        """Return whether the key exists."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix (a whole part: "jobs" matches "jobs/a", not "jobsx"),
        sorted."""
        ...

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        ...

    def renew(self, key: str) -> bool:
        """Return whether the key exists; if so it counts as written within the last `FRESH_S`,
        except in a folder, where the lock of submissions protects it."""
        ...

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the next part of all keys that have parts below the prefix and that one, each once,
        sorted: the ids of jobs without listing all that lies below them."""
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield what `list` yields, with sizes and times."""
        ...


@runtime_checkable
class Files(Protocol):
    """A store in a folder of this machine: each key is the path of a file, which can be opened,
    appended to, linked, locked and watched."""

    def folder(self) -> Path:
        """Return the folder, whether it exists or not."""
        ...


def folder_of(store: Store) -> Path | None:
    """Return the folder in which each key is the path of a file; None where keys are no files."""
    return store.folder() if isinstance(store, Files) else None


def is_near(store: Store) -> bool:
    """True if the store is a folder of this machine: its calls take microseconds and cost
    nothing."""
    return isinstance(store, Files)


@runtime_checkable
class Swaps(Store, Protocol):
    """A store without a folder that can replace an object which nobody else has replaced."""

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` if the content of the key is `old`; return whether this call wrote. Of
        concurrent writers that have seen the same content, one wins."""
        ...


@runtime_checkable
class Watchable(Protocol):
    """A store that can report how much of the content that it sends is on its way."""

    def with_progress(self, on_sent: Callable[[int], None]) -> Store:
        """Return the same store, which calls this with the number of further bytes sent, many times
        and from any thread."""
        ...


@runtime_checkable
class Unmetered(Protocol):
    """A store whose calls cost nothing but its time: as many are welcome as it keeps up with."""

    is_unmetered: bool


def is_unmetered(store: Store) -> bool:
    """Whether calls of this store cost nothing but its time."""
    return isinstance(store, Unmetered) and store.is_unmetered


def pause_of(store: Store, took_s: float, usual_s: float) -> float:
    """Return how long to wait between calls that are made again and again, the last of which took
    so long: as usual, or shorter where calls cost nothing. A store that is slow is left alone half
    of the time."""
    return min(max(LEAST_PAUSE_S, took_s), usual_s) if is_unmetered(store) else usual_s


def pause_after(silence_s: float, least_s: float, most_s: float) -> float:
    """Return how long to wait between looks when nothing has come for so long: a tenth of that.
    What comes is then seen at most a tenth later than it could be."""
    return min(max(least_s, silence_s / 10), most_s)


def check_key(key: str) -> list[str]:
    """Return the parts of a key.

    Raises:
        UsageError: it is not a valid key.
    """
    parts = key.split("/")
    if not {"\0", "\n", "\r"}.isdisjoint(key) or any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            f"{key!r} is not a key of a store: write names with one '/' between them, without "
            "'.', '..', a leading '/' or line ends."
        )
    return parts
