"""Google Cloud Storage on this machine: the part of its JSON API that its Python client uses.

Clients find it by STORAGE_EMULATOR_HOST. The double logs the requests, and a test can make requests
fail. Its responses were compared with Google's own conformance server
(googleapis/storage-testbench).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from doubles.gcs.objects import Refusal, crc32c
from doubles.gcs.state import Double, Request, Upload

QUANTUM = 256 * 1024
"""Every part of a resumable upload but the last must be a multiple of this size, in bytes."""
_PIECE = 64 * 1024

PERMISSIONS = {
    "bucket": "storage.buckets.get",
    "get": "storage.objects.get",
    "media": "storage.objects.get",
    "list": "storage.objects.list",
    "insert": "storage.objects.create",
    "start": "storage.objects.create",
    "delete": "storage.objects.delete",
    "patch": "storage.objects.update",
}
"""The permission that each call needs. Parts of an upload need none."""


class _Cut(Exception):
    """Raised to close the connection."""


@contextlib.contextmanager
def serving(*buckets: str, port: int = 0) -> Iterator[Double]:
    """Serve these buckets while the `with` block runs."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 256

        def handle_error(self, request: object, client_address: object) -> None:
            error = sys.exception()
            if not isinstance(error, (_Cut, OSError)):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    class Handler(_Handler):
        pass

    with Server(("127.0.0.1", port), Handler) as server:
        double = Handler.double = Double(f"http://127.0.0.1:{server.server_address[1]}")
        for bucket in buckets:
            double.buckets.create(bucket)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            thread.join()


_ROUTES = (
    ("GET", r"/storage/v1/b/([^/]+)/iam/testPermissions", "permissions"),
    ("GET", r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)", "get"),
    ("DELETE", r"/storage/v1/b/([^/]+)/o/(.+)", "delete"),
    ("PATCH", r"/storage/v1/b/([^/]+)/o/(.+)", "patch"),
    ("GET", r"/storage/v1/b/([^/]+)/o", "list"),
    ("GET", r"/storage/v1/b/([^/]+)", "bucket"),
    ("POST", r"/upload/storage/v1/b/([^/]+)/o", "insert"),
    ("PUT", r"/upload/storage/v1/b/([^/]+)/o", "chunk"),
)


class _Handler(BaseHTTPRequestHandler):
    double: Double
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the double logs its requests."""

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def _handle(self) -> None:
        url = urlsplit(self.path)
        self.double.peers.add(self.client_address[1])
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.call, bucket, name = self._route(url.path)
        self.bucket, self.name = unquote(bucket), unquote(name)
        self.unread_bytes = int(self.headers.get("Content-Length") or 0)
        self.size = self.unread_bytes
        if self.double.before is not None:
            self.double.before(self.call, self.name)
        self.fault = self.double.fault(self.call, self.name)
        try:
            with self.double.busy():
                self._answer_or_refuse()
        except _Cut:
            self._log(0)
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    def _answer_or_refuse(self) -> None:
        try:
            if self.fault.abandoned:
                self._hang_up()
            if self.fault.gate is not None:
                self.fault.gate.wait(200)
            if self.fault.status:
                phrase = HTTPStatus(self.fault.status).phrase
                raise Refusal(self.fault.status, self.fault.message or phrase)
            permission = PERMISSIONS.get(self.call)
            if permission in self.double.denied:
                raise Refusal(403, self._denial(str(permission)))
            getattr(self, f"_{self.call}")()
        except Refusal as refusal:
            self._body()
            if self.call == "media":  # Downloads report errors as plain text.
                self._answer(refusal.status, refusal.message.encode(), {}, "text/html")
            else:
                self._json(refusal.document(), refusal.status)

    def _hang_up(self) -> None:
        self.rfile = io.BytesIO(self.rfile.read(self.unread_bytes))
        self.wfile = io.BytesIO()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _denial(self, permission: str) -> str:
        account = "someone@example.iam.gserviceaccount.com"
        return (
            f"{account} does not have {permission} access to the Google Cloud Storage object. "
            f"Permission '{permission}' denied on resource (or it may not exist)."
        )

    def _route(self, path: str) -> tuple[str, str, str]:
        for method, pattern, call in _ROUTES:
            if self.command == method and (matched := re.fullmatch(pattern, path)):
                bucket, name = (*matched.groups(), "")[:2]
                return self._refine_call(call), bucket, name or self.query.get("name", "")
        return "unknown", "", ""

    def _refine_call(self, call: str) -> str:
        if call == "get" and self.query.get("alt") == "media":
            return "media"
        if call == "insert" and self.query.get("uploadType") == "resumable":
            return "start"
        if call == "chunk" and self.headers.get("Content-Range", "").startswith("bytes */"):
            return "status"
        return call

    # --- calls

    def _unknown(self) -> None:
        raise Refusal(404, "Not Found")

    def _bucket(self) -> None:
        self._json(self.double.buckets.resource(self.bucket))

    def _permissions(self) -> None:
        self.double.buckets.resource(self.bucket)
        wanted = [v for k, v in parse_qsl(urlsplit(self.path).query) if k == "permissions"]
        allowed = [permission for permission in wanted if permission not in self.double.denied]
        kind = "storage#testIamPermissionsResponse"
        self._json({"kind": kind} | ({"permissions": allowed} if allowed else {}))

    def _get(self) -> None:
        self._json(self.double.buckets.find(self.bucket, self.name, self.query).resource())

    def _list(self) -> None:
        self._json(self.double.buckets.page(self.bucket, self.query))

    def _patch(self) -> None:
        if self.query.get("projection") == "full":
            raise Refusal(403, self._denial("storage.objects.getIamPolicy"))
        changes = json.loads(self._body())
        patched = self.double.buckets.patch(self.bucket, self.name, self.query, changes)
        self._json(patched.resource())

    def _delete(self) -> None:
        self.double.buckets.delete(self.bucket, self.name, self.query)
        self._answer(204, b"", {})

    def _media(self) -> None:
        stored = self.double.buckets.find(self.bucket, self.name, self.query)
        resource = stored.resource()
        headers = {
            "X-Goog-Hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": str(stored.metageneration),
            "X-Goog-Stored-Content-Encoding": "identity",
            "X-Goog-Stored-Content-Length": str(len(stored.data)),
            "X-Goog-Storage-Class": "STANDARD",
            "Accept-Ranges": "bytes",
            "ETag": str(resource["etag"]),
        }
        data, status = stored.data, 200
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span and any(span.groups()):
            size = len(data)
            if span[1]:
                begin, end = int(span[1]), min(int(span[2] or size - 1), size - 1)
            else:
                begin, end = max(0, size - int(span[2])), size - 1
            if begin > end:
                raise Refusal(416, "The requested range cannot be satisfied.")
            headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
            data, status = data[begin : end + 1], 206
        if self.fault.damaged and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._answer(status, data, headers, stored.content_type)

    def _insert(self) -> None:
        body = self._body()
        if self.query.get("uploadType") == "multipart":
            kind = self.headers.get("Content-Type", "")
            resource, content_type, data = _parts(kind, body)
        else:
            content_type, data = self.headers.get("Content-Type", ""), body
            resource = {}
        self.name = str(resource.get("name") or self.query.get("name", ""))
        if self.fault.damaged and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        _check_hash(self.headers.get("X-Goog-Hash", ""), data)
        created = self.double.buckets.insert(
            self.bucket, self.name, data, self.query, resource, content_type
        )
        self._json(created.resource())

    def _start(self) -> None:
        resource = json.loads(self._body() or b"{}")
        self.name = str(resource.get("name") or self.query.get("name", ""))
        self.double.buckets.resource(self.bucket)  # Check preconditions at the end of the upload.
        kind = self.headers.get("X-Upload-Content-Type", "")
        upload = Upload(self.bucket, self.name, self.query, resource, kind)
        upload_id = secrets.token_urlsafe(20)
        self.double.uploads[upload_id] = upload
        where = f"{self.double.uri}/upload/storage/v1/b/{self.bucket}/o"
        self._answer(200, b"", {"Location": f"{where}?uploadType=resumable&upload_id={upload_id}"})

    def _status(self) -> None:
        self._chunk()

    def _chunk(self) -> None:
        upload = self.double.uploads.get(self.query.get("upload_id", ""))
        if upload is None:
            raise Refusal(404, "The upload session does not exist.")
        self.name = upload.name
        header = self.headers.get("Content-Range", "")
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", header)
        if header and span is None:
            raise Refusal(400, f"Failed to parse Content-Range header: {header}")
        begin = int(span[1]) if span and span[1] else 0
        total = int(span[3]) if span and span[3] != "*" else None
        if not span:
            total = self.unread_bytes
        self._receive(upload, begin)
        if self.fault.stored_bytes >= 0:
            del upload.data[begin + self.fault.stored_bytes :]
        if upload.result is not None:
            self._json(upload.result.resource())
        elif total is not None and len(upload.data) >= total:
            self._finish(upload)
        else:
            received = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            self._answer(308, b"", received)

    def _receive(self, upload: Upload, begin: int) -> None:
        """Store the bytes that arrive, except those that an earlier request has stored."""
        whole = upload.result.data if upload.result else upload.data
        if begin > len(whole):
            raise Refusal(
                503,
                f"Invalid request. According to the Content-Range header, the upload offset is "
                f"{begin} byte(s), which exceeds already uploaded size of {len(whole)} byte(s).",
            )
        arrived = bytearray()
        try:
            for piece in self._pieces():
                arrived += piece
        except _Cut:
            del arrived[len(arrived) - (begin + len(arrived)) % QUANTUM :]
            raise
        finally:
            if upload.result is None:
                upload.data += arrived[len(upload.data) - begin :]

    def _finish(self, upload: Upload) -> None:
        data = bytes(upload.data)
        if self.fault.damaged and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        _check_hash(self.headers.get("X-Goog-Hash", ""), data)
        upload.result = self.double.buckets.insert(
            upload.bucket, upload.name, data, upload.query, upload.resource, upload.content_type
        )
        upload.data.clear()
        self._json(upload.result.resource())

    # --- bytes in and out

    def _pieces(self) -> Iterator[bytes]:
        until = self.size - self.fault.cut_after if 0 <= self.fault.cut_after < self.size else 0
        while self.unread_bytes > until:
            piece = self.rfile.read(min(_PIECE, self.unread_bytes - until))
            if not piece:
                raise _Cut
            self.unread_bytes -= len(piece)
            yield piece
        if until:
            raise _Cut

    def _body(self) -> bytes:
        return b"".join(self._pieces())

    def _json(self, document: dict[str, object], status: int = 200) -> None:
        self._answer(status, json.dumps(document).encode(), {}, "application/json; charset=UTF-8")

    def _answer(self, status: int, body: bytes, headers: dict[str, str], kind: str = "") -> None:
        if self.fault.lost:
            raise _Cut
        is_cut = self.command == "GET" and 0 <= self.fault.cut_after < len(body)
        if not is_cut:
            self._log(status)  # before the client can read the log
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if kind:
            self.send_header("Content-Type", kind)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_cut:
            self.wfile.write(body[: self.fault.cut_after])
            raise _Cut
        if status != 304:
            self.wfile.write(body)
        self.wfile.flush()

    def _log(self, status: int) -> None:
        self.double.log(Request(self.call, self.name, status, self.size, self.query))


def _parts(kind: str, body: bytes) -> tuple[dict[str, object], str, bytes]:
    """Return the resource, the type and the content of a multipart upload."""
    boundary = re.search(r'boundary="?([^";]+)"?', kind)
    if not boundary:
        raise Refusal(400, "Missing boundary in the Content-Type header.")
    mark = b"--" + boundary[1].encode()
    sections = body.split(b"\r\n" + mark)
    if not body.startswith(mark) or len(sections) < 3:
        raise Refusal(400, "Missing end boundary in multipart body.")
    head, _, text = sections[0].removeprefix(mark).partition(b"\r\n\r\n")
    # The content may contain the boundary: only the last one ends it.
    head, _, data = (b"\r\n" + mark).join(sections[1:-1]).partition(b"\r\n\r\n")
    matched = re.search(rb"content-type: *([^\r\n]+)", head, re.IGNORECASE)
    return json.loads(text), matched[1].decode() if matched else "", data


def _check_hash(header: str, data: bytes) -> None:
    sent = re.search(r"crc32c=([^,\s]+)", header)
    if sent and sent[1] != crc32c(data):
        raise Refusal(
            400,
            f'Provided CRC32C "{sent[1]}" doesn\'t match calculated CRC32C "{crc32c(data)}".',
        )


def main(buckets: list[str], announce: Callable[[str], object] = print) -> None:
    """Serve the named buckets until the process ends."""
    with serving(*buckets) as double:
        announce(double.uri)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
