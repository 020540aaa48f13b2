"""Connections that a forked process has inherited: closed in the fork.

In: sessions of `requests`. Out: nothing.

Otherwise urllib3 would close them when the interpreter ends or its pools are collected, and by then
their descriptors may belong to other files.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Any

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_forks(session: Any) -> None:
    """Have forks of this process close their copies of a session's connections."""
    _sessions.add(session)


def _close() -> None:
    # An error would be printed into the program's output.
    with suppress(AttributeError, OSError, RuntimeError):
        for session in list(_sessions):
            for adapter in session.adapters.values():
                pools = adapter.poolmanager.pools
                pools.lock = threading.RLock()  # It may be held by another thread.
                for key in list(pools.keys()):
                    for connection in filter(None, list(pools[key].pool.queue)):
                        connection.close()
    _sessions.clear()


os.register_at_fork(after_in_child=_close)
