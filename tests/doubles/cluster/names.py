"""Relays for a host name that two pods have. Like DNS, they lead to the older pod until it ends.

A pod that looks up the name while the older pod is still ending gets the address of a relay.
Otherwise it gets the address of the pod itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Target = Callable[[], str]


class Relay:
    """Relays connections to a target address, which may change."""

    def __init__(self, address: str, ports: list[int], target: Target) -> None:
        self.address = address
        self._listeners = [socket.create_server((address, port)) for port in ports]
        for listener in self._listeners:
            serve = threading.Thread(target=self._serve, args=(listener, target), daemon=True)
            serve.start()

    def close(self) -> None:
        """Stop accepting connections."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    @staticmethod
    def _serve(listener: socket.socket, target: Target) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                threading.Thread(target=_connect, args=(near, target), daemon=True).start()


def _connect(near: socket.socket, target: Target) -> None:
    with near, contextlib.suppress(OSError), socket.create_connection(_target(near, target)) as far:
        back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
        back.start()
        _pass_on(near, far)
        back.join()


def _target(near: socket.socket, target: Target) -> tuple[str, int]:
    return target(), near.getsockname()[1]


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
