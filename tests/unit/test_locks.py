"""File locks of the kernel: which processes they exclude, and for how long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kinetic._system import locks


@contextmanager
def child(begin) -> Iterator[int]:
    """Fork a child that calls `begin` and then waits until the block ends; yield its pid."""
    ready, begun = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        begin()
        os.write(begun, b"!")
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)
    os.close(begun)
    try:
        assert os.read(ready, 1) == b"!"
        yield pid
    finally:
        for fd in (go, ready):
            os.close(fd)
        os.waitpid(pid, 0)


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


@pytest.fixture
def fd(path) -> Iterator[int]:
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.mark.starts_processes
def test_a_record_lock_is_its_process_s_alone(path, fd):
    assert not locks.is_record_held(path)
    assert locks.record_holder(path) == 0
    with child(lambda: locks.hold_record(fd)) as holder:
        assert locks.is_record_held(path)
        assert locks.record_holder(path) == holder
        assert not locks.try_hold_record(fd)
    assert locks.try_hold_record(fd)
    with child(lambda: locks.is_record_held(path) or os._exit(1)):
        assert locks.record_holder(path) == 0, "one's own is not told"


@pytest.mark.starts_processes
def test_parts_of_a_file_are_locked_each_for_itself(path, fd):
    with child(lambda: locks.hold_record(fd, start=1 << 59, length=1)):
        locks.hold_record(fd, start=0, length=1)
        assert locks.is_record_held(path)


@pytest.mark.starts_processes
def test_the_lock_of_an_open_file_is_inherited(path):
    opened = os.open(path, os.O_RDONLY)
    locks.hold(opened)
    with child(lambda: None):
        os.close(opened)
        other = os.open(path, os.O_RDONLY)
        assert not locks.try_hold(other)
        os.close(other)
    with open(path) as free:
        assert locks.try_hold(free.fileno())


def test_a_folder_is_shared_until_somebody_wants_it_alone(tmp_path):
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    locks.hold(first, shared=True)
    assert locks.try_hold(second, shared=True)
    assert not locks.try_hold(first)
    os.close(second)
    assert locks.try_hold(first)
    os.close(first)


def test_a_file_that_is_not_there_is_not_locked(tmp_path):
    absent = tmp_path / "absent"
    assert not locks.is_record_held(absent)
    assert locks.record_holder(absent) == 0
