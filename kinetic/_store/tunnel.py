"""A connection whose bytes lie in a store for a moment: for two programs that reach the same store,
and not each other.

In: a store, a prefix that both ends know. Out: bytes in both directions. Each end writes numbered
chunks, and deletes those of the other one that it has read. While it has nothing to say, it says so
every few seconds: an end that is silent is gone, and the other one removes what is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from kinetic._store.base import LEAST_PAUSE_S, Store, pause_after
from kinetic.errors import NotFound, StoreError

CHUNK_BYTES = 256 << 10
MOST_CHUNKS = 16
"""That lie there for the other end to read: whoever writes more waits."""
ALIVE_S, SILENT_S = 5.0, 30.0
"""After how much silence of its own an end gives a sign of life, and how long it waits for one."""
CLOSE_S = 5.0
"""How long the other end may take to read the last bytes."""
_MOST_PAUSE_S = 0.2
_DATA, _ALIVE, _FINISH = b"d", b"a", b"f"
"""What a chunk begins with."""


class Side(StrEnum):
    """The two ends."""

    CALLER = "caller"
    HOST = "host"


class StoreConnection:
    """One end (a `_backends.base.Connection`): one thread reads, and one writes."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        side: Side,
        *,
        alive_s: float = ALIVE_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._store, self._prefix = store, prefix
        self._mine, (self._theirs,) = side, {*Side} - {side}
        self._alive_s, self._silent_s = alive_s, silent_s
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._sent, self._read, self._taken = 0, 0, ""
        self._sent_at = self._heard_at = time.monotonic()
        self._has_finished = self._is_finished = self._is_gone = False
        threading.Thread(target=self._give_signs, name="kinetic-tunnel", daemon=True).start()

    def _give_signs(self) -> None:
        with suppress(ConnectionError):  # Who is waited for in vain is taken for gone.
            while (
                not self._closing.wait(self._alive_s) and self._is_read and not self._has_finished
            ):
                if time.monotonic() - self._sent_at > self._alive_s / 2:
                    self._send(_ALIVE)

    def read(self) -> bytes:
        """Wait for bytes and return them; b"" when no more will come.

        Raises:
            ConnectionError: the other end is gone, or the store does not answer.
        """
        while not (self._closing.is_set() or self._is_finished):
            with _as_connection_errors():
                self._forget()
                kind, data = self._take()
            if kind == _DATA:
                return data
            if not kind:
                self._wait()
        return b""

    def _take(self) -> tuple[bytes, bytes]:
        """The next chunk of the other end: what it begins with, and the rest; b"" if none is
        there."""
        try:
            key = self._key(self._theirs, self._read)
            chunk = self._store.get(key)
        except NotFound:
            return b"", b""
        self._taken, self._read, self._heard_at = key, self._read + 1, time.monotonic()
        if chunk == _FINISH:
            self._is_finished = True
            self._forget()
        return chunk[:1], chunk[1:]

    def _forget(self) -> None:
        """Delete what was read, which makes room: not before it was passed on."""
        if self._taken:
            self._store.delete(self._taken)
            self._taken = ""

    def _wait(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > self._silent_s:
            self._is_gone = True
            raise ConnectionError(f"the other end has given no sign of life for {self._silent_s} s")
        silence_s = now - max(self._heard_at, self._sent_at)
        self._closing.wait(pause_after(silence_s, LEAST_PAUSE_S / 2, _MOST_PAUSE_S))

    def write(self, data: bytes) -> None:
        """Send all of the bytes.

        Raises:
            ConnectionError: as `read`; or this end was closed.
        """
        for at in range(0, len(data), CHUNK_BYTES):
            if not self._is_read:
                raise ConnectionError("the other end is closed")
            self._await_reader(self._sent - MOST_CHUNKS)
            self._send(_DATA + data[at : at + CHUNK_BYTES])

    def _await_reader(self, number: int, limit_s: float | None = None) -> None:
        """Wait until the other end has read a chunk of this one."""
        until = time.monotonic() + (self._silent_s if limit_s is None else limit_s)
        with _as_connection_errors():
            while number >= 0 and self._store.has(self._key(self._mine, number)):
                if time.monotonic() > until or (limit_s is None and self._closing.is_set()):
                    raise ConnectionError("the other end does not read")
                time.sleep(_MOST_PAUSE_S)

    def _send(self, chunk: bytes) -> None:
        with self._sending, _as_connection_errors():
            self._store.put(self._key(self._mine, self._sent), chunk)
            self._sent, self._sent_at = self._sent + 1, time.monotonic()

    def finish(self) -> None:
        """Say that nothing more will be written; reading goes on. Idempotent."""
        if not self._has_finished:
            self._has_finished = True
            if self._is_read:
                self._send(_FINISH)

    @property
    def _is_read(self) -> bool:
        """Whether the other end may still read. The host's says that it has finished when the
        program there has closed its end."""
        return not self._is_gone and (self._mine is Side.HOST or not self._is_finished)

    def end(self) -> None:
        """End both directions, from any thread. Idempotent."""
        self._closing.set()

    def close(self) -> None:
        """Close it, once no thread reads or writes any more, and remove what is left of it.
        Idempotent."""
        self._closing.set()
        with suppress(ConnectionError):
            self.finish()
            if self._is_read:
                self._await_reader(self._sent - 1, CLOSE_S)
        with suppress(StoreError):
            self._store.delete(self._prefix)

    def _key(self, side: Side, number: int) -> str:
        return f"{self._prefix}/{side}/{number}"


@contextmanager
def _as_connection_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise ConnectionError(str(error)) from error
