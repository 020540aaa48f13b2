"""TCP connections to hosts (`_backends.base.Connection`), and copying from one to another."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Protocol

_READ_BYTES = 1 << 16


class _End(Protocol):
    """The methods of a `_backends.base.Connection` that `pump` needs."""

    def read(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None: ...


def pump(source: _End, target: _End) -> None:
    """Copy bytes until the source ends or a connection is lost; then end writing to the target."""
    with suppress(OSError):
        while data := source.read():
            target.write(data)
    with suppress(OSError):
        target.finish()


class SocketConnection:
    """A connection over a socket. `close` closes the socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def read(self) -> bytes:
        """Wait for bytes and return them; b"" when no more will come."""
        return self._socket.recv(_READ_BYTES)

    def write(self, data: bytes) -> None:
        """Send all of the bytes."""
        self._socket.sendall(data)

    def finish(self) -> None:
        """Tell the other end that no more bytes will come. Reading goes on."""
        self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End both directions, from any thread. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may read or write any more, because the descriptor's number
        may be reused at once. Idempotent."""
        self._socket.close()
