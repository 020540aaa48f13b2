"""The leader's event loop: its tasks while the gang is served."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, cast

import pytest
from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._core.outcome import Outcome, Verdict
from kinetic._host import leader_runtime, verdicts
from kinetic._host.local.supervisor import Request, Supervisor
from kinetic._host.verdicts import Attempt
from kinetic._rpc.server import Coordinator
from kinetic._store.local import LocalStore
from kinetic._system import processes
from kinetic.errors import StoreError

PATIENCE_S = 100.0


def test_a_store_that_hangs_or_fails_keeps_nobody_waiting(monkeypatch):
    """The loop that checks for removed records also answers heartbeats: it must not block."""
    monkeypatch.setattr(leader_runtime, "FAR_RECORDS_S", 0.01)
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
        seat = leader_runtime.LeaderRuntime(MemoryStore(), "job-1", served)
        seat.watch_records(has_records, is_removed.set)
        while not is_asked.is_set():
            await asyncio.sleep(0.01)
        may_answer.set()  # The store hangs until now, while the loop runs.
        while not is_removed.is_set():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
    assert looks == ["fails", "hangs", "hangs"]


def test_records_are_removed_when_two_checks_in_a_row_say_so(monkeypatch):
    """One missed read is not enough: a network file system may miss a file for a moment."""
    monkeypatch.setattr(leader_runtime, "FAR_RECORDS_S", 0.0)
    answers = iter([True, False, True, False, StoreError("no answer"), False, False])

    def has_records() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def serve() -> None:
        is_removed, coordinator = asyncio.Event(), cast(Coordinator, None)
        seat = leader_runtime.LeaderRuntime(MemoryStore(), "job-1", coordinator)
        seat.watch_records(has_records, is_removed.set)
        await is_removed.wait()

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
    assert not list(answers)


def test_a_lock_that_cannot_be_read_is_not_a_removal(tmp_path):
    """A lock that is unreadable for now (EACCES, EIO) is no removal. ELOOP stops root, too."""
    store = LocalStore(tmp_path)
    store.put(layout.JobKeys("job-1").plan, b"{}")
    own = store.path(layout.JobKeys("job-1").prefix) / "local"
    own.mkdir()
    supervisor = Supervisor(Request(str(tmp_path), "job-1"))
    with (own / "lock").open("a") as supervisor._lock_file:
        assert supervisor._holds_the_lock()
        own.rename(own.with_name("away"))
        assert not supervisor._holds_the_lock()
        own.symlink_to(own)
        with pytest.raises(OSError, match="symbolic links"):
            supervisor._holds_the_lock()
        own.unlink()
        own.mkdir()
        (own / "lock").touch()
        assert not supervisor._holds_the_lock()  # a new file in its stead


def test_the_verdict_does_not_wait_until_the_source_tree_is_removed(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put(layout.JobKeys("job-1").plan, b"{}")
    scratch = store.path(layout.JobKeys("job-1").prefix) / "local" / "work"
    (scratch / "host-0" / "tree").mkdir(parents=True)
    (scratch / processes.DISK_RESERVE).touch()
    names = []

    class Ended(Supervisor):
        def _init_process(self):
            pass

        def _lock(self):
            return os.getpid()

        def _lead_to_end(self):
            return None, Attempt(Outcome(Verdict.FAILED, (), "", ended_at=0.0))

    monkeypatch.setattr(processes, "kill_descendants", lambda: None)
    monkeypatch.setattr(
        verdicts, "conclude", lambda *_: names.extend(path.name for path in scratch.iterdir())
    )
    Ended(Request(str(tmp_path), "job-1")).run(-1)
    assert names == ["host-0"]
    assert not scratch.exists()
