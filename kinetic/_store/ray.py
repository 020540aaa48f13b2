"""A store in a folder of a Ray cluster's head, reached through the cluster's dashboard alone.

The folder is in the folder of the head's logs, which the dashboard can read, so that reads need no
program of kinetic's. Each change is a request to the store server (`_host.ray.store_server`), a
program on the head that acts like `LocalStore`, so that the store keeps the promises of a folder.
The store is lost with the head.
"""

from __future__ import annotations

import glob
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kinetic._ray import address, store_servers
from kinetic._ray.jobs_api import JobsApi
from kinetic._store import files, ray_protocol
from kinetic._store.base import Entry, check_key
from kinetic._store.transfer import open_stream
from kinetic.errors import (
    BackendUnavailable,
    KineticError,
    NotFound,
    PreflightError,
    StoreError,
    StoreFull,
    SubmitError,
    UsageError,
)

PART_BYTES = 8 << 20
"""Largest content of one request, in bytes: Ray's control store holds requests in memory."""
ANSWERED_WITHIN_S = 60.0
_RESEND_PAUSE_S = 1.0
_REVIVE_AFTER_S = 5.0
"""Seconds without an answer after which the store server may have ended."""
_RESTART_TAKES_S = 25.0
_AT_ONCE = 8
_POLLS_S = (0.01, 0.02, 0.05, 0.1)
_ERRORS: dict[str, type[KineticError]] = {
    kind.__name__: kind for kind in (StoreError, StoreFull, UsageError, NotFound)
}
_CHECKED_FIRST_BYTES = 64 << 10
_MOST_EXISTING = 1000


class RayStore:
    """A `Store` in a folder of a Ray cluster's head.

    Args:
        uri: ray+http://host:8265, or ray+https://.
        api: the dashboard's API; by default one for the address.
        sleep, clock: replaced by tests.
    """

    calls_at_once = _AT_ONCE
    is_unmetered = True

    def __init__(
        self,
        uri: str,
        *,
        api: JobsApi | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uri = uri.rstrip("/")
        self._api = api or address.connect(self._uri.removeprefix("ray+"))
        self._sleep = sleep
        self._clock = clock
        self._head = ""
        self._existing: set[str] = set()
        """Keys that existed at their last read."""

    def __repr__(self) -> str:
        return f"RayStore({self._uri!r})"

    @property
    def uri(self) -> str:
        """The dashboard's address, with "ray+" before its scheme."""
        return self._uri

    # --- reads through the dashboard

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        sink = io.BytesIO()
        self._read(key, sink.write)
        return sink.getvalue()

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically."""
        check_key(key)
        with files.write_atomically(path, sha256=sha256) as sink:
            self._read(key, sink.write)

    def has(self, key: str) -> bool:
        """True if the key exists."""
        path = _log_path(key)
        return path in self._list(glob.escape(path))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted; "" is the whole store."""
        folder = _log_path(prefix) if prefix else ray_protocol.CONTENT
        paths = self._list(f"{glob.escape(folder)}/**/*")
        keys = [path.removeprefix(f"{ray_protocol.CONTENT}/") for path in paths if path[-1] != "/"]
        whole = (ray_protocol.key_of(key) for key in keys if not key.startswith(".tmp/"))
        return iter(sorted(whole))

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the names of the "folders" directly below the prefix, sorted."""
        paths = self._list(f"{glob.escape(_log_path(prefix))}/*")
        names = (PurePosixPath(path).name for path in paths if path.endswith("/"))
        yield from sorted(filter(ray_protocol.is_whole_part, names))

    def _read(self, key: str, write: Callable[[bytes], object]) -> None:
        exists = False
        # Check first: the dashboard logs a traceback for a missing file.
        if key in self._existing or self.has(key):
            self._existing.discard(key)
            # If the file was deleted meanwhile, Ray sends an error or, seldom, nothing.
            with _translate_errors(f"read {key!r}", self._uri), suppress(NotFound):
                for part in self._api.read_log(self._find_head(), _log_path(key)):
                    exists = True
                    write(part)
            exists = exists or self.has(key)
        if not exists:
            raise NotFound(
                f"{key!r} is missing from the store {self._uri}: it was removed, or never written."
            )
        if len(self._existing) >= _MOST_EXISTING:
            self._existing.clear()
        self._existing.add(key)

    def _list(self, pattern: str) -> Sequence[str]:
        with _translate_errors("list objects", self._uri):
            try:
                return self._api.list_logs(self._find_head(), pattern)
            except BackendUnavailable:  # The head may have been replaced.
                self._head = ""
                return self._api.list_logs(self._find_head(), pattern)

    def _find_head(self) -> str:
        if not self._head:
            heads = [node for node in self._api.nodes() if node.is_head]
            if not heads:
                raise BackendUnavailable(f"The Ray cluster at {self._api.address} has no head.")
            # Prefer a live head, but accept another: Ray may report a slow head as dead.
            self._head = max(heads, key=lambda node: node.is_alive).node_id
        return self._head

    # --- changes through the store server

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return whether this
        call wrote."""
        path = ray_protocol.path_of(key)
        with open_stream(data) as stream:
            size_bytes = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            if if_absent and size_bytes > _CHECKED_FIRST_BYTES and self.has(key):
                return False
            request = {"do": "put", "key": path, "if_absent": if_absent}
            if size_bytes > PART_BYTES:
                upload = os.urandom(16).hex()
                for at in range(0, size_bytes, PART_BYTES):
                    part = stream.read(PART_BYTES)
                    self._ask({"do": "append", "upload": upload, "at": at}, part)
                return bool(self._ask(request | {"upload": upload}))
            return bool(self._ask(request, stream.read()))

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        return int(self._ask({"do": "delete", "prefix": ray_protocol.path_of(prefix)}))

    def renew(self, key: str) -> bool:
        """Make the key count as written now, and return whether it exists."""
        return bool(self._ask({"do": "renew", "key": ray_protocol.path_of(key)}))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the keys below the prefix like `list`, with sizes and times."""
        for path, *rest in self._ask({"do": "entries", "prefix": ray_protocol.path_of(prefix)}):
            yield Entry(ray_protocol.key_of(path), *rest)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` if the content of the key is `old`; return whether this call wrote."""
        request = {"do": "swap", "key": ray_protocol.path_of(key), "old_bytes": len(old)}
        return bool(self._ask(request, old + new))

    def _ask(self, request: ray_protocol.Request, data: bytes = b"") -> Any:
        # Ids begin with the time: the store server sorts one writer's requests by name.
        request_id = f"{time.time_ns():016x}{os.urandom(8).hex()}"
        with _translate_errors("write an object", self._uri):
            package = ray_protocol.pack_request(request, data)
            self._send_package(ray_protocol.package_name(request_id), package)
            response = self._await_response(request_id)
        if "error" in response:
            raise _ERRORS.get(response["error"], StoreError)(response["message"])
        return response["value"]

    def _send_package(self, name: str, package: bytes) -> None:
        """Send a package, again and again while the dashboard does not answer: a short outage must
        not lose the value of a function that ran for days. The server handles it only once."""
        give_up_at = self._clock() + ANSWERED_WITHIN_S
        while True:
            try:
                return self._api.put_package(name, package)
            except BackendUnavailable:
                if self._clock() > give_up_at:
                    raise
            self._sleep(_RESEND_PAUSE_S)

    def _find_response(self, request_id: str) -> Sequence[str] | StoreError:
        """Return the path of the response's file in a list, which is empty while there is none. If
        the dashboard is unavailable, return the error: the server may have got the request."""
        try:
            return self._list(f"{ray_protocol.RESPONSES}/{request_id}=*")
        except StoreError as error:
            return error

    def _await_response(self, request_id: str) -> dict[str, Any]:
        asked_at = self._clock()
        revive_at = asked_at + _REVIVE_AFTER_S
        died = ""
        polls = iter(_POLLS_S)
        pause_s = 0.0
        while True:
            names = self._find_response(request_id)
            for name in () if isinstance(names, StoreError) else names:
                is_whole, response = ray_protocol.read_response_name(PurePosixPath(name).name)
                if not is_whole:
                    parts = self._api.read_log(self._find_head(), name)
                    response = json.loads(b"".join(parts))
                return dict(response)
            now = self._clock()
            if now > asked_at + ANSWERED_WITHIN_S:
                silence = StoreError(_explain_silence(self._uri, died))
                raise names if isinstance(names, StoreError) else silence
            if now > revive_at:
                with suppress(BackendUnavailable):
                    died = store_servers.revive_server(self._api) or died
                revive_at = now + (_RESTART_TAKES_S if died else _REVIVE_AFTER_S)
            pause_s = next(polls, pause_s)
            self._sleep(pause_s)


def _explain_silence(uri: str, died: str) -> str:
    if died:
        return (
            f"The server of the store {uri} ended ({died}) and has not answered since its restart. "
            "`ray job logs` of that job says more; the next write tries again."
        )
    return (
        f"The server of the store {uri} does not answer. If the head of the Ray cluster is "
        "overloaded, try again later. If the store server hangs, run `ray job stop` for its job "
        "(kinetic-store-server-…): the next write starts it again."
    )


def _log_path(key: str) -> str:
    return f"{ray_protocol.CONTENT}/{ray_protocol.path_of(key)}"


@contextmanager
def _translate_errors(doing: str, uri: str) -> Iterator[None]:
    """Turn errors of the dashboard into the store's."""
    try:
        yield
    except (BackendUnavailable, PreflightError, SubmitError) as error:
        raise StoreError(f"Could not {doing} in the store {uri}: {error}") from error
