"""Changes of an open page: one stream of server-sent events for each page.

A message has pieces of HTML by the id of their element, lines of output, or the error because of
which the page is out of date.

Each source of a page has its own polling thread, so that lines of output do not wait for a leader
that does not answer, or for a chart of a million steps. The threads are daemons, because Ctrl-C
must not wait for a store that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kinetic.errors import KineticError, NotFound

Message = dict[str, Any]

SHARE = 20
"""The pause after a poll is this many times the poll's processor time, so that a source uses at
most a twentieth of a processor."""
SILENT_S = 5.0
"""A page shows a warning if the store has not answered for this many seconds."""
_RETRY_S = 1.0
"""Pause in seconds after a failed poll."""
_NOTICE_S = 0.5
"""Longest time in seconds until a stream notices that its page was closed or the server ends."""
_ALIVE_S = 15.0
"""A stream without changes sends a comment after this many seconds, to keep the connection open."""


class Source(NamedTuple):
    """A part of a page that changes.

    Attributes:
        poll: returns the changes since the last poll, or None if there are none. A message may have
            a "trouble": the reason why the page is out of date. Raises `NotFound` to end the
            stream, and another `KineticError` if the source cannot be read now.
        every_s: the pause between polls; longer if a poll takes much processor time.
        close: called once, after the last poll.
    """

    poll: Callable[[], Message | None]
    every_s: float
    close: Callable[[], None] = lambda: None


class _Poller:
    """Polls one source in a thread. The next poll waits until the stream has taken the changes of
    the previous one."""

    def __init__(self, source: Source, notify: Callable[[], None]) -> None:
        self._source = source
        self._notify = notify
        self._message: Message = {}
        self._trouble = ""
        self._polling_since: float | None = None
        self._is_taken, self._is_closed = threading.Event(), threading.Event()
        self.has_ended = False
        self.fault: BaseException | None = None
        threading.Thread(target=self._run, name="kinetic-dashboard-poll", daemon=True).start()

    def take(self) -> Message:
        """Return the changes that were polled since the last call of `take`."""
        message, self._message = self._message, {}
        self._is_taken.set()
        return message

    def trouble(self) -> str:
        """Return the reason why this part of the page is out of date; "" if it is current."""
        waited_s = time.monotonic() - (self._polling_since or time.monotonic())
        return describe_silence(waited_s) if waited_s > SILENT_S else self._trouble

    def close(self) -> None:
        """Stop polling."""
        self._is_closed.set()
        self._is_taken.set()

    def _run(self) -> None:
        try:
            while not self.has_ended and not self._is_closed.is_set():
                self._is_closed.wait(self._poll())
        except BaseException as error:  # noqa: BLE001 - the stream raises it
            self.fault = error
            self._notify()
        finally:
            self._source.close()

    def _poll(self) -> float:
        """Poll once; return the length of the pause."""
        began_s, self._polling_since = time.thread_time(), time.monotonic()
        message: Message = {}
        has_ended = False
        try:
            message = dict(self._source.poll() or {})
            trouble = message.pop("trouble", "")
        except NotFound as error:
            trouble, has_ended = str(error), True
        except (KineticError, OSError) as error:
            trouble = str(error)
        self._polling_since = None
        if message or trouble != self._trouble or has_ended:
            self._is_taken.clear()
            self._message, self._trouble = message, trouble
            self.has_ended = has_ended
            self._notify()
            self._is_taken.wait()
        used_s = time.thread_time() - began_s
        return max(self._source.every_s, SHARE * used_s, _RETRY_S if trouble else 0.0)


async def stream_events(
    sources: Sequence[Source], is_over: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yield the changes of all sources as server-sent events, until the browser disconnects, the
    server ends or a source ends."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: the server has ended.
            loop.call_soon_threadsafe(news.set)

    pollers = [_Poller(source, notify) for source in sources]
    sent_trouble, sent_at = "", time.monotonic()
    try:
        while not await is_over():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _NOTICE_S)
            news.clear()
            for fault in [poller.fault for poller in pollers if poller.fault is not None]:
                raise fault
            has_ended = any(poller.has_ended for poller in pollers)
            trouble = next(filter(None, [poller.trouble() for poller in pollers]), "")
            messages = [message for poller in pollers if (message := poller.take())]
            if trouble != sent_trouble or has_ended:
                sent_trouble = trouble
                messages.append({"trouble": trouble} | ({"end": True} if has_ended else {}))
            for message in messages:
                yield format_event(message)
            if has_ended:
                return
            if messages:
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > _ALIVE_S:
                sent_at = time.monotonic()
                yield b": alive\n\n"
    finally:
        for poller in pollers:
            poller.close()


def format_event(message: Message) -> bytes:
    """Return a message as a server-sent event."""
    return f"data: {json.dumps(message)}\n\n".encode()


def describe_silence(waited_s: float) -> str:
    """Return the warning about a store that does not answer."""
    return f"The store has not answered for {waited_s:.0f} s."
