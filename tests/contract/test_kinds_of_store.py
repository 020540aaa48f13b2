"""Promises that only some stores make: those in a folder, in memory, or shared by processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore
from store_cases import OPENERS, SHARED

from kinetic._store.base import Store, folder_of
from kinetic._store.local import LocalStore
from kinetic._store.many import get_many, has_many, put_many
from kinetic._store.open import open_store
from kinetic.errors import StoreError, StoreFull, UsageError


@pytest.fixture(params=sorted(OPENERS))
def store(request, tmp_path) -> Iterator[Store]:
    with OPENERS[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture(params=SHARED)
def shared(request, tmp_path) -> Iterator[Store]:
    with OPENERS[request.param](tmp_path) as opened:
        yield opened


def test_a_folder_holds_each_key_as_a_file(store):
    store.put("a/b", b"one")
    folder = folder_of(store)
    assert (folder is None) == (not isinstance(store, LocalStore))
    assert folder is None or (folder / "a/b").read_bytes() == b"one"


def test_exactly_one_of_several_threads_writes_an_absent_key(store):
    writers, rounds = 4, 40
    won: dict[int, list[int]] = {}
    barrier = threading.Barrier(writers)

    def race(number: int) -> None:
        barrier.wait(200)
        won[number] = [
            i for i in range(rounds) if store.put(f"r/{i}", b"%d" % number, if_absent=True)
        ]

    threads = [threading.Thread(target=race, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert sorted(i for wins in won.values() for i in wins) == list(range(rounds))
    for number, wins in won.items():
        assert all(store.get(f"r/{i}") == b"%d" % number for i in wins)


def _race(uri: str, barrier, number: int, rounds: int, answers) -> None:
    store = open_store(uri)
    barrier.wait(200)
    won = [
        i
        for i in range(rounds)
        if store.put(f"race/{i}", f"{number}".encode() * 5000, if_absent=True)
    ]
    answers.put((number, won))


def test_exactly_one_of_several_processes_writes_an_absent_key(shared):
    writers, rounds = 3, 60
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(writers), context.Queue()
    processes = [
        context.Process(target=_race, args=(shared.uri, barrier, n, rounds, answers))
        for n in range(writers)
    ]
    for process in processes:
        process.start()
    won = dict(answers.get(timeout=200) for _ in processes)
    for process in processes:
        process.join(200)
    assert sorted(i for wins in won.values() for i in wins) == list(range(rounds))
    for number, wins in won.items():
        assert all(shared.get(f"race/{i}") == f"{number}".encode() * 5000 for i in wins)


def _overwrite(uri: str, barrier, letter: bytes) -> None:
    store = open_store(uri)
    barrier.wait(200)
    for _ in range(100):
        store.put("same", letter * 200_000)


def test_a_reader_never_sees_a_part(shared):
    shared.put("same", b"a" * 200_000)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=_overwrite, args=(shared.uri, barrier, letter))
        for letter in (b"a", b"b")
    ]
    for process in processes:
        process.start()
    barrier.wait(200)
    while any(process.is_alive() for process in processes):
        content = shared.get("same")
        assert len(content) == 200_000
        assert len(set(content)) == 1
        assert list(shared.list("")) == ["same"]
    assert [process.exitcode for process in processes] == [0, 0]


def test_everything_is_private(tmp_path):
    old = os.umask(0)
    try:
        LocalStore(tmp_path / "up" / "store").put("a/b/c", b"")
    finally:
        os.umask(old)
    for folder, _, files in os.walk(tmp_path / "up" / "store"):
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert all(os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600 for name in files)


def test_reading_creates_nothing(tmp_path):
    store = LocalStore(tmp_path / "store")
    assert list(store.list("")) == []
    assert store.has("a") is False
    assert store.delete("a") == 0
    assert not (tmp_path / "store").exists()


def test_a_write_that_fails_half_way_leaves_no_trace(tmp_path):
    store = LocalStore(tmp_path / "store")
    store.put("a", b"old")
    resource = pytest.importorskip("resource")
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(StoreError) as caught:
            store.put("a", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert isinstance(caught.value.__cause__, OSError)
    assert store.get("a") == b"old"
    assert os.listdir(tmp_path / "store" / ".tmp") == []


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT"])
def test_no_space_is_store_full(tmp_path, number):
    import errno

    from kinetic._store.local import _translate_errors

    with (
        pytest.raises(StoreFull, match="no space is left") as caught,
        _translate_errors("write 'a'", str(tmp_path)),
    ):
        raise OSError(getattr(errno, number), "full")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_unwritable_root_says_what_to_do(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="store"):
        LocalStore(tmp_path / "file").put("a", b"")
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "file" / "below").put("a", b"")
    with pytest.raises(StoreError, match="KINETIC_HOME") as caught:
        LocalStore(Path("/proc/1/store")).put("a", b"")
    assert shown_tracebacks(caught.value) == 1


def test_no_space_for_the_folders_is_not_told_with_all_that_was_tried(tmp_path, monkeypatch):
    import errno

    def full(path, mode):
        raise OSError(errno.ENOSPC if path.endswith("store") else errno.ENOENT, "no", path)

    monkeypatch.setattr("kinetic._store.local.os.mkdir", full)
    with pytest.raises(StoreFull, match="no space is left") as caught:
        LocalStore(tmp_path / "store").put("a", b"")
    assert shown_tracebacks(caught.value) == 2


def shown_tracebacks(error):
    return "".join(traceback.format_exception(error)).count("Traceback")


def test_a_file_and_a_folder_cannot_share_a_name(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/b", b"")
    for key in ("a", "a/b/c"):
        with pytest.raises(StoreError):
            store.put(key, b"")
    assert list(store.list("")) == ["a/b"]


def test_old_leftovers_of_killed_writers_are_swept(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a", b"")
    for name, age_s in (("old", 2 * 86400), ("fresh", 60)):
        leftover = tmp_path / ".tmp" / name
        leftover.write_bytes(b"part")
        os.utime(leftover, (leftover.stat().st_mtime - age_s,) * 2)
    LocalStore(tmp_path).put("b", b"")
    assert os.listdir(tmp_path / ".tmp") == ["fresh"]


def test_list_and_delete_meet_what_is_no_file(tmp_path):

    store = LocalStore(tmp_path)
    store.put("jobs/a/plan", b"")
    (tmp_path / "jobs/a/loop").symlink_to(tmp_path / "jobs")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "jobs/a/sock"))
        assert list(store.list("jobs")) == ["jobs/a/plan"]
        store.delete("jobs/a")
    assert os.listdir(tmp_path / "jobs") == []


def test_a_root_that_vanished_is_made_anew(tmp_path):
    import shutil

    store = LocalStore(tmp_path / "store")
    store.put("a", b"")
    shutil.rmtree(tmp_path / "store")
    assert store.put("b", b"", if_absent=True)
    assert list(store.list("")) == ["b"]


def test_the_temporary_folder_is_no_key(tmp_path):
    with pytest.raises(UsageError, match="tmp"):
        LocalStore(tmp_path).put(".tmp/a", b"")


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("a", str(Path("a").absolute())),
    ],
)
def test_open_store_of_a_folder(uri, folder):
    assert open_store(uri).uri == folder


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "s3://bucket",
        "memory://name",
        "unix:///path",
        "gs://Bucket!/a",
        "gs://",
        "gs://bucket/../a",
        "file://elsewhere/a",
        "file://",
        "a\0b",
    ],
)
def test_open_store_refuses(uri):
    with pytest.raises(UsageError):
        open_store(uri)


def test_a_store_that_is_a_file_is_not_an_empty_store(tmp_path):
    (tmp_path / "home").write_text("")
    for prefix in ("", "refs"):
        with pytest.raises(StoreError, match="is not a folder"):
            list(LocalStore(tmp_path / "home").list(prefix))


def test_memory_counts_calls_by_kind_and_makes_them_at_once():
    store = MemoryStore(delay_s=0.001)
    put_many(store, {f"a/{n}": b"" for n in range(10)})
    assert has_many(store, ["a/1", "b"]) == {"a/1"}
    assert list(store.list("a"))[:1] == ["a/0"]
    assert store.get("a/1") == b""
    assert store.delete("a") == 10
    counted = {"put": 10, "has": 2, "list": 1, "get": 1, "delete": 1}
    assert store.calls == counted
    store.forget_calls()
    assert not store.calls


def test_memory_has_many_calls_on_their_way():
    gate = threading.Barrier(8)  # Times out if calls are made one after the other.

    class Gated(MemoryStore):
        def get(self, key: str) -> bytes:
            gate.wait(200)
            return super().get(key)

    store = Gated(delay_s=0.0001)
    put_many(store, {f"a/{n}": b"%d" % n for n in range(8)})
    assert len(get_many(store, [f"a/{n}" for n in range(8)])) == 8


def test_stores_in_memory_share_by_name():
    one, other = MemoryStore("test-shared"), MemoryStore("test-shared", delay_s=0.001)
    one.put("a", b"1")
    assert other.get("a") == b"1"
    assert one.calls == other.calls == {"put": 1, "get": 1}
    assert not MemoryStore().has("a")
