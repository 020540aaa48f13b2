"""The store server on the head of a Ray cluster: `python -m kinetic._host.ray.store_server`.

Requests from `kinetic._store.ray` are packages in the cluster's control store; the server changes a
folder, and writes its responses as files. It is a Ray job of its own, runs on the head as long as
the head lives, and needs only Ray and the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kinetic._store import ray_protocol
from kinetic._store.base import pause_after
from kinetic._store.local import LocalStore
from kinetic._system import locks
from kinetic.errors import KineticError, StoreError
from kinetic.version import __version__

POLL_SOON_S, POLL_S = 0.005, 0.1
"""Seconds between two polls for requests, soon after a request and later. Each poll burdens Ray's
control store."""
RESPONSES_LIVE_S, PARTS_LIVE_S = 120.0, 300.0
"""Lifetimes of a response and of the parts of a large file. A response is usually read within a
second, but clients repeat a request for up to a minute."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Packages(Protocol):
    """The control store of the cluster: packages by name."""

    def names(self) -> list[str]:
        """Return the names of the packages that are requests."""
        ...

    def open(self, name: str) -> bytes | None:
        """Return a package, or None if it was deleted."""
        ...

    def discard(self, name: str) -> None:
        """Delete a package."""
        ...


class StoreServer:
    """Carries out requests, one after the other.

    Args:
        folder: folder of the head's logs.
        packages: the requests.
    """

    def __init__(self, folder: Path, packages: Packages) -> None:
        self._folder = folder
        self._packages = packages
        self._store = LocalStore(folder / ray_protocol.CONTENT)
        for name in (ray_protocol.RESPONSES, ray_protocol.UPLOADS):
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._answered = self._list_answered()

    def work(self) -> int:
        """Answer all requests, the oldest first, and return their number. So if a client gave up
        and sent a second request for a key, the second one wins."""
        names = sorted(self._packages.names())
        for name in names:
            self._answer(name)
        return len(names)

    def tidy(self) -> None:
        """Remove old responses that were not read, and uploads that were not completed."""
        now = time.time()
        lives = (ray_protocol.RESPONSES, RESPONSES_LIVE_S), (ray_protocol.UPLOADS, PARTS_LIVE_S)
        for name, live_s in lives:
            for entry in os.scandir(self._folder / name):
                if entry.stat().st_mtime < now - live_s:
                    Path(entry.path).unlink(missing_ok=True)
        self._answered = self._list_answered()

    def _list_answered(self) -> set[str]:
        return {
            name.partition("=")[0] for name in os.listdir(self._folder / ray_protocol.RESPONSES)
        }

    def _answer(self, name: str) -> None:
        package = self._packages.open(name)
        if package is None:
            return
        request_id = ray_protocol.request_id_of(name)
        # A client repeats a request if the dashboard's response was lost. The id is checked because
        # it becomes a file name, and any client of the cluster may send one.
        if request_id.isalnum() and request_id not in self._answered:
            self._write_response(request_id, self._respond(package))
            self._answered.add(request_id)
        self._packages.discard(name)

    def _respond(self, package: bytes) -> dict[str, Any]:
        try:
            return {"value": self._do(*ray_protocol.unpack_request(package))}
        except KineticError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - no request may end the server
            full = isinstance(error, OSError) and error.errno in _FULL
            kind = "StoreFull" if full else "StoreError"
            return {"error": kind, "message": f"{type(error).__name__}: {error}"}

    def _write_response(self, request_id: str, response: Mapping[str, Any]) -> None:
        file, content = ray_protocol.response_name(request_id, response)
        try:
            self._publish(file, content)
        except OSError as error:
            # A full disk may still have room for an empty file, whose name is the response.
            kind = response.get("error", "StoreError")
            failure = {"error": kind, "message": error.strerror or "no response"}
            with contextlib.suppress(OSError):
                self._publish(*ray_protocol.response_name(request_id, failure))

    def _publish(self, file: str, content: bytes) -> None:
        unfinished = self._folder / ray_protocol.UPLOADS / file
        try:
            unfinished.write_bytes(content)
            unfinished.rename(self._folder / ray_protocol.RESPONSES / file)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _do(self, request: Mapping[str, Any], data: bytes) -> Any:
        match request["do"]:
            case "append":
                return self._append(request, data)
            case "put":
                return self._put(request, data)
            case "delete":
                return self._store.delete(request["prefix"])
            case "renew":
                return self._renew(request["key"])
            case "entries":
                return [list(entry) for entry in self._store.entries(request["prefix"])]
            case "swap":
                return self._swap(request["key"], data, request["old_bytes"])
        raise ValueError(
            f"this store server (kinetic {__version__}) does not know {request['do']!r}"
        )

    def _append(self, request: Mapping[str, Any], data: bytes) -> int:
        """Write a part of an upload at its position; a repeated part changes nothing.

        Raises:
            StoreError: earlier parts are missing, because `tidy` has removed them.
        """
        upload = self._upload(request["upload"])
        size = upload.stat().st_size if upload.exists() else 0
        at = request.get("at", size)
        if at > size:
            raise StoreError(
                f"The upload {request['upload']} was interrupted for more than {PARTS_LIVE_S:g} s, "
                "so nothing was written. Try again."
            )
        with upload.open("r+b" if upload.exists() else "xb") as file:
            file.seek(at)
            return file.write(data)

    def _put(self, request: Mapping[str, Any], data: bytes) -> bool:
        if "upload" not in request:
            return self._store.put(request["key"], data, if_absent=request["if_absent"])
        upload = self._upload(request["upload"])
        try:
            return self._store.put(request["key"], upload, if_absent=request["if_absent"])
        finally:
            upload.unlink(missing_ok=True)

    def _swap(self, key: str, data: bytes, old_bytes: int) -> bool:
        """Replace an object if its content is the old one: `data` is the old content of `old_bytes`
        bytes, then the new. Atomic, because only this server writes into the folder."""
        if not self._store.has(key) or self._store.get(key) != data[:old_bytes]:
            return False
        return self._store.put(key, data[old_bytes:])

    def _renew(self, key: str) -> bool:
        """Set an object's time to now, so that it is not removed as unused. On a shared folder, a
        lock protects objects instead; clients of this server have none."""
        if not self._store.has(key):
            return False
        os.utime(self._store.path(key))
        return True

    def _upload(self, name: str) -> Path:
        if not name.isalnum():
            raise ValueError(f"{name!r} is not the name of an upload")
        return self._folder / ray_protocol.UPLOADS / name


class _ControlStore:
    """The packages that clients have sent to the dashboard."""

    def __init__(self) -> None:
        from ray.experimental import internal_kv

        self._kv = internal_kv
        self._prefix = "gcs://"

    def names(self) -> list[str]:
        """Return the names of the packages that are requests."""
        keys = self._kv._internal_kv_list(f"{self._prefix}{ray_protocol.PACKAGE_PREFIX}".encode())
        return [key.decode().removeprefix(self._prefix) for key in keys]

    def open(self, name: str) -> bytes | None:
        """Return a package, or None if it was deleted."""
        package = self._kv._internal_kv_get(f"{self._prefix}{name}".encode())
        return None if package is None else bytes(package)

    def discard(self, name: str) -> None:
        """Delete a package."""
        self._kv._internal_kv_del(f"{self._prefix}{name}".encode())


def main() -> int:
    """Serve the store of this head, unless another server does."""
    import ray

    ray.init(address="auto", namespace="kinetic", log_to_driver=False)
    from ray._private import worker

    folder = Path(worker._global_node.get_logs_dir_path())
    (folder / ray_protocol.FOLDER).mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / ray_protocol.SERVER, os.O_RDWR | os.O_CREAT, 0o600)
    if not locks.try_hold_record(lock):
        return 0
    _serve(StoreServer(folder, _ControlStore()))
    return 1


def _serve(server: StoreServer) -> None:
    worked_at = time.monotonic()
    server.tidy()
    tidied_at = worked_at
    while True:
        now = time.monotonic()
        if server.work():
            worked_at = now
        if now > tidied_at + RESPONSES_LIVE_S:
            server.tidy()
            tidied_at = now
        time.sleep(pause_after(now - worked_at, POLL_SOON_S, POLL_S))


if __name__ == "__main__":
    sys.exit(main())
