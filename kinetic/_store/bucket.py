"""A bucket of Google Cloud Storage: the only door to the packages of Google that reach it.

In: names of objects, content. Out: content and what the bucket says of objects; errors in our
words.

What the service cannot answer just now is asked again, with growing pauses. Content is checked by
its CRC32C both ways: the service refuses an upload that does not match, and what was downloaded is
compared here, also when it came in several pieces.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, Protocol

from kinetic._core.values import dataclass
from kinetic.errors import NotFound, StoreError

if TYPE_CHECKING:
    from google.api_core.retry import Retry
    from google.cloud import storage

CHUNK_BYTES = 16 << 20
"""What is in memory of a large object that is sent: a pack of small files is sent at once."""
_LARGE_AT_ONCE = 8
"""How many large objects are sent at the same time."""
_SMALL_BYTES = 8 << 20
"""The library sends more than this in chunks."""
_RESTARTS = 3
"""How often a transfer that cannot be taken up begins."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 120.0
"""How long a request is repeated."""
_FIRST_PATIENCE_S = 20.0
"""How long it is, where nobody has answered yet: this machine may have no network."""
_TOKEN = "kinetic-write"
"""A name of its own for each conditional write: who finds the object there can tell whether the
write whose answer was lost made it."""
_FIELDS = "items(name,size,crc32c,generation),nextPageToken"
_MARKS = frozenset((408, 429, 500, 502, 503, 504))
"""HTTP statuses of what may succeed the next time."""


@dataclass(frozen=True)
class Blob:
    """What a bucket says of an object.

    Attributes:
        crc32c: the digest as the service writes it; "" if it has none.
        generation: the number of this content: another one for each that is written.
    """

    name: str
    size_bytes: int
    crc32c: str
    generation: int


class Target(Protocol):
    """Where a download goes."""

    def write(self, part: bytes, /) -> int:
        """Append a part."""
        ...

    def restart(self) -> None:
        """Forget all that was written."""
        ...


class Memory:
    """A `Target` in memory."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self.write = self._buffer.write
        self.content = self._buffer.getvalue

    def restart(self) -> None:
        """Forget all that was written."""
        self._buffer.seek(0)
        self._buffer.truncate()


class Bucket:
    """A bucket, for any number of threads, also of forked processes.

    Args:
        name: its name.
        at_once: how many requests are made at the same time.
        patience_s: how long a request is repeated that the service cannot answer.
    """

    def __init__(self, name: str, *, at_once: int = 1, patience_s: float = _PATIENCE_S) -> None:
        self.name = name
        self._at_once = at_once
        self._patience_s = patience_s
        self._lines: dict[int, _Line] = {}
        self._locks: dict[int, threading.Lock] = {}

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            NotFound: there is none.
        """
        memory = Memory()
        self.download(name, memory)
        return memory.content()

    def download(self, name: str, target: Target, *, generation: int | None = None) -> None:
        """Write the content of an object; of this generation, if one is given.

        Raises:
            NotFound: there is none.
        """
        for _ in range(_RESTARTS):
            if self._downloaded(name, target, generation):
                return
            target.restart()
        raise StoreError(
            f"gs://{self.name}/{name} arrives damaged: its CRC32C is not the one that the bucket "
            "has. Try again; if it stays so, look for a proxy that changes downloads."
        )

    def _downloaded(self, name: str, target: Target, generation: int | None) -> bool:
        """Whether the content has arrived as it is in the bucket."""
        tries = self._tries()
        digest = _checksum()

        class Stream:
            """What the library writes to."""

            def write(self, part: bytes) -> int:
                digest.update(part)
                return target.write(part)

        with self._explained(f"read gs://{self.name}/{name}", "storage.objects.get"):
            blob = self._bucket.blob(name, generation=generation)
            try:
                # The library does not check what came in several pieces.
                blob.download_to_file(
                    Stream(), raw_download=True, checksum=None, retry=tries.retry()
                )
            except _vendor().NotFound:
                if not tries.failed:
                    raise
                return False  # Taken up in the middle, after somebody else has replaced it.
        return blob.crc32c in (None, _encoded(digest))

    def write(self, name: str, stream: IO[bytes], size_bytes: int, *, if_absent: bool) -> bool:
        """Write an object; return whether this call wrote.

        Args:
            name: of the object.
            stream: the content, read twice from its beginning.
            size_bytes: of the content.
            if_absent: leave an object alone that is there.
        """
        large = self._line.large if size_bytes > _SMALL_BYTES else nullcontext()
        # The service looks whether there is one when all has been sent.
        if if_absent and size_bytes > _SMALL_BYTES and self.find(name) is not None:
            return False
        with self._explained(f"write gs://{self.name}/{name}", "storage.objects.create"), large:
            crc32c = _digest_of(stream)
            for _ in range(_RESTARTS - 1):
                try:
                    return self._wrote(name, stream, size_bytes, crc32c, if_absent=if_absent)
                except Exception as error:
                    if not _may_begin_again(error):
                        raise
            return self._wrote(name, stream, size_bytes, crc32c, if_absent=if_absent)

    def _wrote(
        self, name: str, stream: IO[bytes], size_bytes: int, crc32c: str, *, if_absent: bool
    ) -> bool:
        blob, tries = self._bucket.blob(name, chunk_size=CHUNK_BYTES), self._tries()
        blob.crc32c = crc32c
        token = secrets.token_hex(16)
        if if_absent:
            blob.metadata = {_TOKEN: token}
        stream.seek(0)
        try:
            blob.upload_from_file(
                stream,
                size=size_bytes,
                content_type="application/octet-stream",
                if_generation_match=0 if if_absent else None,
                checksum=None,  # The digest is in the metadata: the service compares it.
                retry=tries.retry(),
            )
        except _vendor().PreconditionFailed:
            return bool(tries.failed) and self._token(name) == token
        return True

    def _token(self, name: str) -> str:
        """The name of the conditional write that made an object."""
        blob = self._bucket.blob(name)
        try:
            blob.reload(retry=self._tries().retry())
        except _vendor().NotFound:
            return ""
        return str((blob.metadata or {}).get(_TOKEN, ""))

    def find(self, name: str) -> Blob | None:
        """Return what the bucket says of an object; None if there is none."""
        with self._explained(f"look for gs://{self.name}/{name}", "storage.objects.get"):
            blob = self._bucket.blob(name)
            try:
                blob.reload(retry=self._tries().retry())
            except _vendor().NotFound as error:
                if _lacks_bucket(error):
                    raise
                return None
            return _blob(blob)

    def list(self, prefix: str, *, end: str = "", first: bool = False) -> Iterator[Blob]:
        """Yield the objects whose names begin so, sorted: those before `end`, or only the first."""
        with self._explained(f"list gs://{self.name}/{prefix}", "storage.objects.list"):
            found = self._line.client.list_blobs(
                self._bucket,
                prefix=prefix or None,
                end_offset=end or None,
                fields=_FIELDS,
                max_results=1 if first else None,
                retry=self._tries().retry(),
            )
            for blob in found:
                yield _blob(blob)

    def delete(self, name: str) -> bool:
        """Delete an object; return whether it was there."""
        tries = self._tries()
        with self._explained(f"delete gs://{self.name}/{name}", "storage.objects.delete"):
            try:
                self._bucket.blob(name).delete(retry=tries.retry())
            except _vendor().NotFound as error:
                if _lacks_bucket(error):
                    raise
                return bool(tries.failed)  # The answer to an earlier try was lost.
            return True

    @property
    def _line(self) -> _Line:
        # A forked process must not use its parent's connections.
        pid = os.getpid()
        if pid not in self._lines:
            with self._locks.setdefault(pid, threading.Lock()):
                if pid not in self._lines:
                    self._lines[pid] = _connected(self.name, self._at_once)
        return self._lines[pid]

    @property
    def _bucket(self) -> storage.Bucket:
        return self._line.bucket

    def _tries(self) -> _Tries:
        return _Tries(self._line, self._patience_s)

    @contextmanager
    def _explained(self, doing: str, permission: str) -> Iterator[None]:
        """Turn errors of the library into ours."""
        line = self._line
        try:
            yield
            line.answers = True
        except _failures() as error:
            raise _ours(error, doing, permission, self.name) from error


class _Line:
    """The connections of one process to a bucket."""

    def __init__(self, client: storage.Client, bucket: str) -> None:
        self.client = client
        self.bucket = client.bucket(bucket)
        self.large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self.answers = False
        """Whether the service has answered once."""


class _Tries:
    """The tries of one call: what failed and is tried again."""

    def __init__(self, line: _Line, patience_s: float) -> None:
        self._line = line
        self._patience_s = patience_s
        self._began = time.monotonic()
        self.failed = 0

    def retry(self) -> Retry:
        """What the library asks whether to try again."""
        from google.api_core.retry import Retry

        return Retry(
            predicate=self._may_succeed,
            initial=_PAUSE_S,
            maximum=_LONGEST_PAUSE_S,
            timeout=self._patience_s,
        )

    def _may_succeed(self, error: Exception) -> bool:
        status = _status(error)
        self._line.answers |= bool(status)
        again = status in _MARKS if status else _is_broken_connection(error)
        if again and not self._line.answers:
            again = time.monotonic() - self._began < _FIRST_PATIENCE_S
        self.failed += again
        return again


def _connected(name: str, at_once: int) -> _Line:
    try:
        with warnings.catch_warnings():
            # of a package that only gRPC's users need
            warnings.simplefilter("ignore", ImportWarning)
            import google_crc32c  # noqa: F401  only whether it is there
            from google.auth.exceptions import DefaultCredentialsError
            from google.cloud import storage
            from requests.adapters import HTTPAdapter
    except ImportError as error:
        raise StoreError(
            f"gs://{name} needs the packages of Google Cloud Storage: {error}. Run `pip install "
            "'kinetic-sdk[gcp]'`."
        ) from error
    try:
        with warnings.catch_warnings():
            # "end user credentials without a quota project", which storage does not need
            warnings.simplefilter("ignore", UserWarning)
            client = storage.Client(project=None)
    except DefaultCredentialsError as error:
        raise StoreError(_no_credentials(name)) from error
    except Exception as error:
        raise StoreError(
            f"gs://{name} cannot be reached: {_said(error)}. Check the credentials that "
            "GOOGLE_APPLICATION_CREDENTIALS names."
        ) from error
    # One that looks up buckets in the background, with a permission that nobody needs.
    client._bucket_metadata_cache = None
    adapter = HTTPAdapter(pool_connections=2, pool_maxsize=at_once)
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, adapter)
    client._http.hooks["response"].append(_read_refusal)
    return _Line(client, name)


def _read_refusal(response: Any, **_options: Any) -> None:
    """Read what was not asked for, so that the connection is free: the library leaves it open."""
    if not response.ok:
        response.content  # noqa: B018  read by looking at it


def _vendor() -> Any:
    from google.api_core import exceptions

    return exceptions


def _failures() -> tuple[type[BaseException], ...]:
    """What the library raises where it is called: all but our own errors."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return (GoogleAPIError, GoogleAuthError, RequestException, HTTPError, OSError, ValueError)


def _ours(error: BaseException, doing: str, permission: str, bucket: str) -> Exception:
    cause = getattr(error, "cause", None) or error  # of one that was tried in vain
    status = _status(cause)
    if status == 404 and not _lacks_bucket(cause):
        return NotFound(f"Could not {doing}: there is no such object.")
    if status == 404:
        what = f"there is no bucket {bucket!r}. Check its name, or create it: `gcloud storage "
        return StoreError(f"Could not {doing}: {what}buckets create gs://{bucket}`.")
    if status == 403:
        reading = permission.endswith((".get", ".list"))
        role = "roles/storage.objectViewer" if reading else "roles/storage.objectUser"
        return StoreError(
            f"Could not {doing}: you may not. It takes the permission {permission} on "
            f"gs://{bucket}, which {role} has. Google says: {_said(cause)}"
        )
    if status == 401 or _is_refused_credentials(cause):
        return StoreError(
            f"Could not {doing}: Google does not accept these credentials: {_said(cause)}. Run "
            "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to "
            "the key of a service account."
        )
    again = " It was tried for a while." if cause is not error else ""
    return StoreError(f"Could not {doing}: {_said(cause)}.{again}")


def _no_credentials(bucket: str) -> str:
    return (
        f"There are no Google credentials on this machine for gs://{bucket}. Run `gcloud auth "
        "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key of a service "
        "account; in a pod, give its service account access by Workload Identity."
    )


def _said(error: BaseException) -> str:
    """What the service says, without the address that the library adds."""
    response = getattr(error, "response", None)
    text = str(getattr(response, "text", "") or "")
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    if not text or text.startswith("<"):
        text = str(getattr(error, "message", "") or error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[0][:500].rstrip(".")


def _status(error: BaseException) -> int:
    """The HTTP status of an answer; 0 if there was none."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return int(code)
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _lacks_bucket(error: BaseException) -> bool:
    return "bucket does not exist" in str(error)


def _may_begin_again(error: BaseException) -> bool:
    """Whether an upload failed, but another may succeed: it arrived damaged; its session is gone;
    or the service kept less of a chunk than it was sent, which the library does not expect."""
    status = _status(error)
    if status in (404, 410):
        return not _lacks_bucket(error)
    if status == 400:
        return "match calculated" in str(error)
    return isinstance(error, ValueError) and "Bytes stream" in str(error)


def _is_refused_credentials(error: BaseException) -> bool:
    from google.auth.exceptions import GoogleAuthError, TransportError

    return isinstance(error, GoogleAuthError) and not isinstance(error, TransportError)


def _is_broken_connection(error: BaseException) -> bool:
    from http.client import HTTPException

    from google.auth.exceptions import TransportError
    from requests import exceptions as of_requests
    from urllib3 import exceptions as of_urllib3

    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    broken = (
        ConnectionError,
        HTTPException,
        TransportError,
        of_requests.ConnectionError,
        of_requests.ChunkedEncodingError,
        of_requests.Timeout,
        of_urllib3.PoolError,
        of_urllib3.ProtocolError,
        of_urllib3.SSLError,
        of_urllib3.TimeoutError,
    )
    return isinstance(error, broken)


def _blob(blob: storage.Blob) -> Blob:
    return Blob(blob.name, int(blob.size or 0), blob.crc32c or "", int(blob.generation or 0))


def _checksum() -> Any:
    import google_crc32c

    return google_crc32c.Checksum()


def _encoded(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()


def _digest_of(stream: IO[bytes]) -> str:
    digest = _checksum()
    stream.seek(0)
    while part := stream.read(1 << 20):
        digest.update(part)
    return _encoded(digest)
