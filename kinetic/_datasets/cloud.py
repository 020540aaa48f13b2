"""Declared data in Cloud Storage: a folder or a single object of a bucket.

Each host lists the objects, and fetches exactly the generations that it has listed. Many are
fetched at once; each is checked by its CRC32C, and resumed if the connection breaks. Jobs on the
same disk share one copy. A later fetch continues an interrupted one.
"""

# ruff: noqa: PTH118

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic._datasets import cached_copy
from kinetic._store import files
from kinetic._store.bucket import Bucket, BucketObject
from kinetic._store.bucket_errors import BucketNotFound
from kinetic._store.gcs import split
from kinetic._store.many import at_once
from kinetic.errors import NotFound, StoreError, UsageError

_AT_ONCE = 16
_PATIENCE_S = 120.0
_CHECK_PATIENCE_S = 5.0
_TRIES = 3
"""Most attempts to fetch a folder, if its objects are replaced during the fetch."""


def check(
    source: str,
    *,
    is_dir: bool,
    may_be_empty: bool = False,
    patience_s: float = _CHECK_PATIENCE_S,
) -> None:
    """Raise if the data does not exist. If this machine may not read the bucket, return: the hosts
    will check.

    Raises:
        UsageError: The bucket, object or folder does not exist.
    """
    try:
        name, path = split(source)
        bucket = Bucket(name, patience_s=patience_s)
        exists = _exists(bucket, source, path, is_dir=is_dir)
    except StoreError as error:
        if isinstance(error, BucketNotFound):
            raise UsageError(f"kinetic.Data({source!r}): {error}") from error
        return
    if not exists and not may_be_empty:
        raise UsageError(
            f"kinetic.Data({source!r}): {_explain_missing(bucket, source, path, is_dir)}"
        )


def provide(source: str, *, is_dir: bool, root: Path) -> Path:
    """Return a local folder with the content of a bucket's folder, or with the single object.

    Args:
        source: The URI.
        is_dir: True for a folder.
        root: Folder of all copies on this host.

    Raises:
        NotFound: The object does not exist, or the folder is empty.
        StoreError: The bucket cannot be read, or the host's disk cannot be written to.
    """
    name, path = split(source)
    bucket = Bucket(name, at_once=_AT_ONCE, patience_s=_PATIENCE_S)
    for _ in range(_TRIES - 1):
        with suppress(_Replaced):
            return _provide_copy(bucket, source, path, is_dir=is_dir, root=root)
    return _provide_copy(bucket, source, path, is_dir=is_dir, root=root)


class _Replaced(StoreError):
    """An object was replaced since it was listed."""


@dataclass(frozen=True)
class _FolderListing:
    """The files of a folder by relative path, and its subfolders, parents first."""

    files: dict[str, BucketObject]
    folders: tuple[str, ...]

    def digest(self, source: str) -> str:
        """Return a digest of the source, and of the files' names and generations."""
        digest = hashlib.sha256(source.encode())
        for rel, blob in sorted(self.files.items()):
            digest.update(repr((rel, blob.generation, blob.crc32c, blob.size_bytes)).encode())
        digest.update(repr(self.folders).encode())
        return digest.hexdigest()


def _provide_copy(bucket: Bucket, source: str, path: str, *, is_dir: bool, root: Path) -> Path:
    if is_dir:
        prefix = f"{path}/" if path else ""
        blobs = {blob.name.removeprefix(prefix): blob for blob in bucket.list(prefix)}
    else:
        blob = bucket.find(path)
        blobs = {posixpath.basename(path): blob} if blob is not None else {}
    if not blobs:
        raise NotFound(_explain_missing(bucket, source, path, is_dir))
    listing = _sort_listing(source, blobs)
    return cached_copy.provide_as(
        root, listing.digest(source), lambda dest: _fill(bucket, listing, dest), source=source
    )


def _exists(bucket: Bucket, source: str, path: str, *, is_dir: bool) -> bool:
    """True if the object, or anything below the folder, exists."""
    if is_dir:
        return any(True for _ in bucket.list(f"{path}/" if path else "", first=True))
    return bucket.find(path) is not None


def _explain_missing(bucket: Bucket, source: str, path: str, is_dir: bool) -> str:
    if is_dir:
        return f"there is nothing below {source}. Check the name, and upload the data first."
    if _exists(bucket, source, path, is_dir=True):
        return f"{source} is a folder, not an object. Write {source}/ with a slash."
    return f"the object {source} does not exist. Check the name, and upload the object first."


def _sort_listing(source: str, blobs: dict[str, BucketObject]) -> _FolderListing:
    """Separate a bucket folder's objects into files and subfolders.

    Raises:
        StoreError: An object's name cannot be that of a file.
    """
    contents = {rel: blob for rel, blob in blobs.items() if rel and not rel.endswith("/")}
    markers = [rel.removesuffix("/") for rel in blobs if rel.endswith("/")]
    for rel in (*contents, *markers):
        if "\0" in rel or any(part in ("", ".", "..") for part in rel.split("/")):
            raise StoreError(
                f"The object {rel!r} below {source} cannot become a file, because no file can have "
                "this name. Rename the object."
            )
    folders = sorted({*_with_parents(markers), *_with_parents(map(posixpath.dirname, contents))})
    both = sorted(contents.keys() & set(folders))
    if both:
        raise StoreError(
            f"{both[0]!r} below {source} is both an object and a folder. Rename one of them."
        )
    return _FolderListing(contents, tuple(folders))


def _with_parents(folders: Iterable[str]) -> Iterable[str]:
    for folder in folders:
        while folder:
            yield folder
            folder = posixpath.dirname(folder)  # noqa: PLW2901


def _fill(bucket: Bucket, listing: _FolderListing, dest: str) -> None:
    for folder in listing.folders:
        os.makedirs(os.path.join(dest, folder), mode=0o700, exist_ok=True)  # noqa: PTH103
    _tidy(dest, listing)

    def fetch(item: tuple[str, BucketObject]) -> None:
        rel, blob = item
        path = Path(dest, rel)
        if path.is_file():  # Skip it: a file appears only once it is complete.
            return
        try:
            with files.write_atomically(path) as sink:
                bucket.download(blob.name, sink, generation=blob.generation)
        except NotFound as error:
            raise _Replaced(
                f"gs://{bucket.name}/{blob.name} was replaced during the download. Submit the job "
                "again once no program writes to that folder."
            ) from error
        path.chmod(0o444)

    at_once(fetch, list(listing.files.items()), _AT_ONCE)
    for folder in (*reversed(listing.folders), ""):
        os.chmod(os.path.join(dest, folder), 0o555)  # noqa: PTH101


def _tidy(dest: str, listing: _FolderListing) -> None:
    """Remove unfinished files of an interrupted fetch."""
    for folder, _, names in os.walk(dest):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.relpath(path, dest) not in listing.files:
                os.unlink(path)  # noqa: PTH108
