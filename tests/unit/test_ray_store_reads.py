"""Reads from the store of a Ray cluster, through the files that the dashboard lists and sends. A
read returns the content, or raises NotFound; the fake dashboard responds like a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kinetic._store.ray import RayStore
from kinetic.errors import NotFound


class Dashboard:
    """A fake dashboard with one file, sent in parts. For each listing, the next item of `listed`
    says whether the file is in it."""

    def __init__(self, parts, listed):
        self._parts = parts
        self._listed = iter(listed)
        self._is_gone = False

    def deletes(self):
        self._is_gone = True

    def nodes(self):
        return [SimpleNamespace(is_head=True, is_alive=True, node_id="head")]

    def list_logs(self, node_id, pattern):
        return [] if self._is_gone or not next(self._listed) else [pattern]

    def read_log(self, node_id, path):
        if self._is_gone:
            raise NotFound("a traceback")
        yield from self._parts


def read(parts, listed):
    return RayStore("ray+http://127.0.0.1:1", api=Dashboard(parts, listed)).get("jobs/a")


def test_what_is_there_is_listed_once():
    assert read([b"one ", b"two"], [True]) == b"one two"


def test_an_empty_file_is_empty():
    assert read([], [True, True]) == b""


def test_what_was_read_before_is_read_without_a_look_whether_it_is_there():
    """Following a log reads the newest file again and again, so only the first read of a file asks
    whether the file exists."""
    store = RayStore(
        "ray+http://127.0.0.1:1", api=(dashboard := Dashboard([b"one"], [True, False]))
    )
    assert store.get("jobs/a") == store.get("jobs/a") == b"one"
    dashboard.deletes()
    for _ in range(2):
        with pytest.raises(NotFound, match="jobs/a"):
            store.get("jobs/a")


@pytest.mark.parametrize("listed", [[False], [True, False]], ids=["never", "deleted meanwhile"])
def test_what_is_not_there_is_not_found(listed):
    with pytest.raises(NotFound, match="jobs/a"):
        read([], listed)
