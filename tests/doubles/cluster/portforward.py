"""`pods/portforward` over a WebSocket: channel 0 carries a port's bytes, channel 1 errors."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import struct
import threading

from doubles.cluster.server import Answer, Request

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE = 0x2, 0x8


def forward(request: Request) -> Answer:
    """Switch to a WebSocket and relay bytes between the client and the port."""
    port = int(request.query["ports"])
    key = request.headers["sec-websocket-key"]
    proof = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
    protocol = request.headers["sec-websocket-protocol"].split(",")[-1].strip()
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": proof,
        "Sec-WebSocket-Protocol": protocol,
    }
    return Answer(101, headers=headers, upgrade=lambda client: _relay(client, port))


def _relay(client: socket.socket, port: int) -> None:
    number = struct.pack("<H", port)
    for channel in (b"\0", b"\1"):
        _send(client, channel + number)
    try:
        far = socket.create_connection(("127.0.0.1", port))
    except OSError as error:
        _send(client, b"\1" + str(error).encode())
        with contextlib.suppress(OSError):
            while _receive(client) is not None:  # Wait until the client closes.
                pass
        return
    with far:
        back = threading.Thread(target=_pass_back, args=(far, client), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while (data := _receive(client)) is not None:
                far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)
        back.join()


def _pass_back(far: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := far.recv(1 << 16):
            _send(client, b"\0" + data)
    with contextlib.suppress(OSError):
        _send(client, b"", CLOSE)
        client.shutdown(socket.SHUT_RD)


def _send(client: socket.socket, data: bytes, code: int = BINARY) -> None:
    size = len(data)
    length = struct.pack("!B", size) if size < 126 else struct.pack("!BQ", 127, size)
    client.sendall(bytes([0x80 | code]) + length + data)


def _receive(client: socket.socket) -> bytes | None:
    """Return the bytes for channel 0 in the next frame; None at the end of the stream."""
    first, second = _read(client, 2)
    size = second & 0x7F
    if size >= 126:
        size = int.from_bytes(_read(client, 2 if size == 126 else 8), "big")
    mask = _read(client, 4)
    data = bytes(byte ^ mask[n % 4] for n, byte in enumerate(_read(client, size)))
    return None if first & 0xF == CLOSE else data[1:]


def _read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the client is gone")
        data += part
    return data
