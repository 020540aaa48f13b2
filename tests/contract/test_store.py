"""The contract of `Store`, run over every implementation: add yours to `OPENERS`."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic._store.open import open_store
from kinetic.errors import NotFound, StoreError, StoreFull, UsageError

OPENERS = {"local": lambda folder: LocalStore(folder / "store")}


@pytest.fixture(params=sorted(OPENERS))
def store(request, tmp_path) -> Store:
    return OPENERS[request.param](tmp_path)


def test_what_is_put_is_got(store):
    assert store.put("a/b", b"one") is True
    assert store.get("a/b") == b"one"
    assert store.put("a/b", b"") is True
    assert store.get("a/b") == b""


def test_a_file_is_put_by_content(store, tmp_path):
    source = tmp_path / "big"
    source.write_bytes(os.urandom(3_000_001))
    assert store.put("big", source)
    source_bytes = source.read_bytes()
    source.write_bytes(b"changed later")
    assert store.get("big") == source_bytes


def test_parts_are_put_as_they_come(store):
    assert store.put("parts", iter([b"one", b"", b"two"])) is True
    assert store.get("parts") == b"onetwo"
    assert store.put("parts", iter([b"three"]), if_absent=True) is False


def test_parts_that_fail_leave_nothing(store):
    def parts():
        yield b"one"
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        store.put("parts", parts())
    assert list(store.list("")) == []


def test_if_absent_writes_once(store):
    assert store.put("k", b"first", if_absent=True) is True
    assert store.put("k", b"second", if_absent=True) is False
    assert store.get("k") == b"first"


@pytest.mark.parametrize("key", ["nothing", "a", "a/b/c", "a/nothing"])
def test_a_missing_key_is_not_found(store, key):
    store.put("a/b", b"")
    with pytest.raises(NotFound):
        store.get(key)
    assert store.has(key) is False


def test_has(store):
    store.put("a/b", b"")
    assert store.has("a/b") is True


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "..", "a/../b", ".", "a/.", "a\0b"])
def test_bad_keys_are_usage_errors(store, key):
    for act in (store.get, store.has, store.delete, lambda k: store.put(k, b"")):
        with pytest.raises(UsageError):
            act(key)


def test_list_matches_whole_parts_and_is_sorted(store):
    for key in ("jobs/b", "jobs/a/z", "jobs/a-b", "jobs/a/c/d", "jobsx/a", "job"):
        store.put(key, b"")
    assert list(store.list("jobs")) == ["jobs/a-b", "jobs/a/c/d", "jobs/a/z", "jobs/b"]
    assert list(store.list("")) == sorted(
        ["jobs/b", "jobs/a/z", "jobs/a-b", "jobs/a/c/d", "jobsx/a", "job"]
    )
    assert list(store.list("nothing/here")) == []
    with pytest.raises(UsageError):
        store.list("../up")


def test_delete_takes_the_key_and_what_is_below(store):
    for key in ("jobs/a/1", "jobs/a/2/3", "jobs/ab", "other"):
        store.put(key, b"")
    assert store.delete("jobs/a") == 2
    assert list(store.list("")) == ["jobs/ab", "other"]
    assert store.delete("jobs/a") == 0
    assert store.delete("other") == 1


def test_a_failed_write_raises_store_error_and_changes_nothing(store, tmp_path):
    store.put("a", b"old")
    with pytest.raises(StoreError):
        store.put("a", tmp_path / "no-such-source")
    assert store.get("a") == b"old"
    assert list(store.list("")) == ["a"]


def test_open_store_opens_it_again(store):
    store.put("a", b"1")
    again = open_store(store.uri)
    assert again.get("a") == b"1"
    assert again.uri == store.uri


PARTS = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8
).filter(lambda p: p not in (".", "..", ".tmp"))


@given(keys=st.sets(st.lists(PARTS, min_size=1, max_size=3).map("/".join), max_size=8))
def test_list_is_the_sorted_set_of_keys(tmp_path_factory, keys):
    keys = {k for k in keys if not any(other != k and other.startswith(f"{k}/") for other in keys)}
    for opener in OPENERS.values():
        store = opener(tmp_path_factory.mktemp("s"))
        for key in keys:
            store.put(key, key.encode())
        assert list(store.list("")) == sorted(keys)
        assert all(store.get(key) == key.encode() for key in keys)


def _race(uri: str, barrier, number: int, rounds: int, answers) -> None:
    store = open_store(uri)
    barrier.wait(200)
    won = [
        i
        for i in range(rounds)
        if store.put(f"race/{i}", f"{number}".encode() * 5000, if_absent=True)
    ]
    answers.put((number, won))


def test_exactly_one_of_several_processes_writes_an_absent_key(store):
    writers, rounds = 3, 60
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(writers), context.Queue()
    processes = [
        context.Process(target=_race, args=(store.uri, barrier, n, rounds, answers))
        for n in range(writers)
    ]
    for process in processes:
        process.start()
    won = dict(answers.get(timeout=200) for _ in processes)
    for process in processes:
        process.join(200)
    assert sorted(i for wins in won.values() for i in wins) == list(range(rounds))
    for number, wins in won.items():
        assert all(store.get(f"race/{i}") == f"{number}".encode() * 5000 for i in wins)


def _overwrite(uri: str, barrier, letter: bytes) -> None:
    store = open_store(uri)
    barrier.wait(200)
    for _ in range(100):
        store.put("same", letter * 200_000)


def test_a_reader_never_sees_a_part(store):
    store.put("same", b"a" * 200_000)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=_overwrite, args=(store.uri, barrier, letter))
        for letter in (b"a", b"b")
    ]
    for process in processes:
        process.start()
    barrier.wait(200)
    while any(process.is_alive() for process in processes):
        content = store.get("same")
        assert len(content) == 200_000
        assert len(set(content)) == 1
        assert list(store.list("")) == ["same"]
    assert [process.exitcode for process in processes] == [0, 0]


# What only a local folder has.


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

    from kinetic._store.local import _explained

    with (
        pytest.raises(StoreFull, match="no space is left") as caught,
        _explained("write 'a'", str(tmp_path)),
    ):
        raise OSError(getattr(errno, number), "full")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_unwritable_root_says_what_to_do(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="store"):
        LocalStore(tmp_path / "file").put("a", b"")
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "file" / "below").put("a", b"")
    with pytest.raises(StoreError, match="KINETIC_HOME"):
        LocalStore(Path("/proc/1/store")).put("a", b"")


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
        left = tmp_path / ".tmp" / name
        left.write_bytes(b"part")
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
    LocalStore(tmp_path).put("b", b"")
    assert os.listdir(tmp_path / ".tmp") == ["fresh"]


def test_list_and_delete_meet_what_is_no_file(tmp_path):
    import socket

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
    "uri", ["", "s3://bucket", "gs://bucket", "file://elsewhere/a", "file://", "a\0b"]
)
def test_open_store_refuses(uri):
    with pytest.raises(UsageError):
        open_store(uri)


def test_a_store_that_is_a_file_is_not_an_empty_store(tmp_path):
    (tmp_path / "home").write_text("")
    for prefix in ("", "refs"):
        with pytest.raises(StoreError, match="is not a folder"):
            list(LocalStore(tmp_path / "home").list(prefix))
