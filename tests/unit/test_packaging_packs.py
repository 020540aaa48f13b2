"""Packs: many small contents in few objects; which packs of earlier submissions a tree takes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path

import pytest
from doubles.memory_store import MemoryStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._source import bundle, manifest, packs
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


def index_of(*contents: bytes) -> packs.Index:
    return packs.build(by_digest(list(contents)), {})[0]


# The format


@given(files=CONTENTS, lists=CONTENTS)
def test_what_went_into_a_pack_comes_out(files, lists):
    index, parts = packs.build(by_digest(files), by_digest(lists))
    pack = b"".join([index.data, *parts])
    assert packs.index_bytes(pack[: packs.HEAD_BYTES]) == len(index.data)
    read = packs.parse(pack[: len(index.data)])
    assert read == index
    assert read.name == digest_of(index.data)
    assert read.spans.keys() == by_digest(files + lists).keys()
    for digest, span in read.spans.items():
        data = pack[span.offset : span.offset + span.stored_bytes]
        assert digest_of(packs.inflate_list(data) if span.deflated else data) == digest


@given(parts=st.lists(CONTENTS, max_size=4))
def test_indexes_that_follow_one_another_are_told_apart(parts):
    made = [index_of(*contents) for contents in parts]
    assert list(packs.parse_many(b"".join(index.data for index in made))) == made


@given(garbage=st.binary(max_size=100))
def test_garbage_is_no_index(garbage):
    for data in (garbage, b"KNPACK1\n" + garbage, index_of(b"a", b"b").data[:-1]):
        with pytest.raises(CorruptRecord):
            packs.parse(data)
    assert packs.inflate_list(b"garbage") == b""


def test_a_list_that_inflates_without_end_is_damaged():
    longest = bytes(packs.MOST_LIST_BYTES)
    assert packs.inflate_list(zlib.compress(longest)) == longest
    bomb = zlib.compress(longest + b"x")
    tracemalloc.start()
    try:
        assert packs.inflate_list(bomb) == b""
        assert tracemalloc.get_traced_memory()[1] < 4 * packs.MOST_LIST_BYTES
    finally:
        tracemalloc.stop()


def test_the_largest_list_may_be_stored():
    """As many entries as a list takes, with the longest names and targets, badly encoded."""
    rows = [
        manifest.Symlink(f"{n:04}" + "\udcff" * 251, "\udcff" * 4095) for n in range(manifest._WIDE)
    ]
    (found,) = manifest.encode(rows).values()
    assert len(found) <= packs.MOST_LIST_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b'{"schema":2,"packs":[],"blobs":[]}', b'{"schema":1}',
        b'{"schema":1,"packs":{},"blobs":[]}', b'{"schema":1,"packs":["../x"],"blobs":[]}',
        b'{"schema":1,"packs":[],"blobs":["%s"]}' % (b"/" * 64), b"[" * 100_000,
    ],
)  # fmt: skip
def test_garbage_is_no_record(data):
    with pytest.raises(CorruptRecord):
        packs.Contents.from_json(data)


# Which packs a tree takes


@given(needed=CONTENTS, there=st.lists(CONTENTS, max_size=12))
def test_a_tree_takes_few_packs_and_each_is_of_use(needed, there):
    sizes = {digest: len(data) for digest, data in by_digest(needed).items()}
    chosen = packs.choose(sizes, [index_of(*contents) for contents in there])
    assert len(chosen) <= packs._MOST_PARTIAL
    taken: set[str] = set()
    for pack in chosen:
        use = packs._weight(pack, sizes.keys() - taken)
        assert 0 < packs._weight(pack, pack.spans) <= 2 * use
        taken |= pack.spans.keys()


def test_a_pack_that_holds_all_is_preferred_to_those_that_hold_a_part():
    whole, part = index_of(b"1" * 9, b"2" * 9, b"3" * 9), index_of(b"1" * 9)
    needed = dict.fromkeys(whole.spans, 9)
    assert packs.choose(needed, [part, whole]) == [whole]


@given(sizes=st.lists(st.integers(0, packs.SMALL_BYTES), max_size=200))
def test_packs_are_filled_in_order(sizes):
    named = {str(number): size for number, size in enumerate(sizes)}
    groups = packs.groups(named)
    assert [digest for group in groups for digest in group] == list(named)
    assert all(sum(named[digest] for digest in group) <= packs.PACK_BYTES for group in groups)
    assert len(groups) <= 1 + 2 * sum(sizes) // packs.PACK_BYTES


# Submissions one after the other


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
    assert store.calls == {"renew": 1, "list": 1, "put": 3}
    assert send(place, store) == Sent(0, 0)
    assert store.calls == {"renew": 1}
    arrives(place, store)
    assert store.calls == {"get": 2}
    (place / "root/d0/0.py").write_text("changed")
    assert send(place, store).files == 1
    assert store.calls == {"renew": 2, "get": 1, "put": 3}


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
            path.write_text(f"{turn} {path.name}" * data.draw(st.integers(0, 200)))
        if data.draw(st.booleans()):
            shutil.rmtree(place / "cache")
        send(place, store)
        assert sum(store.calls.values()) <= 6 or store.calls["list"]
        arrives(place, store, f"dest{turn}")
        assert sum(store.calls.values()) <= 2 + packs._MOST_PARTIAL


@pytest.mark.parametrize("how", ["another machine", "damaged", "another tree", "forgotten"])
def test_without_a_note_the_store_tells_what_it_has(place, store, how):
    """Only a changed file is sent."""
    plant(place / "root")
    send(place, store)
    (place / "root/d0/0.py").write_text("changed")
    cache = "elsewhere" if how == "another machine" else "cache"
    (note,) = (place / "cache/sent").iterdir()
    if how == "damaged":
        note.write_bytes(note.read_bytes()[:-1] + b"x")
    elif how == "another tree":
        (place / "root").rename(place / "old")
        shutil.copytree(place / "old", place / "root")
    elif how == "forgotten":
        for key in list(store.list(layout.TREES)):
            store.delete(key)
    assert send(place, store, cache=cache).files == 1
    arrives(place, store)


def test_a_note_that_speaks_of_more_than_the_store_vouches_for_is_not_believed(place, store):
    """It names a tree whose record is there, made of other packs."""
    plant(place / "root")
    send(place, store)
    (key,) = store.list(layout.TREES)
    store.put(key, packs.Contents(("0" * 64,)).to_json())
    (place / "root/d0/0.py").write_text("changed")
    assert send(place, store).files == 60
    arrives(place, store)


def test_a_damaged_index_is_of_no_use_and_is_written_again(place, store):
    plant(place / "root")
    send(place, store)
    (index,) = store.list(layout.PACK_INDEXES)
    whole = store.get(index)
    store.put(index, whole[:-1])
    for key in list(store.list(layout.TREES)):
        store.delete(key)
    shutil.rmtree(place / "cache")
    send(place, store)
    assert store.get(index) == whole
    arrives(place, store)


def test_a_cache_that_cannot_be_written_is_none(place, store):
    plant(place / "root")
    (place / "cache").mkdir()
    (place / "cache/sent").write_text("in the way")
    assert send(place, store).files == 60
    (place / "root/d0/0.py").write_text("changed")
    assert send(place, store).files == 1
    arrives(place, store)


def test_the_cache_may_lie_in_the_tree(place, store):
    plant(place / "root", 3)
    (place / "root/cache").mkdir()
    for build in (
        bundle.build,
        lambda root, cache_dir: bundle.build_data(root, cache_dir=cache_dir),
    ):
        made = [build(place / "root", cache_dir=place / "root/cache")]
        upload(made[0], store)
        made.append(build(place / "root", cache_dir=place / "root/cache"))
        assert made[0].tree == made[1].tree
        assert made[0].tree.files == 3
