"""Async functions that are called as plain ones.

In: coroutines. Out: what they return.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in another thread if a loop runs in this one, as it always does
    in a notebook."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor
    from contextvars import copy_context

    with ThreadPoolExecutor(1) as beside:
        return beside.submit(copy_context().run, asyncio.run, coroutine).result()


def is_loop_running() -> bool:
    """Whether an event loop runs in this thread: async code awaits what an async function
    returns."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
