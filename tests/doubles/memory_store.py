"""A store in the memory of one process, for tests and benchmarks.

With a delay it behaves like a remote store: every call takes that long, and many can run at once.
It counts its calls. No address opens it: use the double of Cloud Storage (`gcs`) for a store that
other processes can reach.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kinetic._store import files
from kinetic._store.base import Entry, check_key
from kinetic.errors import NotFound, StoreError

PAGE_KEYS = 1000
"""The number of keys that one call lists, as in a bucket."""
_AT_ONCE = 32


class _Space:
    """The content that all stores of one name share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        """The time of each key's last write or renewal."""
        self.calls: Counter[str] = Counter()


_spaces: dict[str, _Space] = {}
_numbers = itertools.count(1)


class MemoryStore:
    """A `Store` in memory.

    Args:
        name: stores with the same name in a process share their content; "" for a private one.
        delay_s: the duration of each call.
    """

    def __init__(self, name: str = "", *, delay_s: float = 0.0) -> None:
        self._name = name or f"unnamed-{next(_numbers)}"
        self._delay_s = delay_s
        self._space = _spaces.setdefault(self._name, _Space())

    def __repr__(self) -> str:
        return f"MemoryStore({self.uri!r})"

    @property
    def uri(self) -> str:
        """The store's name, and its delay if there is one."""
        delay = f"?delay_ms={self._delay_s * 1000:g}" if self._delay_s else ""
        return f"memory://{self._name}{delay}"

    @property
    def calls(self) -> Counter[str]:
        """The number of calls of each kind, by all stores of this name."""
        with self._space.lock:
            return Counter(self._space.calls)

    def forget_calls(self) -> None:
        """Count from 0 again."""
        with self._space.lock:
            self._space.calls.clear()

    @property
    def calls_at_once(self) -> int:
        """The number of calls that clients should make at once: many if there is a delay."""
        return _AT_ONCE if self._delay_s else 1

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        check_key(key)
        self._travel("get")
        with self._space.lock:
            content = self._space.objects.get(key)
        if content is None:
            raise NotFound(
                f"{key!r} is missing from the store {self.uri}: it was removed, or never written."
            )
        return content

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically."""
        files.save(path, [self.get(key)], sha256=sha256)

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return True if this
        call wrote the key, False if it existed."""
        check_key(key)
        content = read_whole(data)
        self._travel("put")
        with self._space.lock:
            if if_absent and key in self._space.objects:
                return False
            self._space.objects[key] = content
            self._mark(key)
            return True

    def has(self, key: str) -> bool:
        """True if the key exists."""
        check_key(key)
        self._travel("has")
        with self._space.lock:
            return key in self._space.objects

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted; counts a call for each page."""
        if prefix:
            check_key(prefix)
        return self._pages(f"{prefix}/" if prefix else "")

    def _pages(self, beginning: str) -> Iterator[str]:
        last = ""
        while True:
            self._travel("list")
            with self._space.lock:
                keys = sorted(k for k in self._space.objects if k.startswith(beginning))
            page = [key for key in keys if key > last]
            yield from page[:PAGE_KEYS]
            if len(page) <= PAGE_KEYS:
                return
            last = page[PAGE_KEYS - 1]

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        check_key(prefix)
        self._travel("delete")
        with self._space.lock:
            keys = [k for k in self._space.objects if k == prefix or k.startswith(f"{prefix}/")]
            for key in keys:
                del self._space.objects[key]
        return len(keys)

    def renew(self, key: str) -> bool:
        """Set the key's time of writing to now; return False if it does not exist."""
        check_key(key)
        self._travel("renew")
        with self._space.lock:
            if exists := key in self._space.objects:
                self._mark(key)
        return exists

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the names of the "folders" directly below the prefix, sorted."""
        check_key(prefix)
        self._travel("list")
        with self._space.lock:
            below = [key[len(prefix) + 1 :] for key in self._space.objects if _is_in(key, prefix)]
        return iter(sorted({key.partition("/")[0] for key in below if "/" in key}))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the keys below the prefix like `list`, with sizes and times."""
        check_key(prefix)
        for _ in self._pages(f"{prefix}/"):
            pass  # Only counts the calls.
        with self._space.lock:
            objects, written = self._space.objects, self._space.written
            keys = sorted(key for key in objects if _is_in(key, prefix))
            return iter([Entry(key, len(objects[key]), written[key]) for key in keys])

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` if the content of the key is `old`; return True if it was written."""
        check_key(key)
        self._travel("swap")
        with self._space.lock:
            if self._space.objects.get(key) != old:
                return False
            self._space.objects[key] = new
            self._mark(key)
            return True

    def _mark(self, key: str) -> None:
        self._space.written[key] = time.time()

    def _travel(self, kind: str) -> None:
        with self._space.lock:
            self._space.calls[kind] += 1
        if self._delay_s:
            time.sleep(self._delay_s)


def _is_in(key: str, prefix: str) -> bool:
    return key.startswith(f"{prefix}/")


def read_whole(data: bytes | Path | Iterator[bytes]) -> bytes:
    """Return the data of a `put` as bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    if isinstance(data, Path):
        try:
            return data.read_bytes()
        except OSError as error:
            raise StoreError(f"Could not read {data} to store it: {error}.") from error
    return b"".join(data) if isinstance(data, Iterator) else data
