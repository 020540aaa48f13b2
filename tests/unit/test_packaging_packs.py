"""Packs: objects that hold many small files each, and the few objects that a change sends."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._source import bundle, packs
from kinetic._source.download import unpack
from kinetic._source.upload import Sent, upload
from kinetic.errors import CorruptRecord

FEW = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CONTENTS = st.lists(st.binary(max_size=40), unique=True, max_size=8)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def by_digest(contents: list[bytes]) -> dict[str, bytes]:
    return {digest_of(data): data for data in contents}


# The format of packs


@given(contents=CONTENTS)
def test_what_went_into_a_pack_comes_out(contents):
    index = packs.build(by_digest(contents))
    pack = b"".join([index.data, *contents])
    assert packs.index_bytes(pack[: packs.HEAD_BYTES]) == len(index.data)
    read = packs.parse(pack[: len(index.data)])
    assert read == index
    assert read.name == digest_of(index.data)
    assert read.spans.keys() == by_digest(contents).keys()
    for digest, (offset, size_bytes) in read.spans.items():
        assert digest_of(pack[offset : offset + size_bytes]) == digest


@given(garbage=st.binary(max_size=100))
def test_garbage_is_no_index(garbage):
    index = packs.build(by_digest([b"a", b"b"]))
    for data in (garbage, b"KNPACK2\n" + garbage, index.data[:-1]):
        with pytest.raises(CorruptRecord):
            packs.parse(data)
    with pytest.raises(CorruptRecord):
        packs.inflate_list(b"garbage")


def test_a_list_that_inflates_without_end_is_damaged(monkeypatch):
    monkeypatch.setattr(packs, "MOST_LIST_BYTES", 1000)
    longest = bytes(1000)
    assert packs.inflate_list(packs.deflate_list(longest)) == longest
    with pytest.raises(CorruptRecord):
        packs.inflate_list(packs.deflate_list(longest + b"x"))


def record(**changes) -> bytes:
    fields = {"schema": 2, "packs": [], "blobs": [], "base_list": "0" * 64}
    return json.dumps(fields | {"removed": [], "changed": []} | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b'{"schema":2}', b"[" * 100_000, record(schema=1),
        record(packs={}), record(packs=["../x"]), record(blobs=["/" * 64]), record(removed=[1]),
        record(changed=None), record(base_list=3), record(base_list="../x"),
    ],
)  # fmt: skip
def test_garbage_is_no_record(data):
    assert packs.TreeRecord.from_json(record()).base_list == "0" * 64
    with pytest.raises(CorruptRecord):
        packs.TreeRecord.from_json(data)


@given(sizes=st.lists(st.integers(0, packs.SMALL_BYTES), max_size=200))
def test_packs_are_filled_in_order(sizes):
    named = {str(number): size for number, size in enumerate(sizes)}
    groups = packs.groups(named)
    assert [digest for group in groups for digest in group] == list(named)
    assert all(sum(named[digest] for digest in group) <= packs.PACK_BYTES for group in groups)
    assert len(groups) <= 1 + 2 * sum(sizes) // packs.PACK_BYTES


# Successive submissions of one project


MOST_PACKS = 9
"""Most packs of one project: one with the whole project, and eight with later changes."""


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path.resolve() / "root").mkdir()
    return tmp_path.resolve()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def plant(root: Path, files: int = 60) -> None:
    for number in range(files):
        (root / f"d{number % 7}").mkdir(exist_ok=True)
        (root / f"d{number % 7}/{number}.py").write_bytes(os.urandom(1000))


def send(place: Path, store: MemoryStore, *, cache: str = "cache") -> Sent:
    store.forget_calls()
    return upload(bundle.build(place / "root", cache_dir=place / cache), store)


def arrives(place: Path, store: MemoryStore, dest: str = "dest") -> None:
    store.forget_calls()
    unpack(store, bundle.build(place / "root", cache_dir=place / "cache").tree, place / dest)
    assert files(place / dest) == files(place / "root")


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_calls_do_not_grow_with_the_number_of_files(place, store):
    plant(place / "root")
    assert send(place, store).files == 60
    assert store.calls == {"renew": 1, "put": 2}
    assert send(place, store) == Sent(0, 0)
    assert store.calls == {"renew": 1}
    arrives(place, store)
    assert store.calls == {"get": 2}
    (place / "root/d0/0.py").write_text("changed")
    sent = send(place, store)
    assert (sent.files, sent.size_bytes) == (1, 7)
    assert sent.lists_bytes < 1000
    assert store.calls == {"renew": 2, "put": 2}
    arrives(place, store, "dest2")
    assert store.calls == {"get": 3}


@FEW
@given(data=st.data())
def test_after_any_edits_few_packs_hold_the_tree(tmp_path_factory, data):
    place, store = tmp_path_factory.mktemp("p").resolve(), MemoryStore()
    (place / "root").mkdir()
    plant(place / "root", 20)
    send(place, store)
    for turn in range(data.draw(st.integers(1, 12))):
        paths = sorted((place / "root").rglob("*.py"))
        for path in data.draw(st.lists(st.sampled_from(paths), max_size=4, unique=True)):
            if data.draw(st.booleans()):
                path.write_text(f"{turn} {path.name}" * data.draw(st.integers(0, 200)))
            elif len(paths) > 8:
                path.unlink()
        if data.draw(st.booleans()):
            shutil.rmtree(place / "cache")
        send(place, store)
        assert sum(store.calls.values()) <= 4 + MOST_PACKS
        arrives(place, store, f"dest{turn}")
        assert sum(store.calls.values()) <= 1 + MOST_PACKS


def test_of_many_small_changes_each_is_sent_few_times(place, store):
    plant(place / "root")
    send(place, store)
    sent = []
    for number in range(24):
        (place / f"root/d{number % 7}/{number}.py").write_bytes(os.urandom(1000))
        sent.append(send(place, store).files)
        arrives(place, store, f"dest{number}")
        assert store.calls["get"] <= 1 + MOST_PACKS
    assert sent == [*[1] * 8, 9, *[1] * 7, 17, *[1] * 7]


def test_a_file_that_changes_again_and_again_leaves_no_packs_behind(place, store):
    plant(place / "root")
    send(place, store)
    for number in range(12):
        (place / "root/d0/0.py").write_text(f"change {number}")
        assert send(place, store).files == 1
    arrives(place, store)
    assert store.calls == {"get": 3}


def test_changes_that_were_swept_are_sent_again(place, store):
    plant(place / "root")
    send(place, store)
    base = set(store.list(layout.PACKS))
    (place / "root/d0/0.py").write_text("changed")
    send(place, store)
    for key in set(store.list(layout.PACKS)) - base:
        store.delete(key)
    (place / "root/d1/1.py").write_text("changed too")
    assert send(place, store).files == 2
    arrives(place, store)


def test_a_delta_of_more_than_half_of_its_base_becomes_a_base(place, store):
    plant(place / "root", 10)
    send(place, store)
    for number in range(4):
        (place / f"root/d{number}/{number}.py").write_bytes(os.urandom(1000))
        assert send(place, store).files == 1
    plant(place / "root", 10)
    assert send(place, store).files == 10
    (place / "root/d0/0.py").write_text("changed")
    assert send(place, store).files == 1


def test_a_tree_that_needs_little_of_its_base_gets_a_new_one(place, store):
    plant(place / "root", 10)
    send(place, store)
    for path in sorted((place / "root").rglob("*.py"))[:7]:
        path.unlink()
    assert send(place, store).files == 3
    arrives(place, store)


@pytest.mark.parametrize("how", ["another machine", "damaged", "swept"])
def test_without_its_base_a_changed_tree_is_sent_whole(place, store, how):
    plant(place / "root")
    send(place, store)
    (place / "root/d0/0.py").write_text("changed")
    cache = "elsewhere" if how == "another machine" else "cache"
    if how == "damaged":
        (note,) = (place / "cache/sent").iterdir()
        note.write_bytes(note.read_bytes()[:-1] + b"x")
    elif how == "swept":
        store.delete(layout.PACKS)
    assert send(place, store, cache=cache).files == 60
    arrives(place, store)


def test_a_cache_that_cannot_be_written_is_none(place, store):
    plant(place / "root")
    (place / "cache").mkdir()
    (place / "cache/sent").write_text("in the way")
    for content in ("changed", "again"):
        (place / "root/d0/0.py").write_text(content)
        assert send(place, store).files == 60, "no base is known"
    arrives(place, store)


def test_the_cache_may_lie_in_the_tree(place, store):
    plant(place / "root", 3)
    (place / "root/cache").mkdir()
    for build in (
        bundle.build,
        lambda root, cache_dir: bundle.build_data(root, cache_dir=cache_dir),
    ):
        bundles = [build(place / "root", cache_dir=place / "root/cache")]
        upload(bundles[0], store)
        bundles.append(build(place / "root", cache_dir=place / "root/cache"))
        assert bundles[0].tree == bundles[1].tree
        assert bundles[0].tree.files == 3
