"""Files that change, grow, vanish or are replaced while a project is packed and sent. Hosts get the
content that kinetic has read, and no error is raised."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from laptop_fakes import FakeBackend, plan, planned

from kinetic._client import planning, submission
from kinetic._client.batch.inputs import list_calls
from kinetic._client.batch.sources import PackagedCalls
from kinetic._config import settings as configuration
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan
from kinetic._datasets import call_data
from kinetic._datasets.data import Data
from kinetic._source import bundle, hashing, manifest, packs, walk
from kinetic._source.download import unpack
from kinetic._source.upload import Sent, upload
from kinetic._store.local import LocalStore
from kinetic.errors import SourceChanged, UsageError


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path.resolve() / "root").mkdir()
    return tmp_path.resolve() / "root"


@pytest.fixture
def store(root) -> LocalStore:
    return LocalStore(root.parent / "store")


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch) -> None:
    """Treat all files as small (several are sent in one object) or as large (each is sent in
    parts)."""
    if request.param == "large":
        monkeypatch.setattr("kinetic._source.upload._WHOLE_BYTES", 0)
        monkeypatch.setattr(packs, "SMALL_BYTES", 0)


def build(root: Path) -> bundle.Bundle:
    return bundle.build(root, cache_dir=root.parent / "cache")


def content(store: LocalStore, tree, dest: Path) -> dict[str, bytes]:
    unpack(store, tree, dest)
    return {
        str(path.relative_to(dest)): path.read_bytes() for path in dest.rglob("*") if path.is_file()
    }


def sound(store: LocalStore) -> None:
    """Assert that every stored content matches the digest in its key, and no write is
    unfinished."""
    for path in store.path("blobs").rglob("*"):
        if path.is_file():
            assert hashing.read(str(path)).digest == path.parent.name + path.name
    for key in store.list(layout.PACKS):
        data = store.get(key)
        index = packs.parse(data[: packs.index_bytes(data[: packs.HEAD_BYTES])])
        assert key == layout.pack(index.name)
        for digest, (offset, size_bytes) in index.spans.items():
            assert hashlib.sha256(data[offset : offset + size_bytes]).hexdigest() == digest
    assert list(store.path("x").parent.joinpath(".tmp").iterdir()) == []


def test_of_a_file_that_grows_what_was_packed_is_sent(root, store, size):
    (root / "log").write_text("one\n")
    packed = build(root)
    with open(root / "log", "a") as log:
        log.write("two\n")
    assert upload(packed, store).changed is None
    assert content(store, packed.tree, root.parent / "dest") == {"log": b"one\n"}
    sound(store)


def replace(path: Path, text: str) -> None:
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


@pytest.mark.parametrize(
    "change",
    [lambda p: p.write_text("other"), lambda p: p.write_text(""), lambda p: replace(p, "replaced")],
    ids=["written", "truncated", "replaced"],
)
def test_of_a_file_that_has_changed_what_it_is_now_is_sent(root, store, size, change):
    (root / "a").write_text("first")
    (root / "b").write_text("b")
    packed = build(root)
    change(root / "a")
    sent = upload(packed, store)
    assert content(store, sent.changed.tree, root.parent / "dest") == {
        "a": (root / "a").read_bytes(),
        "b": b"b",
    }
    assert sent.files == 2
    assert upload(sent.changed, store) == Sent(0, 0)
    sound(store)


def locked(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "nowhere")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def foldered(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [Path.unlink, piped, foldered, locked])
def test_a_file_that_is_none_any_more_is_left_out_with_the_links_to_it(root, store, size, change):
    (root / "sub").mkdir()
    (root / "sub/a").write_text("a")
    (root / "b").write_text("b")
    (root / "link").symlink_to("sub/a")
    packed = build(root)
    change(root / "sub/a")
    sent = upload(packed, store)
    assert content(store, sent.changed.tree, root.parent / "dest") == {"b": b"b"}
    assert not os.path.lexists(root.parent / "dest/link")
    assert os.listdir(root.parent / "dest/sub") == []


def test_a_content_is_taken_from_any_file_that_still_has_it(root, store):
    for name in "abc":
        (root / name).write_text("same")
    packed = build(root)
    (root / "a").write_text("changed")
    (root / "c").unlink()
    sent = upload(packed, store)
    assert content(store, sent.changed.tree, root.parent / "dest") == {
        "a": b"changed",
        "b": b"same",
        "c": b"same",
    }


def test_what_the_store_has_is_not_read(root, store):
    (root / "a").write_text("a" * 1000)
    upload(build(root), store)
    (root / "b").write_text("b")
    packed = build(root)
    (root / "a").unlink()
    assert upload(packed, store).changed is None


def test_a_large_file_that_changes_while_it_is_copied_is_taken_aside(root, monkeypatch):
    monkeypatch.setattr("kinetic._source.upload._WHOLE_BYTES", 0)
    monkeypatch.setattr(packs, "SMALL_BYTES", 0)
    (root / "a").write_text("1")

    class Slow(LocalStore):
        def put(self, key, data, *, if_absent=False):
            (root / "a").write_text(
                "changed again" if list((root.parent / "cache").glob("spool*")) else "changed"
            )
            return super().put(key, data, if_absent=if_absent)

    store = Slow(root.parent / "store")
    sent = upload(build(root), store)
    assert content(store, sent.changed.tree, root.parent / "dest") == {"a": b"changed"}
    sound(store)


def test_a_file_that_never_stands_still_is_taken_as_it_was_read_and_read_again_next_time(
    root, store, monkeypatch
):
    (root / "log").write_text("x")
    moments = iter(range(100))
    with monkeypatch.context() as restless:
        restless.setattr(hashing, "stamp_of", lambda info: (next(moments),))
        packed = build(root)
    assert next(moments) == 6, "three tries"
    upload(packed, store)
    assert content(store, packed.tree, root.parent / "dest") == {"log": b"x"}
    assert hashing.read(str(root / "log")).stamp


def test_a_file_that_grows_while_it_is_hashed_is_read_once(root, monkeypatch):
    (root / "log").write_bytes(b"x" * 10)
    reads = []

    def growing(file, size_bytes):
        reads.append(size_bytes)
        with open(root / "log", "ab") as log:
            log.write(b"more")
        yield file.read(size_bytes)

    monkeypatch.setattr(hashing, "chunks", growing)
    packed = build(root)
    assert reads == [10]
    assert packed.tree.size_bytes == 10


def test_a_file_that_is_removed_and_written_anew_is_read_again(root, monkeypatch):
    (root / "log").write_text("old")
    real = hashing.open_regular

    def rewriting(path):
        monkeypatch.setattr(hashing, "open_regular", real)
        (root / "log").unlink()
        try:
            return real(path)
        finally:
            (root / "log").write_text("newer")

    monkeypatch.setattr(hashing, "open_regular", rewriting)
    packed = build(root)
    assert (packed.warnings, packed.tree.size_bytes) == ((), 5)


def test_what_goes_away_while_the_tree_is_walked_is_as_if_it_had_never_been(
    root, store, monkeypatch
):
    (root / "gone/deep").mkdir(parents=True)
    (root / "gone/deep/x").write_text("x")
    (root / "a").write_text("a")
    (root / "b").write_text("b")
    (root / "link").symlink_to("a")
    real, contents = walk._Walk._take_folder, hashing.hash_files

    def removing(self, path, rel, visit):
        real(self, path, rel, visit)
        if rel == "gone/deep":
            (root / "gone/deep/x").unlink()
            (root / "gone/deep").rmdir()

    def vanishing(files, before):
        (root / "a").unlink()
        return contents(files, before)

    monkeypatch.setattr(walk._Walk, "_take_folder", removing)
    monkeypatch.setattr(hashing, "hash_files", vanishing)
    packed = build(root)
    assert packed.warnings == ()
    assert [entry.path for entry in manifest.decode(packed.manifest)] == ["b", "gone"]
    assert upload(packed, store).changed is None


WRITER = """
import os, sys, time
how, path = sys.argv[1:]
print("at work", flush=True)
for n in range(10**9):
    if how == "grows":
        open(path, "a").write(f"line {n}\\n")
    elif how == "replaced":
        open(path + ".new", "w").write(f"{n}" * (n % 5000))
        os.replace(path + ".new", path)
    elif how == "truncated":
        open(path, "w").write(f"{n}" * (n % 5000))
    elif how == "comes and goes":
        open(path, "w").write("x")
        os.unlink(path)
    elif how == "changes its rights":
        os.path.exists(path) or open(path, "w").write("x")
        os.chmod(path, 0 if n % 2 else 0o644)
    elif how == "a folder at times":
        os.mkdir(path)
        open(path + "/x", "w").write("x")
        os.unlink(path + "/x")
        os.rmdir(path)
        open(path, "w").write(f"{n}")
        os.unlink(path)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "how",
    ["grows", "replaced", "truncated", "comes and goes", "changes its rights", "a folder at times"],
)
def test_a_writer_that_never_rests_makes_nothing_fail(root, store, size, how):
    (root / "still.py").write_text("still")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, how, str(root / "busy")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            for number in range(12):
                packed = build(root)
                sent = upload(packed, store)
                unpacked = content(
                    store, (sent.changed or packed).tree, root.parent / f"dest{number}"
                )
                assert unpacked["still.py"] == b"still"
            assert writer.poll() is None
        finally:
            writer.kill()
    sound(store)


# Submissions


def test_the_plan_names_what_was_sent(root, store):
    (root / "a").write_text("packed")
    packed, payload = build(root), Blob("ab" * 32, 1)
    shipped = planned(plan(payload=payload, tree=packed.tree), b"p", packed)
    (root / "a").write_text("sent")
    submissions = []
    ref = submission.submit(shipped, FakeBackend(store), store, on_sent=submissions.append)
    stored = Plan.from_json(json.loads(store.get(layout.JobKeys(ref.job_id).plan)))
    assert content(store, stored.tree, root.parent / "dest") == {"a": b"sent"}
    assert submissions[0].plan == stored
    assert submissions[0].bundle.tree == stored.tree


def test_all_inputs_of_a_batch_get_one_tree(root, store, monkeypatch):
    (root / "pyproject.toml").write_text("")
    (root / "a").write_text("packed")
    monkeypatch.chdir(root)
    settings = configuration.load()
    options, calls = Options(topology=resolve("cpu")), list_calls(["x", "y"], "auto")
    shared = planning.plan_function(len, [], options, settings=settings, place=Place("local"))
    target = planning.Target(Place("local"), settings, FakeBackend(store), store)
    source = PackagedCalls(calls, len, shared, target)
    trees = []
    for index in (0, 1):
        (root / "a").write_text(f"at {index}")
        handle = source.submit("grp-00000001", index)
        trees.append(Plan.from_json(json.loads(store.get(layout.JobKeys(handle.job_id).plan))).tree)
    assert trees[0] == trees[1]
    assert content(store, trees[0], root.parent / "dest")["a"] == b"at 0"


def test_data_may_change_until_it_is_sent_and_then_stands_for_what_was_sent(root, store):
    (root / "a").write_text("first")
    data = Data(root)

    def load():
        return call_data.load((data,), {}, cache_dir=root.parent / "cache")

    packed = load()
    (root / "a").write_text("second")
    _, now = call_data.send(packed.bundles, store)
    assert content(store, now[packed.data[0].tree], root.parent / "dest") == {"a": b"second"}
    (root / "a").write_text("third")
    assert load().data[0].tree == now[packed.data[0].tree]
    assert call_data.send(load().bundles, store) == (0, {})
    with pytest.raises(SourceChanged, match="Make a new Data"):
        call_data.send(load().bundles, LocalStore(root.parent / "another"))


def test_data_that_is_gone_is_an_error_and_a_file_gone_from_a_folder_is_none(root, store):
    (root / "a").write_text("first")
    (root / "b").write_text("b")
    folder, file = (
        call_data.load((Data(path),), {}, cache_dir=root.parent / "cache")
        for path in (root, root / "a")
    )
    (root / "a").unlink()
    with pytest.raises(UsageError, match="a can no longer be read"):
        call_data.send(file.bundles, store)
    _, now = call_data.send(folder.bundles, store)
    assert content(store, now[folder.data[0].tree], root.parent / "dest") == {"b": b"b"}
    packed = call_data.load((Data(root),), {}, cache_dir=root.parent / "cache")
    piped(root / "b")
    with pytest.raises(UsageError, match="b can no longer be read"):
        call_data.send(packed.bundles, LocalStore(root.parent / "another"))
