"""A store in another process, reached through a Unix socket.

In: keys and bytes; in the other process, the store that is served. Out: bytes, or the error that
the store raised there.

Each connection carries one request and one answer at a time: a line of JSON, then as many bytes as
the line says. The socket is private to its owner, as a store's folder is.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import socketserver
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from kinetic import errors
from kinetic._core import record
from kinetic._core.values import dataclass
from kinetic._store import files
from kinetic._store.base import Entry, Store, check_key
from kinetic._store.memory import read_whole
from kinetic.errors import CorruptRecord, KineticError, StoreError

_ERRORS = ("NotFound", "UsageError", "StoreFull", "CorruptRecord", "StoreError")
_VALUES = {"get": type(None), "put": bool, "has": bool, "list": list, "delete": int}
_VALUES |= {"renew": bool, "parts": list, "entries": list, "drop": bool}
"""The type of each call's answer."""
_AT_ONCE = 32
_PATIENCE_S = 60.0
"""How long a server may be silent during a call before it counts as gone."""


class ServedStore:
    """A `Store` that another process serves at a socket."""

    def __init__(self, path: Path, *, patience_s: float = _PATIENCE_S) -> None:
        self._path = Path(path).absolute()
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close, self._idle)

    def __repr__(self) -> str:
        return f"ServedStore({str(self._path)!r})"

    @property
    def uri(self) -> str:
        """The socket."""
        from urllib.parse import quote

        return f"unix://{quote(str(self._path))}"

    @property
    def calls_at_once(self) -> int:
        """Many: each connection is served by its own thread."""
        return _AT_ONCE

    def as_folder(self) -> None:
        """There is no folder."""
        return

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        check_key(key)
        return self._call("get", key)[1]

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically."""
        files.save(path, [self.get(key)], sha256=sha256)

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return whether this
        call wrote."""
        check_key(key)
        return bool(self._call("put", key, read_whole(data), if_absent=if_absent)[0])

    def has(self, key: str) -> bool:
        """Return whether the key exists."""
        check_key(key)
        return bool(self._call("has", key)[0])

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted."""
        if prefix:
            check_key(prefix)
        return iter(self._call("list", prefix)[0])

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        check_key(prefix)
        return int(self._call("delete", prefix)[0])

    def renew(self, key: str) -> bool:
        """Return whether the key exists; if so it counts as written recently."""
        check_key(key)
        return bool(self._call("renew", key)[0])

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the next part of all keys that have parts below the prefix and that one."""
        check_key(prefix)
        return iter(self._call("parts", prefix)[0])

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield what `list` yields, with sizes and times."""
        check_key(prefix)
        return itertools.starmap(Entry, self._call("entries", prefix)[0])

    def drop(self, entry: Entry) -> bool:
        """Delete an object if it is unchanged since it was listed; return whether this call did."""
        check_key(entry.key)
        return bool(self._call("drop", entry.key, json.dumps(entry).encode())[0])

    def _call(self, name: str, key: str, body: bytes = b"", **more: bool) -> tuple[Any, bytes]:
        try:
            with self._connection() as connection:
                _send(connection.stream, {"call": name, "key": key, **more}, body)
                answer, data = _receive(connection.stream)
                if "error" not in answer and not isinstance(answer.get("value"), _VALUES[name]):
                    raise ValueError("the answer is not one of a store")
        except (OSError, ValueError) as error:
            raise StoreError(
                f"Could not {name} {key!r} in the store at {self._path}: {error}. Is the process "
                "that serves it still there?"
            ) from error
        if "error" in answer:
            kind = answer["error"] if answer["error"] in _ERRORS else "StoreError"
            raise getattr(errors, kind)(str(answer.get("message", "")))
        return answer["value"], data

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection for one call; reused if the call succeeds."""
        with self._lock:
            # A forked process must not use its parent's connections.
            self._idle[:] = [each for each in self._idle if each.pid == os.getpid()]
            connection = None
            while self._idle and connection is None:
                connection = each if (each := self._idle.pop()).is_idle() else None
        connection = connection or _connect(self._path, self._patience_s)
        try:
            yield connection
        except BaseException:
            connection.stream.close()
            raise
        with self._lock:
            self._idle.append(connection)


@dataclass(frozen=True)
class _Connection:
    """A connection, and the process that opened it."""

    pid: int
    fd: int
    stream: BufferedIOBase

    def is_idle(self) -> bool:
        """Whether nothing is to be read. Otherwise the other side has closed it, as a restarted
        server does."""
        look = select.poll()
        look.register(self.fd, select.POLLIN)
        return not look.poll(0)


def _close(connections: list[_Connection]) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.stream.close()


def _connect(path: Path, patience_s: float) -> _Connection:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(patience_s)
        connection.connect(str(path))
        return _Connection(os.getpid(), connection.fileno(), connection.makefile("rwb"))


@contextmanager
def serve_store(store: Store, path: Path) -> Iterator[ServedStore]:
    """Serve a store on a socket to this user's processes, while the `with` block runs.

    Raises:
        StoreError: another process serves a store there.
    """
    _take_over(path)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError, ValueError):
                while True:
                    request, body = _receive(self.rfile)
                    _send(self.wfile, *_answer(store, request, body))

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    with Server(str(path), Handler) as server:
        path.chmod(0o600)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield ServedStore(path)
        finally:
            server.shutdown()
            thread.join()
            path.unlink(missing_ok=True)


def _take_over(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise StoreError(f"Another process serves a store at {path}. Choose another path.")


def _answer(store: Store, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    name, key = request["call"], request["key"]
    try:
        match name:
            case "get":
                return {"value": None}, store.get(key)
            case "put":
                return {"value": store.put(key, body, if_absent=request["if_absent"])}, b""
            case "has":
                return {"value": store.has(key)}, b""
            case "list":
                return {"value": list(store.list(key))}, b""
            case "delete":
                return {"value": store.delete(key)}, b""
            case "renew":
                return {"value": store.renew(key)}, b""
            case "parts":
                return {"value": list(store.parts(key))}, b""
            case "entries":
                return {"value": list(store.entries(key))}, b""
            case "drop":
                return {"value": store.drop(Entry(*json.loads(body)))}, b""
    except KineticError as error:
        kind = next((n for n in _ERRORS if isinstance(error, getattr(errors, n))), "StoreError")
        return {"error": kind, "message": str(error)}, b""
    return {"error": "StoreError", "message": f"There is no call {name!r}."}, b""


def _send(stream: BufferedIOBase, head: dict[str, Any], body: bytes) -> None:
    stream.write(json.dumps(head | {"size_bytes": len(body)}).encode() + b"\n")
    stream.write(body)
    stream.flush()


def _receive(stream: BufferedIOBase) -> tuple[dict[str, Any], bytes]:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection was closed")
    try:
        head = record.parse(line)
    except CorruptRecord as error:
        raise ValueError(f"not a message: {error}") from error
    size_bytes = head.get("size_bytes")
    if not isinstance(size_bytes, int) or not 0 <= size_bytes <= sys.maxsize:
        raise ValueError("not a message: it has no size")
    body = stream.read(size_bytes)
    if len(body) < size_bytes:
        raise ConnectionResetError("the connection was closed")
    return head, body
