"""A store in a bucket of Google Cloud Storage, or below a prefix in it.

Each call is one request or few: `get`, `fetch`, `has` and `put` of small objects take one; more
than 8 MiB are sent in chunks of 16 MiB; `list` takes one per thousand keys; `delete` lists, then
deletes each object. The bucket itself keeps the promises of `Store`: an object appears when it is
whole, and can be created on condition that it does not exist.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kinetic._store import files
from kinetic._store.base import FRESH_S, Entry, check_key
from kinetic._store.bucket import Bucket
from kinetic._store.many import at_once
from kinetic._store.transfer import ProgressStream, open_stream
from kinetic.errors import UsageError

_AT_ONCE = 32
_DELETED_AT_ONCE = 8
"""The number of objects that one `delete` deletes at once. Several calls may run in parallel."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_MAX_NAME_BYTES = 1024


class GcsStore:
    """A `Store` in a bucket.

    Args:
        uri: gs://bucket or gs://bucket/prefix.
        patience_s: seconds for which a failing request is repeated.

    Raises:
        UsageError: the URI is not the address of a bucket.
    """

    def __init__(self, uri: str, *, patience_s: float = 120.0) -> None:
        name, prefix = split(uri)
        self._bucket = Bucket(name, at_once=_AT_ONCE, patience_s=patience_s)
        self._prefix = f"{prefix}/" if prefix else ""
        self._on_sent: Callable[[int], None] = lambda _: None
        self._uri = f"gs://{name}/{prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"GcsStore({self._uri!r})"

    @property
    def uri(self) -> str:
        """The address of the bucket, with the prefix if there is one."""
        return self._uri

    def with_progress(self, on_sent: Callable[[int], None]) -> GcsStore:
        """Return a view of this store that reports the progress of its uploads; see `Watchable`."""
        same = copy.copy(self)
        same._on_sent = on_sent
        return same

    @property
    def calls_at_once(self) -> int:
        """The number of calls to make at once: many, since each waits for the network."""
        return _AT_ONCE

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        return self._bucket.read(self._name(key))

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically."""
        name = self._name(key)
        with files.write_atomically(path, sha256=sha256) as sink:
            self._bucket.download(name, sink)

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return whether this
        call wrote."""
        name = self._name(key)
        with open_stream(data) as stream:
            size_bytes = stream.seek(0, io.SEEK_END)
            source = ProgressStream(stream, self._on_sent)
            return self._bucket.write(name, source, size_bytes, if_absent=if_absent)

    def has(self, key: str) -> bool:
        """True if the key exists."""
        return self._bucket.find(self._name(key)) is not None

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted; "" is the whole store."""
        below = f"{self._name(prefix)}/" if prefix else self._prefix
        blobs = self._bucket.list(below)
        return (blob.name.removeprefix(self._prefix) for blob in blobs)

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        name = self._name(prefix)
        # "0" follows "/" in ASCII, so this lists the key and everything below it.
        blobs = self._bucket.list(name, end=f"{name}0")
        names = [b.name for b in blobs if b.name == name or b.name.startswith(f"{name}/")]
        return sum(at_once(self._bucket.delete, names, _DELETED_AT_ONCE))

    def renew(self, key: str) -> bool:
        """Make the key count as written recently, and return whether it exists. A second request is
        needed only if the object was not written or renewed for a day."""
        return self._bucket.renew(self._name(key), FRESH_S)

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the names of the "folders" directly below the prefix, sorted."""
        return self._bucket.folders(f"{self._name(prefix)}/")

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the keys below the prefix like `list`, with sizes and times."""
        for blob in self._bucket.list(f"{self._name(prefix)}/"):
            yield Entry(blob.name.removeprefix(self._prefix), blob.size_bytes, blob.updated_at)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` if the content of the key is `old`; return whether this call wrote."""
        return self._bucket.swap(self._name(key), old, new)

    def _name(self, key: str) -> str:
        check_key(key)
        name = f"{self._prefix}{key}"
        try:
            size_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise UsageError(f"{key!r} is not a valid key: it is not valid Unicode.") from error
        if size_bytes > _MAX_NAME_BYTES:
            raise UsageError(
                f"{key!r} is too long for the store {self._uri}: {size_bytes} bytes with the "
                f"store's prefix, where a bucket takes {_MAX_NAME_BYTES}."
            )
        return name


def split(uri: str) -> tuple[str, str]:
    """Split a gs:// URI into the name of its bucket and the rest.

    Raises:
        UsageError: the URI is not the address of a bucket.
    """
    name, _, rest = uri.removeprefix("gs://").partition("/")
    rest = rest.rstrip("/")
    if not uri.startswith("gs://") or not _NAME.fullmatch(name):
        raise UsageError(
            f"{uri!r} does not name a bucket. Write gs://bucket/path, where the name of the bucket "
            "consists of lower-case letters, digits, '-', '_' and '.'."
        )
    if rest:
        check_key(rest)
    return name, rest
