"""Messages between an agent and its worker: one JSON object per line, over a socket pair."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
READ_BYTES = 1 << 16


class WorkerEvent(StrEnum):
    """Values of "event" in a worker's messages. The last message has an `Exit` instead."""

    ARMED = "armed"
    """The worker is ready to start the function."""
    STANDS_BY = "stands_by"
    """The message names the thread that takes the signal for stacks."""
    IDLE = "idle"
    """The worker of a session waits for the next call."""
    PROGRAM = "program"
    """The function runs a program over several processes for the first time."""
    STARTED = "started"
    """The worker is about to call the function."""
    ENDING = "ending"
    """The function has ended; the last message, with its exit, follows."""
    DEBUGGER_LISTENING = "debugger_listening"
    DEBUGGER_ATTACHED = "debugger_attached"
    DEBUGGER_HELD = "debugger_held"
    """The worker waits until the leader's debugger has attached."""


class Channel:
    """One end of the socket pair. Only `send` is thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._searched = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; return False if the peer has closed its end."""
        try:
            # The first newline ends any text that other code may have written into the channel.
            line = json.dumps(message, separators=(",", ":")).encode()
            with self._lock:
                self._sock.sendall(b"\n" + line + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; return None if the peer has closed its end."""
        while True:
            for message in self._whole():
                return message
            if not self._fill():
                return None

    def available(self) -> tuple[list[Message], bool]:
        """Return the complete messages that have arrived, without waiting, and True if the peer's
        end is still open."""
        is_open = self._fill(socket.MSG_DONTWAIT)
        return list(self._whole()), is_open

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _fill(self, flags: int = 0) -> bool:
        try:
            data = self._sock.recv(READ_BYTES, flags)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def _whole(self) -> Iterator[Message]:
        """Take complete messages out of the buffer; skip lines that are no messages."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message
        self._searched = len(self._buffer)
