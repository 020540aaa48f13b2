"""The contract of `Store`, tested with every store. Add new stores to `OPENERS`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_cases import OPENERS, SHARED, grow_old

from kinetic._store.base import Store, Swaps, is_near
from kinetic._store.many import at_once, get_many, has_many, put_many, renew_many
from kinetic._store.open import open_store
from kinetic.errors import CorruptRecord, NotFound, StoreError, UsageError


@pytest.fixture(params=sorted(OPENERS))
def store(request, tmp_path) -> Iterator[Store]:
    with OPENERS[request.param](tmp_path) as opened:
        yield opened


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


BAD_KEYS = ["", "/abs", "a//b", "a/", "..", "a/../b", ".", "a/.", "a\0b", "a\nb", "a\rb"]


@pytest.mark.parametrize("key", BAD_KEYS)
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


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_open_store_opens_it_again(store):
    store.put("a", b"1")
    reopened = open_store(store.uri)
    assert reopened.get("a") == b"1"
    assert reopened.uri == store.uri


PARTS = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\n\r"), min_size=1, max_size=8
).filter(lambda p: p not in (".", "..", ".tmp"))


@given(keys=st.sets(st.lists(PARTS, min_size=1, max_size=3).map("/".join), max_size=8))
def test_list_is_the_sorted_set_of_keys(tmp_path_factory, keys):
    keys = {k for k in keys if not any(other != k and other.startswith(f"{k}/") for other in keys)}
    for opener in OPENERS.values():
        with opener(tmp_path_factory.mktemp("s")) as store:
            for key in keys:
                store.put(key, key.encode())
            assert list(store.list("")) == sorted(keys)
            assert all(store.get(key) == key.encode() for key in keys)


@pytest.fixture
def many():
    """The number of keys: more than a page of the Cloud Storage double has, or calls at once."""
    return 250


def test_a_list_of_many_keys_is_whole_and_sorted(store, many):
    keys = {f"many/{number}": b"" for number in range(many)}
    put_many(store, keys)
    assert list(store.list("many")) == sorted(keys)


def test_a_key_is_fetched_into_a_file(store, tmp_path):
    content = os.urandom(3_000_001)
    store.put("big", content)
    target = tmp_path / "there"
    target.write_bytes(b"old")
    store.fetch("big", target)
    assert target.read_bytes() == content
    target.unlink()
    store.fetch("big", target, sha256=hashlib.sha256(content).hexdigest())
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_fetch_that_fails_leaves_the_file_as_it_was(store, tmp_path):
    folder = tmp_path / "fetched"
    folder.mkdir()
    target = folder / "there"
    with pytest.raises(NotFound):
        store.fetch("nothing", target)
    assert os.listdir(folder) == []
    store.put("a", b"one")
    target.write_bytes(b"old")
    with pytest.raises(CorruptRecord, match="SHA-256"):
        store.fetch("a", target, sha256="0" * 64)
    assert target.read_bytes() == b"old"
    assert os.listdir(folder) == ["there"]
    with pytest.raises(StoreError, match="nowhere"):
        store.fetch("a", folder / "nowhere" / "there")
    with pytest.raises(UsageError):
        store.fetch("../a", target)


def test_many_calls_at_once(store, many):
    contents = {f"k/{number}": f"{number}".encode() * number for number in range(many)}
    store.put("k/7", b"before")
    assert put_many(store, contents, if_absent=True) == contents.keys() - {"k/7"}
    contents["k/7"] = b"before"
    assert has_many(store, [*contents, "k/none", "none"]) == contents.keys()
    assert has_many(store, []) == set()
    stored = get_many(store, ["none", *contents])
    assert stored == contents
    assert list(stored) == list(contents)


def test_the_first_of_many_that_fails_is_told(store):
    with pytest.raises(UsageError, match=r"'\.\./up'"):
        put_many(store, {"a": b"", "../up": b"", "b": b""})


def test_entries_are_what_is_listed(store):
    for key in ("jobs/b", "jobs/a/z", "jobsx/a"):
        store.put(key, key.encode())
    entries = list(store.entries("jobs"))
    assert [(e.key, e.size_bytes) for e in entries] == [("jobs/a/z", 8), ("jobs/b", 6)]
    assert all(abs(e.written_at - time.time()) < 3600 for e in entries)
    assert list(store.entries("nothing/here")) == []


def test_parts_are_what_comes_next(store):
    for key in ("jobs/b/plan", "jobs/a/z/1", "jobs/a/z/2", "jobs/file", "jobsx/a/b"):
        store.put(key, b"")
    assert list(store.parts("jobs")) == ["a", "b"]
    assert list(store.parts("jobs/a")) == ["z"]
    assert list(store.parts("nothing")) == []


def test_parts_of_many_keys_are_all_there(store, many):
    put_many(store, {f"many/{number}/x": b"" for number in range(many)})
    assert list(store.parts("many")) == sorted(f"{number}" for number in range(many))


def test_renewing_says_what_is_there(store):
    assert store.renew("a") is False
    store.put("a", b"one")
    assert store.renew("a") is True
    assert store.get("a") == b"one"
    assert renew_many(store, ["a", "b"]) == {"a"}


def test_what_was_renewed_is_young(store):
    if is_near(store):
        return  # In a folder, a lock protects submissions.
    store.put("a/b", b"")
    grow_old(store)
    before = time.time() - 3600
    assert store.renew("a/b") is True
    (entry,) = store.entries("a")
    assert entry.written_at > before


def test_an_object_is_swapped_for_what_it_was(store):
    if not isinstance(store, Swaps):
        return
    assert store.swap("a", b"", b"new") is False
    assert store.has("a") is False
    store.put("a", b"one")
    assert store.swap("a", b"another", b"two") is False
    assert store.swap("a", b"one", b"two") is True
    assert store.swap("a", b"one", b"three") is False
    assert store.get("a") == b"two"


def test_of_many_who_swap_the_same_one_wins(store):
    if not isinstance(store, Swaps):
        return
    store.put("a", b"0")
    won = at_once(lambda n: store.swap("a", b"0", b"%d" % n), range(1, 9), 8)
    assert sum(won) == 1
    assert store.get("a") == b"%d" % (won.index(True) + 1)
