"""HTTP of the API server: connections, requests and responses.

Connections stay open. To clients, `stop` and `start` look like a restart of the server.
"""

from __future__ import annotations

import json
import select
import socket
import socketserver
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from doubles.cluster.faults import Faults, Stream
from doubles.cluster.problems import Refused, status

LARGEST_BODY = 3_145_728
REASONS = {200: "OK", 201: "Created", 204: "No Content", 404: "Not Found"}
READ_BYTES = 1 << 16


@dataclass
class Request:
    """A client's request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.monotonic)
    verb: str = ""
    resource: str = ""
    user: str = ""
    code: int = 0


@dataclass
class Answer:
    """The response to a request: an object, text, or pieces that are sent as they are produced."""

    code: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Iterator[bytes] | None = None
    content_type: str = "application/json"
    stream: Stream | None = None
    upgrade: Callable[[socket.socket], None] | None = None
    """A function that takes over the connection."""


class LeftError(Exception):
    """The client has disconnected."""


class Server:
    """The listener and its connections."""

    def __init__(self, answer: Callable[[Request], Answer], faults: Faults) -> None:
        self._answer, self._faults = answer, faults
        self._listener: socketserver.ThreadingTCPServer | None = None
        self._thread: threading.Thread | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.crashes: list[str] = []
        self.port = 0

    def start(self) -> None:
        """Start to listen, on the same port as before if the server was stopped."""
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                server._serve(self.request)

        class Listener(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 512

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # The client has disconnected.

        self._listener = Listener(("127.0.0.1", self.port), Handler)
        self.port = self._listener.server_address[1]
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.02,), name="api server", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        listener.shutdown()
        listener.server_close()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    # --- one connection

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        try:
            buffered = b""
            while self._listener is not None:
                request, buffered = _read(connection, buffered)
                if request is None:
                    return
                if not self._respond(connection, request):
                    return
        except (LeftError, OSError, ValueError):
            return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _respond(self, connection: socket.socket, request: Request) -> bool:
        """Answer one request; return True if the connection stays open."""
        try:
            answer = self._answer(request)
        except Refused as refused:
            answer = Answer(refused.code, refused.body, dict(refused.headers))
        except Exception:
            self.crashes.append(f"{request.method} {request.path}\n{traceback.format_exc()}")
            message = "the test double itself failed; see FakeCluster.crashes"
            answer = Answer(500, status(500, "InternalError", message))
        request.code = answer.code
        if answer.code == 0:  # No response at all.
            _reset(connection)
            return False
        if answer.upgrade is not None:
            connection.sendall(_head(answer.code, answer.headers))
            answer.upgrade(connection)
            return False
        if answer.pieces is not None:
            self._stream(connection, answer)
            return answer.stream is None or answer.stream.broken is None
        if isinstance(answer.body, str):
            body, kind = answer.body.encode(), "text/plain; charset=utf-8"
        elif answer.body is None:
            body, kind = b"", ""
        else:
            body, kind = json.dumps(answer.body, separators=(",", ":")).encode(), ""
            kind = answer.content_type
        headers = answer.headers | ({"Content-Type": kind} if kind else {})
        if answer.code != 204:
            headers["Content-Length"] = str(len(body))
        connection.sendall(_head(answer.code, headers) + body)
        return request.headers.get("connection", "").lower() != "close"

    def _stream(self, connection: socket.socket, answer: Answer) -> None:
        stream = answer.stream
        headers = answer.headers | {"Content-Type": answer.content_type}
        assert answer.pieces is not None
        last = b""
        try:
            connection.sendall(_head(answer.code, headers | {"Transfer-Encoding": "chunked"}))
            for piece in answer.pieces:
                if stream is not None and stream.broken is not None:
                    self._break(connection, stream.broken.where, piece or last)
                    return
                if self._listener is None:
                    raise LeftError
                if piece:
                    connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
                    last = piece
                elif _has_left(connection):
                    raise LeftError
            connection.sendall(b"0\r\n\r\n")
        finally:
            answer.pieces.close()  # type: ignore[attr-defined]
            if stream is not None:
                self._faults.closed(stream)

    @staticmethod
    def _break(connection: socket.socket, where: str, piece: bytes) -> None:
        """Break a stream as a test has requested; the rest is not sent."""
        half = piece[: max(len(piece) // 2, 1)] or b'{"type":"MODI'
        if where == "end":
            connection.sendall(b"0\r\n\r\n")
        elif where == "line":  # Send half a line, then end properly.
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(half), half))
        elif where == "chunk":  # Cut off the transfer itself.
            connection.sendall(b"%x\r\n%b" % (len(half) * 2 + 10, half))
        if where == "reset":
            _reset(connection)
        else:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _read(connection: socket.socket, buffered: bytes) -> tuple[Request | None, bytes]:
    while b"\r\n\r\n" not in buffered:
        data = connection.recv(READ_BYTES)
        if not data:
            return None, b""
        buffered += data
    head, _, rest = buffered.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", 0))
    parts = [rest]
    have = len(rest)
    while have < length:
        data = connection.recv(READ_BYTES)
        if not data:
            return None, b""
        parts.append(data)
        have += len(data)
    whole = b"".join(parts)
    url = urlsplit(target)
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    request = Request(method, url.path, query, headers, whole[:length])
    return request, whole[length:]


def _head(code: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {code} {REASONS.get(code, 'Status')}"]
    headers = {"Date": formatdate(usegmt=True)} | headers
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _has_left(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _reset(connection: socket.socket) -> None:
    """Close the connection without a response, so that the client sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
