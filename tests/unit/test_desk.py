"""Where a leader sits: what it looks after while its gang is served."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from doubles.memory_store import MemoryStore

from kinetic._host import desk
from kinetic.errors import StoreError

PATIENCE_S = 100.0


def test_a_store_that_hangs_or_fails_keeps_nobody_waiting(monkeypatch):
    """Heartbeats are answered by the loop that watches for the removal of the records."""
    monkeypatch.setattr(desk, "FAR_RECORDS_S", 0.01)
    is_asked, may_answer, is_removed = (threading.Event() for _ in range(3))
    looks = []

    def has_records() -> bool:
        looks.append("fails" if not looks else "hangs")
        if len(looks) == 1:
            raise StoreError("it does not answer at present")
        is_asked.set()
        assert may_answer.wait(PATIENCE_S)
        return False

    async def serve() -> None:
        served: Any = None
        seat = desk.Desk(MemoryStore(), "job-1", served)
        seat.watch_records(has_records, is_removed.set)
        while not is_asked.is_set():
            await asyncio.sleep(0.01)
        may_answer.set()  # Not before: the loop runs while the store hangs.
        while not is_removed.is_set():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
    assert looks == ["fails", "hangs"]
