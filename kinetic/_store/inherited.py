"""Connections that a forked process has inherited: closed, before their descriptors become other
files'.

In: sessions of `requests`. Out: nothing. urllib3 closes what is left when the interpreter ends, or
when its pools are collected, by numbers of descriptors that may be others by then.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Any

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_forks(session: Any) -> None:
    """Let forks of this process close their copies of a session's connections."""
    _sessions.add(session)


def _close() -> None:
    # An error would be printed in the midst of somebody's output.
    with suppress(AttributeError, OSError, RuntimeError):
        for session in list(_sessions):
            for adapter in session.adapters.values():
                pools = adapter.poolmanager.pools
                pools.lock = threading.RLock()  # Held by another thread, it is never let go here.
                for key in list(pools.keys()):
                    for connection in filter(None, list(pools[key].pool.queue)):
                        connection.close()
    _sessions.clear()


os.register_at_fork(after_in_child=_close)
