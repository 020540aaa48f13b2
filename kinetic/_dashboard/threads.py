"""Calls that may take long, in threads for which the end of the process does not wait: a store that
hangs must not keep Ctrl-C waiting, as threads of a pool do.

In: calls. Out: what they return.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Threads(Executor):
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
    """Begin a call in a thread of its own; return what it will have returned."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
