"""A store in a bucket of Google Cloud Storage, or below a prefix in it.

In: keys and bytes. Out: bytes.

Each call is one request, or few: `get`, `fetch`, `has` and small objects take one; more than 8 MiB
are sent in chunks of 16 MiB; `list` takes one for each thousand keys; `delete` lists, then deletes
each object. The bucket itself keeps all promises: an object appears when it is whole, and can be
created only if there is none.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kinetic._core import layout
from kinetic._store import files
from kinetic._store.base import FRESH_S, Entry, check_key
from kinetic._store.bucket import Bucket, BucketObject
from kinetic._store.many import at_once
from kinetic._store.transfer import ProgressStream, open_stream
from kinetic.errors import UsageError

_AT_ONCE = 32
_DELETED_AT_ONCE = 8
"""Few: removing many jobs makes many of these calls at once."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_MAX_NAME_BYTES = 1024
_CONTENT = (layout.BLOBS, layout.PACKS, layout.TREES, layout.DATA)
OLD_DAYS = 30
"""Longer than jobs wait and run."""
_NONCURRENT_ONLY = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_NEVER_SET = ("customTimeBefore", "daysSinceCustomTime")
"""Conditions that no live object of a store meets: kinetic sets no custom times."""


class GcsStore:
    """A `Store` in a bucket.

    Args:
        uri: gs://bucket or gs://bucket/prefix.
        patience_s: for how long a request that the service cannot answer is repeated.

    Raises:
        UsageError: it is not the address of a bucket.
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
        """The bucket, and the prefix if there is one."""
        return self._uri

    def with_progress(self, on_sent: Callable[[int], None]) -> GcsStore:
        """Return the same store, which reports how much it sends."""
        same = copy.copy(self)
        same._on_sent = on_sent
        return same

    @property
    def calls_at_once(self) -> int:
        """Many: each is a request over the network."""
        return _AT_ONCE

    def as_folder(self) -> None:
        """There is no folder."""
        return

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
        """Return whether the key exists."""
        return self._bucket.find(self._name(key)) is not None

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted; "" is the whole store."""
        below = f"{self._name(prefix)}/" if prefix else self._prefix
        found = self._bucket.list(below)
        return (blob.name.removeprefix(self._prefix) for blob in found)

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        name = self._name(prefix)
        # "0" follows "/": from the key itself to the last one below.
        found = self._bucket.list(name, end=f"{name}0")
        gone = [b.name for b in found if b.name == name or b.name.startswith(f"{name}/")]
        return sum(at_once(self._bucket.delete, gone, _DELETED_AT_ONCE))

    def renew(self, key: str) -> bool:
        """Return whether the key exists; if so it counts as written recently. Takes a second
        request if it was not written or renewed for a day."""
        return self._bucket.renew(self._name(key), FRESH_S)

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the next part of all keys that have parts below the prefix and that one."""
        return self._bucket.folders(f"{self._name(prefix)}/")

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield what `list` yields, with sizes and times."""
        for blob in self._bucket.list(f"{self._name(prefix)}/"):
            key, version = blob.name.removeprefix(self._prefix), _version(blob)
            yield Entry(key, blob.size_bytes, blob.updated_at, version)

    def drop(self, entry: Entry) -> bool:
        """Delete an object if it is unchanged since it was listed; return whether this call did."""
        generation, _, metageneration = entry.version.partition(".")
        listed = BucketObject(
            self._name(entry.key), entry.size_bytes, "", int(generation), int(metageneration)
        )
        return self._bucket.delete(listed.name, unchanged=listed)

    def expiry(self) -> Sequence[str]:
        """Return which rules of the bucket delete what jobs may still need."""
        return list_threats(self._bucket.lifecycle_rules(), self._prefix)

    def _name(self, key: str) -> str:
        check_key(key)
        name = f"{self._prefix}{key}"
        try:
            size_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise UsageError(f"{key!r} is not a key of a store: it is not valid text.") from error
        if size_bytes > _MAX_NAME_BYTES:
            raise UsageError(
                f"{key!r} is not a key of this store: with its prefix it is {size_bytes} bytes "
                f"long, and a bucket takes {_MAX_NAME_BYTES}."
            )
        return name


def _version(blob: BucketObject) -> str:
    return f"{blob.generation}.{blob.metageneration}"


def split(uri: str) -> tuple[str, str]:
    """Return the name of the bucket and what follows it in a gs:// URI.

    Raises:
        UsageError: it is not the address of a bucket.
    """
    name, _, rest = uri.removeprefix("gs://").partition("/")
    rest = rest.rstrip("/")
    if not uri.startswith("gs://") or not _NAME.fullmatch(name):
        raise UsageError(
            f"{uri!r} does not name a bucket. Write gs://bucket/path; names of buckets have lower-"
            "case letters, digits, '-', '_' and '.'."
        )
    if rest:
        check_key(rest)
    return name, rest


def list_threats(rules: Iterable[Mapping[str, Any]], prefix: str) -> tuple[str, ...]:
    """Return which lifecycle rules of a bucket delete live objects that a store needs: their names
    begin with `prefix`.

    Content is shared by jobs and used again by each new one, which does not change its age: a rule
    by age deletes what today's plans name. Only old records may be deleted.
    """
    return tuple(
        _describe_condition(rule.get("condition") or {}) for rule in rules if _deletes(rule, prefix)
    )


def _deletes(rule: Mapping[str, Any], prefix: str) -> bool:
    condition = rule.get("condition") or {}
    if (rule.get("action") or {}).get("type") != "Delete" or condition.get("isLive") is False:
        return False
    if any(condition.get(key) is not None for key in (*_NONCURRENT_ONLY, *_NEVER_SET)):
        return False
    wanted: Sequence[str] = condition.get("matchesPrefix") or ("",)
    needed = [prefix] if condition.get("age", 0) < OLD_DAYS else [prefix + c for c in _CONTENT]
    return any(w.startswith(n) or n.startswith(w) for w in wanted for n in needed)


def _describe_condition(condition: Mapping[str, Any]) -> str:
    told = ["objects"]
    if condition.get("matchesPrefix"):
        told.append(f"below {', '.join(condition['matchesPrefix'])}")
    if condition.get("matchesSuffix"):
        told.append(f"that end with {', '.join(condition['matchesSuffix'])}")
    if condition.get("age") is not None:
        told.append(f"after {condition['age']} days")
    if condition.get("createdBefore"):
        told.append(f"made before {condition['createdBefore']}")
    return " ".join(told)
