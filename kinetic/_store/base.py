"""The protocol of stores: flat key-value storage of bytes, keys with "/" between their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from kinetic.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


LEAST_PAUSE_S = 0.05
FRESH_S = 86400.0
"""Age in seconds below which `renew` leaves an object as it is, which saves a call."""


class Entry(NamedTuple):
    """An object in a list.

    Attributes:
        key: its key.
        size_bytes: the size of its content.
        written_at: when the object was last written or renewed, in seconds since the epoch, by
            the store's clock.
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
        4. Keys are relative, without "..", empty or absolute parts, or line ends (which buckets
           refuse); other keys raise `UsageError`.
        5. A full disk raises `StoreFull` and leaves no partial object; other I/O errors raise
           `StoreError`, chained.
        6. If the iterator of parts raises, nothing is written and the exception propagates.
        7. `list` is sorted and never shows temporary files.
        8. `fetch` is atomic: the file has the whole content or is unchanged.
        9. All calls are thread-safe.

    `_store.many` makes many calls, `calls_at_once` at a time. Features that only some stores have
    are in separate protocols: `Files`, `Swaps`, `Watchable`, `Unmetered`.
    """

    @property
    def uri(self) -> str:
        """The address of the store, as `open_store` takes it."""
        ...

    @property
    def calls_at_once(self) -> int:
        """The number of calls to make at the same time; 1 if calls do not wait for a network."""
        ...

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        ...

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically and in pieces.

        Args:
            key: the key.
            path: the file, in an existing folder; replaced if it exists.
            sha256: the expected digest of the content, as hex digits; "" for any.

        Raises:
            CorruptRecord: the content has another digest; the file is unchanged.
        """
        ...

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator, unless the key
        exists and `if_absent` is True; return whether this call wrote."""
        ...

    def has(self, key: str) -> bool:
        """True if the key exists."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted. The prefix counts as a folder: "jobs" matches
        "jobs/a", not "jobsx"."""
        ...

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        ...

    def renew(self, key: str) -> bool:
        """Protect the key from the cleanup of unused content; return True if the key exists. It
        then counts as written within the last `FRESH_S`. In a folder, `gc_lock` protects it."""
        ...

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the names of the "folders" directly below the prefix, sorted: the ids of jobs, for
        example, without listing the keys of each job."""
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the keys below the prefix like `list`, with sizes and times."""
        ...


@runtime_checkable
class Files(Protocol):
    """A store in a folder of this machine. Each key is the path of a file, which can be opened,
    appended to, linked, locked and watched."""

    def folder(self) -> Path:
        """Return the folder, whether it exists or not."""
        ...


def folder_of(store: Store) -> Path | None:
    """Return the folder in which each key is the path of a file; None for other stores."""
    return cast("Files", store).folder() if is_near(store) else None


def is_near(store: Store) -> bool:
    """True if the store is a folder of this machine, so that calls take microseconds."""
    return _is_folder(type(store))


@functools.cache
def _is_folder(kind: type) -> bool:
    return issubclass(kind, Files)  # Checks of protocols are slow in Python 3.11.


@runtime_checkable
class Swaps(Store, Protocol):
    """A store without a folder whose content can be replaced on condition (compare-and-swap)."""

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` if the content of the key is `old`; return True if this call wrote. Of
        several writers that have read the same content, only one succeeds."""
        ...


@runtime_checkable
class Watchable(Protocol):
    """A store that can report the progress of uploads."""

    def with_progress(self, on_sent: Callable[[int], None]) -> Store:
        """Return a view of this store whose uploads call `on_sent` from any thread, each time with
        the number of bytes sent since the last call. This store itself reports nothing."""
        ...


@runtime_checkable
class Unmetered(Protocol):
    """A store that can say that its calls are free, so that callers poll as fast as it answers."""

    is_unmetered: bool


def is_unmetered(store: Store) -> bool:
    """True if calls to this store are free: poll as fast as it answers."""
    return isinstance(store, Unmetered) and store.is_unmetered


def pause_of(store: Store, took_s: float, usual_s: float) -> float:
    """Return the pause between polls of a store, in seconds: `usual_s`, or less if calls are free,
    but then no less than the last poll took (`took_s`)."""
    return min(max(LEAST_PAUSE_S, took_s), usual_s) if is_unmetered(store) else usual_s


def pause_after(silence_s: float, least_s: float, most_s: float) -> float:
    """Return the pause between polls, in seconds: a tenth of the time since the last change, but at
    least `least_s` and at most `most_s`."""
    return min(max(least_s, silence_s / 10), most_s)


def check_key(key: str) -> list[str]:
    """Return the parts of a key.

    Raises:
        UsageError: the key is not valid.
    """
    parts = key.split("/")
    if not {"\0", "\n", "\r"}.isdisjoint(key) or any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            f"{key!r} is not a valid key of the store. A key consists of names with '/' between "
            "them; no name may be empty, '.' or '..', or have a line end."
        )
    return parts
