"""The thread in which all controllers handle their items, one after the other.

An item names an object to check. If it is added while it waits, nothing changes; if it is added
while it is being handled, it is handled once more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from doubles.cluster.problems import Refused

Item = tuple[str, Hashable]
RETRY_S = 0.05


class Engine:
    """The work queue of a cluster."""

    def __init__(self) -> None:
        self.crashes: list[str] = []
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._ready: OrderedDict[Item, None] = OrderedDict()
        self._delayed: list[tuple[float, int, Item]] = []
        self._numbers = itertools.count()
        self._wanted = threading.Condition()
        self._stopped = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)

    def handle(self, name: str, handler: Callable[[Any], None]) -> None:
        self._handlers[name] = handler

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wanted:
            self._stopped = True
            self._wanted.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, name: str, key: Hashable, delay: float = 0.0) -> None:
        """Add an item, to be handled after `delay` seconds."""
        with self._wanted:
            if delay > 0:
                at = time.monotonic() + delay
                heapq.heappush(self._delayed, (at, next(self._numbers), (name, key)))
            else:
                self._ready[name, key] = None
            self._wanted.notify()

    def settle(self) -> None:
        """Wait until no item is due."""
        with self._wanted:
            while (self._ready or self._busy) and not self._stopped:
                self._wanted.wait(1.0)

    def _next(self) -> Item | None:
        with self._wanted:
            self._busy = False
            while not self._stopped:
                now = time.monotonic()
                while self._delayed and self._delayed[0][0] <= now:
                    self._ready[heapq.heappop(self._delayed)[2]] = None
                if self._ready:
                    self._busy = True
                    return self._ready.popitem(last=False)[0]
                self._wanted.notify_all()
                self._wanted.wait(self._delayed[0][0] - now if self._delayed else None)
            return None

    def _run(self) -> None:
        while (item := self._next()) is not None:
            name, key = item
            try:
                self._handlers[name](key)
            except Refused as refused:
                if refused.code != 404:  # 404: the object was removed meanwhile.
                    self.add(name, key, RETRY_S)
            except Exception:
                self.crashes.append(f"{name} {key}\n{traceback.format_exc()}")
