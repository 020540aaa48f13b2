"""A bucket of Google Cloud Storage: the only module that calls Google's packages for it.

Requests that fail for the moment are repeated, with growing pauses. Content is checked by its
CRC32C both ways: the service refuses uploads that do not match, and this module compares downloads,
because the library does not check those that arrive in several pieces.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from kinetic._core.values import dataclass
from kinetic._store import bucket_errors
from kinetic._store.files import Sink
from kinetic._store.transfer import Memory, ProgressStream
from kinetic._system.distribution import make_install_command
from kinetic.errors import NotFound, StoreError

if TYPE_CHECKING:
    from google.api_core.retry import Retry
    from google.cloud import storage

CHUNK_BYTES = 16 << 20
"""Size in bytes of the chunks in which a large object is sent. A pack fits in one chunk."""
_LARGE_AT_ONCE = 8
"""The limit of large objects that are sent at the same time."""
_SMALL_BYTES = 8 << 20
"""Size in bytes above which Google's library sends an object in chunks."""
_RESTARTS = 3
"""The number of times that a transfer is started, if it cannot be resumed."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 120.0
"""Seconds for which a failing request is repeated."""
_FIRST_PATIENCE_S = 20.0
"""Seconds for which requests are repeated until the first answer: there may be no network."""
_RENEWED = "kinetic-renewed"
"""The metadata key with the time of the last renewal. Only people read it."""
_FIELDS = "items(name,size,crc32c,generation,updated),nextPageToken"
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))
"""The HTTP statuses after which a request is repeated."""


@dataclass(frozen=True)
class BucketObject:
    """The metadata of an object.

    Attributes:
        crc32c: the digest as the service writes it; "" if it has none.
        generation: changes whenever content is written.
        updated_at: when content or metadata last changed, by the service's clock.
    """

    name: str
    size_bytes: int
    crc32c: str
    generation: int
    updated_at: float = 0.0


@dataclass(frozen=True)
class _Content:
    """Content to upload: the object's name, the content and its digest."""

    name: str
    stream: ProgressStream
    size_bytes: int
    crc32c: str


class Bucket:
    """A bucket, for any number of threads and forked processes.

    Args:
        name: its name.
        at_once: the limit of requests at the same time.
        patience_s: seconds for which a failing request is repeated.
    """

    def __init__(self, name: str, *, at_once: int = 1, patience_s: float = _PATIENCE_S) -> None:
        self.name = name
        self._at_once = at_once
        self._patience_s = patience_s
        self._by_pid: dict[int, _Connections] = {}
        self._locks: dict[int, threading.Lock] = {}

    def read(self, name: str, *, generation: int | None = None) -> bytes:
        """Return the content of an object, or of one generation of it.

        Raises:
            NotFound: there is no such object or generation.
        """
        memory = Memory()
        self.download(name, memory, generation=generation)
        return memory.getvalue()

    def download(self, name: str, target: Sink | Memory, *, generation: int | None = None) -> None:
        """Write the content of an object, or of one generation of it, to a target.

        Raises:
            NotFound: there is no such object or generation.
        """
        for _ in range(_RESTARTS):
            if self._download(name, target, generation):
                return
            target.restart()
        raise StoreError(
            f"gs://{self.name}/{name} arrived damaged {_RESTARTS} times: its checksum (CRC32C) is "
            "not the bucket's. Try again; if that does not help, look for a proxy that changes "
            "downloads."
        )

    def _download(self, name: str, target: Sink | Memory, generation: int | None) -> bool:
        """Download once; return whether the content arrived intact."""
        tries = self._tries()
        digest = _checksum()

        class Stream:
            """The file object that the library writes to."""

            def write(self, part: bytes) -> int:
                digest.update(part)
                return target.write(part)

        with self._translate_errors(f"read gs://{self.name}/{name}", "storage.objects.get"):
            blob = self._bucket.blob(name, generation=generation)
            try:
                # No checksum: the library does not check downloads in several pieces.
                blob.download_to_file(
                    Stream(), raw_download=True, checksum=None, retry=tries.retry()
                )
            except _vendor().NotFound:
                if not tries.failed:
                    raise
                return False  # The object was replaced, so the download could not resume.
        return blob.crc32c in (None, _encode_digest(digest))

    def write(self, name: str, stream: ProgressStream, size_bytes: int, *, if_absent: bool) -> bool:
        """Write an object; return whether this call wrote.

        Args:
            name: the object's name.
            stream: the content, read twice from its beginning.
            size_bytes: the size of the content.
            if_absent: leave an existing object alone.
        """
        # Find an existing object first: the service would report it only after the upload.
        if if_absent and size_bytes > _SMALL_BYTES and self.find(name) is not None:
            return False
        content = _Content(name, stream, size_bytes, _digest_of(stream.stream))
        return self._write(content, 0 if if_absent else None)

    def swap(self, name: str, old: bytes, new: bytes) -> bool:
        """Write an object whose content is `old`; return whether this call wrote."""
        stream = ProgressStream(io.BytesIO(new), lambda _: None)
        content = _Content(name, stream, len(new), _digest_of(stream.stream))
        existing = self.find(name)
        try:
            if existing is None or self.read(name, generation=existing.generation) != old:
                return False
        except NotFound:  # The object was replaced or deleted meanwhile.
            return False
        return self._write(content, existing.generation)

    def _write(self, content: _Content, generation: int | None) -> bool:
        """Write an object if its generation is this one (0: it does not exist, None: any). Return
        True if this call wrote."""
        is_large = content.size_bytes > _SMALL_BYTES
        doing = f"write gs://{self.name}/{content.name}"
        with (
            self._translate_errors(doing, "storage.objects.create"),
            self._connections.large if is_large else nullcontext(),
        ):
            for starts in itertools.count(1):
                tries = self._tries()
                try:
                    self._upload(content, generation, tries.retry())
                    return True
                except _vendor().PreconditionFailed:
                    # An earlier try may have written the object although its answer was lost.
                    return bool(tries.failed or starts > 1) and self._has(content)
                except Exception as error:
                    if starts == _RESTARTS or not bucket_errors.may_restart(error):
                        raise
        raise AssertionError

    def _upload(self, content: _Content, generation: int | None, retry: Retry) -> None:
        blob = self._bucket.blob(content.name, chunk_size=CHUNK_BYTES)
        blob.crc32c = content.crc32c
        content.stream.seek(0)
        blob.upload_from_file(
            cast("IO[bytes]", content.stream),
            size=content.size_bytes,
            content_type="application/octet-stream",
            if_generation_match=generation,
            checksum=None,  # The service compares the digest in the metadata.
            retry=retry,
        )

    def _has(self, content: _Content) -> bool:
        existing = self.find(content.name)
        about = (content.crc32c, content.size_bytes)
        return existing is not None and (existing.crc32c, existing.size_bytes) == about

    def find(self, name: str) -> BucketObject | None:
        """Return the metadata of an object, or None."""
        with self._translate_errors(f"look for gs://{self.name}/{name}", "storage.objects.get"):
            blob = self._bucket.blob(name)
            try:
                blob.reload(retry=self._tries().retry())
            except _vendor().NotFound as error:
                if bucket_errors.lacks_bucket(error):
                    raise
                return None
            return _blob(blob)

    def renew(self, name: str, within_s: float) -> bool:
        """Renew an object, unless it was updated within this time; return True if it exists. A
        `BucketObject` read before is then out of date."""
        while (existing := self.find(name)) is not None:
            if time.time() - existing.updated_at < within_s or self._renew_object(existing):
                return True
        return False

    def _renew_object(self, existing: BucketObject) -> bool:
        """Write the time to the object's metadata; return False if the object has changed."""
        with self._translate_errors(
            f"renew gs://{self.name}/{existing.name}", "storage.objects.update"
        ):
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            try:
                # Not Blob.patch: that also reads the access lists, which few accounts may do.
                self._connections.client._connection.api_request(
                    method="PATCH",
                    path=self._bucket.blob(existing.name).path,
                    query_params={"ifGenerationMatch": existing.generation, "projection": "noAcl"},
                    data={"metadata": {_RENEWED: now}},
                    retry=self._tries().retry(),
                )
            except (_vendor().NotFound, _vendor().PreconditionFailed):
                return False
            return True

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the "folders" directly below this prefix, sorted."""
        with self._translate_errors(f"list gs://{self.name}/{prefix}", "storage.objects.list"):
            blobs = self._connections.client.list_blobs(
                self._bucket,
                prefix=prefix or None,
                delimiter="/",
                fields="prefixes,nextPageToken",
                retry=self._tries().retry(),
            )
            for page in blobs.pages:
                yield from (name.removeprefix(prefix).rstrip("/") for name in page.prefixes)

    def list(self, prefix: str, *, end: str = "", first: bool = False) -> Iterator[BucketObject]:
        """Yield the objects with this prefix, sorted by name.

        Args:
            prefix: the beginning of the names.
            end: yield only names before this one; "" for all.
            first: yield only the first object.
        """
        with self._translate_errors(f"list gs://{self.name}/{prefix}", "storage.objects.list"):
            blobs = self._connections.client.list_blobs(
                self._bucket,
                prefix=prefix or None,
                end_offset=end or None,
                fields=_FIELDS,
                max_results=1 if first else None,
                retry=self._tries().retry(),
            )
            for blob in blobs:
                yield _blob(blob)

    def delete(self, name: str) -> bool:
        """Delete an object; return whether it existed."""
        tries = self._tries()
        with self._translate_errors(f"delete gs://{self.name}/{name}", "storage.objects.delete"):
            try:
                self._bucket.blob(name).delete(retry=tries.retry())
            except _vendor().NotFound as error:
                if bucket_errors.lacks_bucket(error):
                    raise
                return bool(tries.failed)  # A failed try may have deleted it: its answer was lost.
            return True

    @property
    def _connections(self) -> _Connections:
        # A forked process must not use its parent's connections.
        pid = os.getpid()
        if pid not in self._by_pid:
            with self._locks.setdefault(pid, threading.Lock()):
                if pid not in self._by_pid:
                    self._by_pid[pid] = _connect(self.name, self._at_once)
        return self._by_pid[pid]

    @property
    def _bucket(self) -> storage.Bucket:
        return self._connections.bucket

    def _tries(self) -> _Tries:
        return _Tries(self._connections, self._patience_s)

    @contextmanager
    def _translate_errors(self, doing: str, permission: str) -> Iterator[None]:
        """Raise kinetic's errors instead of the library's."""
        connections = self._connections
        try:
            yield
            connections.answers = True
        except bucket_errors.failures() as error:
            raise bucket_errors.translate_error(error, doing, permission, self.name) from error


class _Connections:
    """One process's connections to a bucket."""

    def __init__(self, client: storage.Client, bucket: str) -> None:
        self.client = client
        self.bucket = client.bucket(bucket)
        self.large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self.answers = False
        """True once the service has answered."""


class _Tries:
    """Counts the failed tries of one call."""

    def __init__(self, connections: _Connections, patience_s: float) -> None:
        self._connections = connections
        self._patience_s = patience_s
        self._began = time.monotonic()
        self.failed = 0

    def retry(self) -> Retry:
        """Return the library's policy for repeating the request."""
        from google.api_core.retry import Retry

        return Retry(
            predicate=self._may_succeed,
            initial=_PAUSE_S,
            maximum=_LONGEST_PAUSE_S,
            timeout=self._patience_s,
        )

    def _may_succeed(self, error: Exception) -> bool:
        status = bucket_errors.status_of(error)
        self._connections.answers |= bool(status)
        may_pass = status in _TRANSIENT if status else bucket_errors.is_broken_connection(error)
        if may_pass and not self._connections.answers:
            may_pass = time.monotonic() - self._began < _FIRST_PATIENCE_S
        self.failed += may_pass
        return may_pass


def _connect(name: str, at_once: int) -> _Connections:
    try:
        with warnings.catch_warnings():
            # One of gRPC's packages warns when it is imported.
            warnings.simplefilter("ignore", ImportWarning)
            import google_crc32c  # noqa: F401  fails early if the package is missing
            from google.auth.exceptions import DefaultCredentialsError
            from google.cloud import storage
            from requests.adapters import HTTPAdapter
    except ImportError as error:
        raise StoreError(
            f'The packages that reading gs://{name} needs cannot be imported: "{error}". Install '
            f"them: {make_install_command('gcp')}"
        ) from error
    try:
        with warnings.catch_warnings():
            # "end user credentials without a quota project": storage needs no such project.
            warnings.simplefilter("ignore", UserWarning)
            client = storage.Client(project=None)
    except DefaultCredentialsError as error:
        raise StoreError(bucket_errors.no_credentials(name)) from error
    except Exception as error:
        raise StoreError(
            f'gs://{name} cannot be reached: "{bucket_errors.message_of(error)}". Check the '
            "credentials that GOOGLE_APPLICATION_CREDENTIALS names."
        ) from error
    # Without its cache, the client needs no permission to read the bucket's metadata.
    client._bucket_metadata_cache = None
    adapter = HTTPAdapter(pool_connections=2, pool_maxsize=at_once)
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, adapter)
    _sessions.add(client._http)
    client._http.hooks["response"].append(_read_error)
    return _Connections(client, name)


def _read_error(response: Any, **_options: Any) -> None:
    """Read the body of an error response. Otherwise its connection would stay busy."""
    if not response.ok:
        response.content  # noqa: B018 - the property reads the body


def _vendor() -> Any:
    from google.api_core import exceptions

    return exceptions


def _blob(blob: storage.Blob) -> BucketObject:
    return BucketObject(
        blob.name,
        int(blob.size or 0),
        blob.crc32c or "",
        int(blob.generation or 0),
        blob.updated.timestamp() if blob.updated else 0.0,
    )


def _checksum() -> Any:
    import google_crc32c

    return google_crc32c.Checksum()


def _encode_digest(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()


def _digest_of(stream: IO[bytes]) -> str:
    digest = _checksum()
    stream.seek(0)
    while part := stream.read(1 << 20):
        digest.update(part)
    return _encode_digest(digest)


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close a fork's copies of connections. Otherwise urllib3 would close them when its pools are
    garbage-collected, and their descriptors may belong to other files by then."""
    # Python would print errors into the program's output.
    with suppress(AttributeError, OSError, RuntimeError):
        for session in list(_sessions):
            for adapter in session.adapters.values():
                pools = adapter.poolmanager.pools
                pools.lock = threading.RLock()  # A thread of the parent may hold the old one.
                for key in list(pools.keys()):
                    for connection in filter(None, list(pools[key].pool.queue)):
                        connection.close()
    _sessions.clear()


os.register_at_fork(after_in_child=_close_in_fork)
