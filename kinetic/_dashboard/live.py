"""What changes while a page is looked at: one stream of events for each page.

In: feeds. Out: their messages as server-sent events: pieces of HTML by the id of their element,
lines of output, and what is in the way.

Each feed of a page has a pace of its own: lines do not wait for a leader that does not answer, nor
for a chart of a million steps. Where the system tells of writes, a feed is looked at as soon as one
of its files was written to, and rarely otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from kinetic._system.changes import Changes
from kinetic.errors import KineticError, NotFound

Message = dict[str, Any]

EVERY_S = 0.1
"""Between two looks at what nobody tells of: half of it is the usual delay."""
_TOLD_S = 0.5
"""... and at what the system tells of: a process that is gone has written nothing."""
REST_S = 0.025
"""After each look, at least."""
_SHARE = 20
"""Looks at one feed take a twentieth of a processor at most, once there is no more to be read."""
SILENT_S = 5.0
"""Without an answer for this long, a page says so."""
_AGAIN_S = 1.0
"""Between two looks that fail, and between two words about one that does not come back."""
_NOTICE_S = 0.5
"""A page that is closed, or a server that ends, is noticed after this time at most."""
_ALIVE_S = 15.0
"""A stream without news says at least this often that it is there."""
T = TypeVar("T")


class Seen(NamedTuple):
    """What a look found.

    Attributes:
        message: what has changed; None if nothing has.
        files: a write to one of them, or in one of these folders, is a reason to look again.
        within_s: when to look again if nothing tells of writes.
        rest_s: for how long not to look in any case.
        has_more: whether there is more to be read already.
        trouble: what is in the way at present; "" if nothing is.
    """

    message: Message | None
    files: Sequence[Path] = ()
    within_s: float = EVERY_S
    rest_s: float = REST_S
    has_more: bool = False
    trouble: str = ""


class Feed(Protocol):
    """Something on a page that changes."""

    def look(self, *, is_told: bool) -> Seen:
        """Return what has changed since the last look. Runs in a thread, one look at a time.

        Args:
            is_told: whether one of its files was written to.

        Raises:
            NotFound: it is gone, and the stream ends.
            KineticError: it cannot be seen at present.
        """
        ...

    def close(self) -> None:
        """Let go of what is held, if anything is. No look follows."""
        return


class Bell:
    """Rings when files of this machine are written to."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._watched: set[Path] = set()

    def watch(self, files: Iterable[Path]) -> tuple[bool, bool]:
        """Return whether each write to these files rings from now on, and whether one of them did
        not before: what was written earlier has not rung."""
        wanted = set(files)
        new = {path for path in wanted - self._watched if self._changes.watch(path)}
        self._watched |= new
        return bool(wanted) and wanted <= self._watched, bool(new)

    async def wait(self, timeout_s: float) -> bool:
        """Return True as soon as it rings, or False."""
        fd, rung = self._changes.fd, asyncio.Event()
        if fd < 0:
            await asyncio.sleep(timeout_s)
            return False
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, rung.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await rung.wait()
        finally:
            loop.remove_reader(fd)
        self._changes.take()
        return rung.is_set()

    def close(self) -> None:
        """Watch nothing any more."""
        self._changes.close()


async def send_messages(
    feeds: Sequence[Feed], is_over: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yield what each feed has to tell, as events, until the browser has left, the server ends, or
    one of the feeds is gone. One that fails, or does not come back, is told of."""
    news: asyncio.Queue[tuple[int, Message]] = asyncio.Queue(1)
    pumps = {asyncio.create_task(_pump(news, n, feed)) for n, feed in enumerate(feeds)}
    taking = asyncio.create_task(news.get())
    troubles, shown, told_at = [""] * len(feeds), "", time.monotonic()
    try:
        while not await is_over():
            done, _ = await asyncio.wait(
                {taking, *pumps}, timeout=_NOTICE_S, return_when=asyncio.FIRST_COMPLETED
            )
            for each in done & pumps:
                each.result()  # It ends by a fault of ours only.
            if taking not in done:
                if time.monotonic() - told_at > _ALIVE_S:
                    told_at = time.monotonic()
                    yield b": there\n\n"
                continue
            number, message = taking.result()
            taking = asyncio.create_task(news.get())
            troubles[number] = message.pop("trouble")
            if (trouble := next(filter(None, troubles), "")) != shown:
                shown = message["trouble"] = trouble
            if message:
                told_at = time.monotonic()
                yield format_event(message)
            if message.get("end"):
                return
    finally:
        for each in (taking, *pumps):
            each.cancel()


async def _pump(news: asyncio.Queue[tuple[int, Message]], number: int, feed: Feed) -> None:
    """Look at a feed again and again, and put what it has to tell into the queue, with its number.
    Each message says what is in the way, or that nothing is."""
    bell, is_told, trouble = Bell(), False, ""
    looking: asyncio.Future[_Look] | None = None

    def close(_: object = None) -> None:
        bell.close()
        feed.close()

    try:
        while True:
            began, timeout_s = time.monotonic(), SILENT_S
            looking = run_in_thread(_look, feed, bell, is_told)
            while not (await asyncio.wait({looking}, timeout=timeout_s))[0]:
                trouble, timeout_s = describe_silence(time.monotonic() - began), _AGAIN_S
                await news.put((number, {"trouble": trouble}))
            ended, looking, before = looking, None, trouble
            found = _take(ended)
            trouble = found.message["trouble"]
            if found.message.keys() - {"trouble"} or trouble != before:
                await news.put((number, found.message))
            await asyncio.sleep(found.rest_s)
            is_told = found.is_new
            if not is_told and found.wait_s:
                is_told = await bell.wait(found.wait_s)
    finally:
        if looking is None:
            close()
        else:  # It may take long, and nobody waits for it any more.
            looking.add_done_callback(close)


class _Look(NamedTuple):
    """A look that came back: what it has to tell, how long to rest, how long to wait then for a
    write, and whether there may have been one already."""

    message: Message
    rest_s: float
    wait_s: float
    is_new: bool = False


def _look(feed: Feed, bell: Bell, is_told: bool) -> _Look:
    began_s = time.thread_time()
    seen = feed.look(is_told=is_told)
    is_watched, is_new = bell.watch(seen.files)
    message = (seen.message or {}) | {"trouble": seen.trouble}
    if seen.has_more:
        return _Look(message, EVERY_S, 0.0, is_new)
    rest_s = max(seen.rest_s, (time.thread_time() - began_s) * _SHARE)
    within_s = max(seen.within_s, _TOLD_S) if is_watched else seen.within_s
    return _Look(message, rest_s, max(within_s - rest_s, 0.0), is_new)


def _take(ended: asyncio.Future[_Look]) -> _Look:
    """Return what came of a look, also if that is an error."""
    try:
        return ended.result()
    except NotFound as error:
        return _Look({"trouble": str(error), "end": True}, _AGAIN_S, 0.0)
    except (KineticError, OSError) as error:
        return _Look({"trouble": str(error)}, _AGAIN_S, 0.0)


def format_event(message: Message) -> bytes:
    """Return a message as an event."""
    return f"data: {json.dumps(message)}\n\n".encode()


def describe_silence(waited_s: float) -> str:
    """Say that a store does not answer."""
    return f"The store has not answered for {waited_s:.0f} s."


class _Threads(Executor):
    """Threads for which the end of the process does not wait: a store that hangs must not keep
    Ctrl-C waiting, as threads of a pool do."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in a thread of its own."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it is for who waits
                future.set_exception(error)

        threading.Thread(target=run, name="kinetic-dashboard-call", daemon=True).start()
        return future


_THREADS = _Threads()


def run_in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Begin a call that may take long in a thread of its own; return what it will have returned."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
