"""Messages between an agent and its worker: one JSON object per line, over a socket pair.

In: dicts. Out: dicts.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
READ_BYTES = 1 << 16


class WorkerEvent(StrEnum):
    """What a worker reports under "event"; its last message there has an `Exit`."""

    ARMED = "armed"
    """It is ready to start the function."""
    STANDS_BY = "stands_by"
    """Names the thread that takes the signal for stacks."""
    STARTED = "started"
    """The function is called."""
    ENDING = "ending"
    """The function has ended; the message that says how comes next."""
    DEBUGGER_LISTENING = "debugger_listening"
    DEBUGGER_ATTACHED = "debugger_attached"
    DEBUGGER_HELD = "debugger_held"
    """It waits until the leader's debugger has attached."""


class Channel:
    """One end of the conversation. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._searched = 0

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: Message) -> bool:
        """Send; return False if the other end is gone."""
        try:
            # The first newline ends what other code may have written into the channel.
            self._sock.sendall(b"\n" + json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None if the other end is gone."""
        while True:
            for message in self._whole():
                return message
            if not self._fill():
                return None

    def available(self) -> tuple[list[Message], bool]:
        """Return the complete messages that have arrived, without waiting for more, and whether the
        other end is still open."""
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
        """Take whole messages out of the buffer; skip what is not a message."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message
        self._searched = len(self._buffer)
