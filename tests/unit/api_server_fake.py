"""An API server over real sockets, with scripted answers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """An answer: a whole body, or chunks. A chunk that is an exception breaks the connection."""

    status: int = 200
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes | type[Exception]] | None = None
    wait_for: threading.Event | None = None


class Break(Exception):
    """A class to put among the chunks of a `Reply`: the connection breaks at this point."""


@dataclass
class Script:
    """The replies that a server gives in order, and the requests that it received."""

    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[str, str, Any, str]] = field(default_factory=list)
    impersonated: list[tuple[str, str]] = field(default_factory=list)
    proxy_authorization: list[str] = field(default_factory=list)
    url: str = ""
    date: str = "Thu, 01 Jan 1970 01:00:00 GMT"

    def request_lines(self) -> list[str]:
        return [f"{method} {path}" for method, path, _, _ in self.requests]


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp: float | None = None) -> str:
            return script.date

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            headers = self.headers.items()
            script.impersonated += [h for h in headers if h[0].startswith("Impersonate-")]
            script.proxy_authorization += self.headers.get_all("Proxy-Authorization", [])
            script.requests.append(
                (
                    self.command,
                    self.path,
                    json.loads(body) if body else None,
                    self.headers.get("authorization") or "",
                )
            )
            reply = script.replies.pop(0) if script.replies else Reply(500, "no reply left")
            if reply.status == 0:
                self.close_connection = True
                return
            if reply.chunks is not None:
                self.send_chunks(reply)
                return
            data = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data.encode())

        def send_chunks(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for chunk in reply.chunks or ():
                if not isinstance(chunk, bytes):
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if reply.wait_for is not None:
                reply.wait_for.wait(100)
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = do_PATCH = do_CONNECT = answer

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve a script's replies on a local port, with TLS if given; yield the server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
