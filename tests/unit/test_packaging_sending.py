"""Sending source trees: the uploaded content, the order of uploads, and several senders at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from bundle_cases import FOREVER, TREES, build, later, listed, plant, sent, shape, whole, write
from doubles.memory_store import MemoryStore
from hypothesis import given
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._source import packs
from kinetic._source.download import unpack
from kinetic._source.upload import upload
from kinetic._store.local import LocalStore
from kinetic.errors import CorruptRecord, StoreFull


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def root(place) -> Path:
    (place / "root").mkdir()
    return place / "root"


def test_a_record_is_uploaded_after_the_content_that_it_names(root, place, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", 1)
    write(root, {"large": "22"} | {f"f{i}": f"{i}" for i in range(10)})
    packed = build(root)
    kinds = []

    class Full(LocalStore):
        def put(self, key, data, *, if_absent=False):
            if len(kinds) == 2:
                kinds.clear()
                raise StoreFull("full")
            kinds.append(key.partition("/")[0])
            return super().put(key, data, if_absent=if_absent)

    store = Full(place / "store")
    with pytest.raises(StoreFull):
        upload(packed, store)
    assert not store.has(layout.tree(packed.tree.manifest.digest))
    assert upload(packed, store).files == 0, "all that was missing is the record"
    assert kinds == ["trees"]
    store = Full(place / "another")
    kinds.clear()
    with pytest.raises(StoreFull):
        upload(packed, store)
    assert [key.partition("/")[0] for key in store.list("")] == ["blobs", "packs"]


def test_a_tree_is_sent_and_checked_through_a_store_in_memory(root, place):
    write(root, {f"d{i}/f": f"{i}" for i in range(100)})
    store = MemoryStore()
    write(root, {"large": os.urandom(300_000), "executable": os.urandom(300_000)})
    (root / "executable").chmod(0o755)
    packed = build(root)
    assert upload(packed, store).files == 102
    unpack(store, packed.tree, place / "dest")
    assert shape(place / "dest") == shape(root)
    for key in (layout.blob(packed.digests()["large"]), *store.list(layout.PACKS)):
        content = store.get(key)
        store.put(key, content[:-1])
        with pytest.raises(CorruptRecord, match="damaged"):
            unpack(store, packed.tree, place / f"dest-{key[-5:]}")
        assert not store.has(layout.tree(packed.tree.manifest.digest))
        assert not store.has(key)
        upload(packed, store)
    unpack(store, packed.tree, place / "dest2")


def _pack_and_send(root: Path, place: Path, barrier, answers) -> None:
    barrier.wait(200)
    packed = build(root)
    answers.put((packed.tree, upload(packed, LocalStore(place / "store"))))


@pytest.mark.starts_processes
def test_several_processes_send_the_same_tree_at_once(root, place):
    write(root, {f"d{i % 7}/f{i}": os.urandom(2000) for i in range(80)})
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_pack_and_send, args=(root, place, barrier, answers))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    replies = [answers.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(200)
    assert len({tree for tree, _ in replies}) == 1
    assert sum(each.files for _, each in replies) == 80, "each content was written by one of them"
    unpack(LocalStore(place / "store"), replies[0][0], place / "dest")
    assert shape(place / "dest") == shape(root)
    assert build(root).tree == replies[0][0]


@FOREVER
@given(
    tree=TREES,
    second=TREES,
    stop=st.integers(1, 12),
    small=st.sampled_from([-1, 10, 1000]),
    full=st.sampled_from([1, 60, 1000]),
)
def test_a_record_never_precedes_what_it_names(tmp_path_factory, tree, second, stop, small, full):
    """A submission fails at any write. All records that it has written name only content that is in
    the store, and the next submission completes the upload."""

    class Cut(LocalStore):
        puts = 0

        def put(self, key, data, *, if_absent=False):
            self.puts += 1
            if self.puts == stop:
                raise StoreFull("full")
            return super().put(key, data, if_absent=if_absent)

    place = tmp_path_factory.mktemp("p").resolve()
    store = Cut(place / "store")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packs, "SMALL_BYTES", small)
        patched.setattr(packs, "PACK_BYTES", full)
        for name, each in (("first", tree), ("second", {"shared": tree, "own": second})):
            (place / name).mkdir()
            plant(place / name, each)
            packed = build(place / name, default_excludes=False)
            try:
                upload(packed, store)
            except StoreFull:
                whole(store)
                upload(packed, store)
            whole(store)
            unpack(store, packed.tree, place / f"{name}-dest")
            assert shape(place / f"{name}-dest") == shape(place / name)


def test_deep_trees_travel(root, place):
    write(root, {"d/" * 600 + "a": "1", "d/" * 300 + "b": "2"})
    packed, store = sent(root, place)
    unpack(store, packed.tree, place / "dest")
    assert shape(place / "dest") == shape(root)
    assert len(listed(packed)) == 602


@pytest.mark.parametrize("name", ["x", "f", "caf\xe9", os.fsdecode(b"\xff")])
def test_a_file_becomes_a_folder_and_a_file_again(root, place, name):
    store = LocalStore(place / "store")
    digests = []
    for number, files in enumerate([{name: "1"}, {f"{name}/{name}": "1"}, {name: "1"}]):
        shutil.rmtree(root)
        root.mkdir()
        write(root, files)
        (root / "empty").mkdir()
        packed = build(root, clock_ns=later)
        upload(packed, store)
        unpack(store, packed.tree, place / f"dest{number}")
        assert shape(place / f"dest{number}") == shape(root)
        digests.append(packed.tree.manifest.digest)
    assert digests[0] == digests[2] != digests[1]
