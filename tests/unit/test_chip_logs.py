"""Logs of chips: what a failed host stores of them, within limits of size and time."""

from __future__ import annotations

import os
import threading

import pytest
from doubles.memory_store import MemoryStore

from kinetic._host.agent import chip_logs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(chip_logs, "LOCK", tmp_path / "lock")
    (tmp_path / "logs" / "driver").mkdir(parents=True)
    return tmp_path / "logs"


def write(path, text, at):
    path.write_text(text)
    os.utime(path, (at, at))


def stored(folder, store=None, *, since=100.0, hosts=1):
    store = store or MemoryStore()
    chip_logs.store_chip_logs(store, "jobs/j/logs", str(folder), since=since, hosts=hosts)
    return {
        entry.key.removeprefix("jobs/j/logs/"): store.get(entry.key).decode()
        for entry in store.entries("jobs/j/logs")
    }


def test_the_newest_logs_are_stored_with_their_names(folder):
    """Logs below the folder are stored; older ones belong to another job, and links may lead out
    of the folder."""
    write(folder / "tpu_driver.INFO", "of now", 200)
    write(folder / "driver" / "errors", "of now, too", 150)
    write(folder / "old", "of an earlier job", 50)
    (folder / "link").symlink_to(folder / "tpu_driver.INFO")
    assert stored(folder) == {"tpu_driver.INFO": "of now", "driver/errors": "of now, too"}


def test_all_hosts_together_store_a_limited_size(folder, monkeypatch):
    """Four hosts may store 40 bytes: each stores 10, first of its newest log, and of each log the
    end."""
    monkeypatch.setattr(chip_logs, "MOST_BYTES", 40)
    write(folder / "newest", "1234567", 200)
    write(folder / "before", "abcdefgh", 150)
    assert stored(folder, hosts=4) == {"newest": "1234567", "before": "fgh"}


def test_a_host_without_chips_stores_nothing(tmp_path, folder):
    """There is no folder of logs, and no lock."""
    assert stored(tmp_path / "nothing") == {}


def test_the_lock_of_chips_names_its_holder(folder):
    """A lock that exists is stored as a text; nobody holds this one."""
    chip_logs.LOCK.touch()
    assert stored(folder) == {"libtpu_lockfile.txt": "its holder is unknown"}


def test_a_store_that_hangs_delays_nothing_for_long(folder, monkeypatch):
    """A store does not answer: the agent goes on after the limit, and the verdict with it."""
    go_on = threading.Event()

    class HangingStore(MemoryStore):
        def put(self, *args, **options):
            go_on.wait(60)

    monkeypatch.setattr(chip_logs, "_LIMIT_S", 0.05)
    write(folder / "log", "text", 200)
    chip_logs.store_chip_logs(HangingStore(), "jobs/j/logs", str(folder), since=0, hosts=1)
    assert not go_on.is_set()
    go_on.set()
