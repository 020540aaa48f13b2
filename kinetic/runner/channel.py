"""Messages between an agent and its worker: JSON objects, one a line, over a socket pair.

In: dicts. Out: dicts. Called by agent (never blocks on reading) and worker (blocks).
"""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of the conversation. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: Message) -> bool:
        """Send; return False when the other end is gone."""
        try:
            self._sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None when the other end is gone."""
        while b"\n" not in self._buffer:
            if not self._fill():
                return None
        return self._pop()

    def available(self) -> tuple[list[Message], bool]:
        """Read once and return whole messages that are there, and whether the other end is still open."""
        is_open = self._fill()
        messages = []
        while b"\n" in self._buffer:
            messages.append(self._pop())
        return messages, is_open

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _fill(self) -> bool:
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def _pop(self) -> Message:
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message
