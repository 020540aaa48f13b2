"""Packing, sending and unpacking source trees."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._core import layout
from kinetic._core.plan import Blob, Tree
from kinetic._source import bundle, cache, hashing, manifest, packs, walk
from kinetic._source import upload as departure
from kinetic._store.local import LocalStore
from kinetic._store.memory import MemoryStore
from kinetic.errors import CorruptRecord, StoreError, StoreFull, UsageError

FOREVER = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def later() -> int:
    """A clock by which all that was just written is old enough to be trusted."""
    return time.time_ns() + 10_000_000_000


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def root(place) -> Path:
    (place / "root").mkdir()
    return place / "root"


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())


def build(root: Path, **given) -> bundle.Bundle:
    return bundle.build(root, **{"cache_dir": root.parent / "cache"} | given)


def listed(made: bundle.Bundle) -> list[str]:
    return sorted(entry.path for entry in manifest.unfold(made.manifests))


def shape(root: Path) -> dict[str, tuple]:
    """All that should survive the journey: kinds, permission bits, content, where links lead."""
    found: dict[str, tuple] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if stat.S_ISLNK(info.st_mode):
                what: tuple = ("link", os.readlink(path))
            elif stat.S_ISDIR(info.st_mode):
                what = ("folder", info.st_mode & 0o777)
            else:
                what = ("file", info.st_mode & 0o777, Path(path).read_bytes())
            found[os.path.relpath(path, root)] = what
    return found


def sent(root: Path, place: Path, **given) -> tuple[bundle.Bundle, LocalStore]:
    made, store = build(root, **given), LocalStore(place / "store")
    bundle.upload(made, store)
    return made, store


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6
).filter(
    lambda n: (
        n not in (".", "..", ".git", "__pycache__", ".gitignore", ".kineticignore", "pyvenv.cfg")
        and len(n.encode()) < 100
    )
)
TREES = st.recursive(
    st.tuples(st.binary(max_size=50), st.sampled_from([0o644, 0o755, 0o600, 0o444])),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
).filter(lambda tree: isinstance(tree, dict))


def plant(folder: Path, tree: dict) -> None:
    for name, what in tree.items():
        if isinstance(what, dict):
            (folder / name).mkdir()
            plant(folder / name, what)
        else:
            (folder / name).write_bytes(what[0])
            (folder / name).chmod(what[1])


@FOREVER
@given(tree=TREES)
def test_what_is_unpacked_is_what_was_packed(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("p").resolve()
    (place / "root").mkdir()
    plant(place / "root", tree)
    made, store = sent(place / "root", place, default_excludes=False)
    bundle.unpack(store, made.tree, place / "dest")
    assert shape(place / "dest") == shape(place / "root")


@FOREVER
@given(tree=TREES)
def test_the_digest_depends_on_the_content_only(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("p").resolve()
    made = []
    for name, order in (("one", tree), ("two", dict(reversed(tree.items())))):
        (place / name / "root").mkdir(parents=True)
        plant(place / name / "root", order)
        made.append(build(place / name / "root"))
    assert made[0].tree == made[1].tree
    assert made[0].manifests == made[1].manifests


def test_names_that_are_no_text_survive(root, place):
    name = os.fsdecode(b"caf\xe9 \xff")
    write(root, {name: "x"})
    made, store = sent(root, place)
    bundle.unpack(store, made.tree, place / "dest")
    assert os.listdir(place / "dest") == [name]
    assert build(root).tree == made.tree


def test_special_bits_are_never_restored(root, place):
    write(root, {"tool": "x"})
    (root / "tool").chmod(0o6755)
    (root / "folder").mkdir(mode=0o700)
    (root / "folder").chmod(0o1555)
    made, store = sent(root, place)
    bundle.unpack(store, made.tree, place / "dest")
    assert stat.S_IMODE((place / "dest/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "dest/folder").stat().st_mode) == 0o755, "its owner can remove it"


def test_what_is_left_out(root):
    beside = (
        ".git/HEAD",
        "p/__pycache__/c",
        "node_modules/n",
        ".venv/v",
        "envy/pyvenv.cfg",
        "envy/lib",
        "data/d",
    )
    write(root, dict.fromkeys(("a.py", *beside), "x"))
    assert listed(build(root, exclude=[root / "data"])) == ["a.py", "p"]
    assert listed(build(root, exclude=[Path("data/d")], default_excludes=False)) == [
        ".venv", ".venv/v", "a.py", "data", "envy", "envy/lib", "envy/pyvenv.cfg",
        "node_modules", "node_modules/n", "p",
    ]  # fmt: skip


def test_a_missing_root_is_a_usage_error(place):
    with pytest.raises(UsageError, match="does not exist"):
        build(place / "nowhere")


# Links


def test_links_inside_stay_links_and_others_are_followed(root, place):
    write(root, {"src/a.py": "a", "ignored/big": "b", ".gitignore": "ignored/\n"})
    write(place, {"outside/lib/o.py": "o"})
    (root / "inner").symlink_to(root / "src/a.py")
    (root / "src/up").symlink_to("..")
    (root / "folder").symlink_to("src")
    (root / "lib").symlink_to(place / "outside/lib")
    (root / "one.py").symlink_to(place / "outside/lib/o.py")
    (root / "hidden").symlink_to("ignored/big")
    made, store = sent(root, place)
    bundle.unpack(store, made.tree, place / "dest")
    found = shape(place / "dest")
    assert {path: what[1] for path, what in found.items() if what[0] == "link"} == {
        "inner": "src/a.py",
        "src/up": "..",
        "folder": "src",
    }
    assert {path: what[2] for path, what in found.items() if what[0] == "file"} == {
        ".gitignore": b"ignored/\n", "src/a.py": b"a", "lib/o.py": b"o", "one.py": b"o",
        "hidden": b"b",
    }  # fmt: skip
    assert made.warnings == ()


def test_loops_and_broken_links_are_named(root, place):
    write(root, {"a/x": ""})
    write(place, {"out/y": ""})
    (place / "out/again").symlink_to(place / "out")
    (root / "a/out").symlink_to(place / "out")
    (root / "gone").symlink_to("nowhere")
    (root / "self").symlink_to("self")
    made = build(root)
    assert listed(made) == ["a", "a/out", "a/out/y", "a/x"]
    assert any("a/out/again" in text and "lie in" in text for text in made.warnings)
    assert any("gone, self" in text for text in made.warnings)


# Warnings


def test_secrets_and_tokens_in_files_of_settings_are_named(root):
    secret = [
        "secrets.yaml",
        "secrets.toml",
        "token.json",
        "token.txt",
        "client_secret_1.json",
        ".pgpass",
    ]
    write(root, dict.fromkeys([*secret, "secrets.py", "tokens.txt"], "x"))
    (warning,) = build(root).warnings
    assert all(name in warning for name in secret)
    assert not any(name in warning for name in ("secrets.py", "tokens.txt"))


def test_secrets_are_named(root):
    secret = [
        ".env",
        ".env.local",
        "k/id_rsa",
        "server.pem",
        "tls.key",
        "credentials-prod.json",
        "service-account.json",
        ".netrc",
        ".pypirc",
    ]
    write(root, dict.fromkeys([*secret, "id_rsa.pub", "keys.py", "environment.py"], "x"))
    (warning,) = build(root).warnings
    assert all(name in warning for name in secret)
    assert not any(name in warning for name in ("id_rsa.pub", "keys.py", "environment.py"))
    assert build(root, clock_ns=later).warnings == (warning,) == build(root).warnings, (
        "also when nothing has changed"
    )


def test_many_names_are_cut(root):
    write(root, {f"{i:03}.pem": "x" for i in range(25)})
    assert "009.pem and 15 more" in build(root).warnings[0]


def test_pipes_are_left_out_by_name(root):
    os.mkfifo(root / "pipe")
    made = build(root)
    assert listed(made) == []
    assert "pipe" in made.warnings[0]


def test_what_cannot_be_read_is_left_out_by_name():
    # Unlike pytest's own folders, one that others can look into.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        root.chmod(0o755)
        write(root, {"ok": "1", "locked": "2", "closed/x": "3"})
        (root / "locked").chmod(0)
        (root / "closed").chmod(0)

        def read():
            made = bundle.build(root, cache_dir=Path("/nonexistent"))
            return listed(made), made.warnings

        found, warnings = as_nobody(read)
        (root / "closed").chmod(0o700)
    assert found == ["closed", "ok"]
    assert "closed, locked" in warnings[0]


def as_nobody(act):
    """Run in a process that may not read everything."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)
            os.write(writer, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return json.loads(data)


def test_the_largest_files_are_known(root):
    write(root, {f"f{i}": b"x" * i for i in range(10)})
    assert build(root).largest == (("f9", 9), ("f8", 8), ("f7", 7), ("f6", 6), ("f5", 5))


@pytest.mark.parametrize(("limit", "value"), [("MOST_FILES", 2), ("MOST_BYTES", 2)])
def test_a_tree_that_is_too_large_is_refused(root, monkeypatch, limit, value):
    monkeypatch.setattr(walk, limit, value)
    write(root, {f"f{i}": "x" for i in range(4)})
    with pytest.raises(UsageError, match=r"KINETIC_PACKAGE_ROOT.*\.kineticignore"):
        build(root)
    write(root, {"pyproject.toml": ""})
    assert build(root).tree.files == 5, "a project may be larger"


# Nothing changed, something changed


class Reads(list):
    """Which files were read."""


@pytest.fixture
def reads(monkeypatch) -> Reads:
    reads, real = Reads(), hashing.read

    def read(path):
        reads.append(os.path.basename(path))
        return real(path)

    monkeypatch.setattr(hashing, "read", read)
    return reads


def test_an_unchanged_tree_is_not_read_again(root, reads, monkeypatch):
    write(root, {"a": "1", "d/b": "2"})
    first = build(root, clock_ns=later)
    assert sorted(reads) == ["a", "b"]
    monkeypatch.setattr(walk, "scan", None)
    assert build(root) == first
    assert len(reads) == 2


def test_only_what_changed_is_read_and_sent(root, place, reads):
    write(root, {"a": "1", "d/b": os.urandom(5000)})
    made, store = sent(root, place, clock_ns=later)
    reads.clear()
    write(root, {"a": "3"})
    made = build(root)
    assert reads == ["a"]
    upload = bundle.upload(made, store)
    assert (upload.files, upload.size_bytes) == (1, 1)
    assert upload.lists_bytes < 1000, "the list of its folder, no other"
    assert bundle.upload(made, store) == bundle.Sent(0, 0)


def test_fresh_files_are_not_trusted(root, reads):
    write(root, {"a": "1"})
    build(root)
    build(root)
    assert reads == ["a", "a"]


def test_a_change_that_hides_its_time_is_seen(root):
    write(root, {"a": "1"})
    before = build(root, clock_ns=later)
    info = (root / "a").stat()
    with open(root / "a", "r+") as file:
        file.write("2")
    os.utime(root / "a", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert build(root).tree != before.tree


CHANGES = {
    "content": lambda r: (r / "d/b").write_text("changed"),
    "mode": lambda r: (r / "d/b").chmod(0o700),
    "folder mode": lambda r: (r / "d").chmod(0o700),
    "rename": lambda r: (r / "d/b").rename(r / "d/c"),
    "delete": lambda r: (r / "d/b").unlink(),
    "new": lambda r: (r / "d/new").write_text(""),
    "new empty folder": lambda r: (r / "d/empty").mkdir(),
    "ignore": lambda r: (r / ".gitignore").write_text("b\n"),
    "own ignore": lambda r: (r / ".kineticignore").write_text("b\n"),
    "nested ignore": lambda r: (r / "d/.gitignore").write_text("b\n"),
    "retarget": lambda r: ((r / "link").unlink(), (r / "link").symlink_to("d/b")),
    "mend": lambda r: (r.parent / "nowhere").write_text("now"),
    "followed": lambda r: (r.parent / "out").write_text("changed"),
    "no longer an environment": lambda r: (r / "envy/pyvenv.cfg").unlink(),
    "repository above": lambda r: write(r.parent, {".git/HEAD": "x", ".gitignore": "a\n"}),
    "swap": lambda r: ((r / "d/b").unlink(), (r / "d/b").mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(root, place, change):
    write(root, {"a": "1", "d/b": "2", ".gitignore": "", "envy/pyvenv.cfg": ""})
    write(place, {"out": "o"})
    (root / "link").symlink_to("a")
    (root / "followed").symlink_to(place / "out")
    (root / "broken").symlink_to(place / "nowhere")
    before = build(root, clock_ns=later)
    assert build(root) == before
    CHANGES[change](root)
    after = build(root)
    assert after.tree != before.tree
    assert after == build(root, cache_dir=place / "another-cache")


@FOREVER
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.sampled_from("xyz"), st.sampled_from(["w", "d", "m", "l"])
        ),
        max_size=8,
    )
)
def test_a_tree_packed_with_the_past_in_mind_is_the_tree(tmp_path_factory, steps):
    place = tmp_path_factory.mktemp("p").resolve()
    root = place / "root"
    write(root, {"a/x": "1", "b/y": "2"})
    for number, (folder, name, act) in enumerate(steps):
        path = root / folder / name
        path.parent.mkdir(exist_ok=True)
        if act == "m" and path.exists():
            path.chmod(0o600 if number % 2 else 0o644)
        elif act in "dl" and os.path.lexists(path):
            path.unlink()
        if act == "w":
            path.unlink(missing_ok=True)
            path.write_text(str(number % 3))
        elif act == "l":
            path.symlink_to(root / "a/x")
        assert build(root, clock_ns=later) == build(root, cache_dir=place / f"cache-{number}")


@FOREVER
@given(data=st.data())
def test_garbage_in_the_cache_is_no_cache(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("p").resolve()
    write(place / "root", {"a": "1", "d/b": "2"})
    good = build(place / "root", clock_ns=later)
    (note,) = (place / "cache/trees").iterdir()
    content = bytearray(note.read_bytes())
    at = int(data.draw(st.floats(0, 0.999)) * len(content))
    how = data.draw(st.sampled_from(["flip", "cut", "noise"]))
    if how == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    note.write_bytes(
        content[:at] if how == "cut" else data.draw(st.binary()) if how == "noise" else content
    )
    again = build(place / "root")
    assert (again.manifests, again.tree) == (good.manifests, good.tree)


def test_a_cache_that_cannot_be_written_does_no_harm(root, place):
    write(root, {"a": "1"})
    write(place, {"file": ""})
    assert build(root, cache_dir=place / "file").tree == build(root).tree


def test_a_cache_inside_the_tree_is_left_out(root):
    write(root, {"a": "1"})
    first = build(root, cache_dir=root / "cache", clock_ns=later)
    assert build(root, cache_dir=root / "cache").tree.files == 1
    assert first.tree.files == 1


def test_old_notes_are_forgotten(root, place):
    folder = place / "cache/trees"
    folder.mkdir(parents=True)
    for number in range(150):
        (folder / f"{number}").write_text("")
        os.utime(folder / f"{number}", ns=(number, number))
    build(root)
    assert len(os.listdir(folder)) == 100
    assert "149" in os.listdir(folder)


def test_a_large_file_is_read_in_parts(root, place, monkeypatch):
    monkeypatch.setattr(departure, "_WHOLE_BYTES", 10)
    write(root, {"big": os.urandom(3_000_000), "bigger": os.urandom(5_000_000)})
    made, store = sent(root, place)
    bundle.unpack(store, made.tree, place / "dest")
    assert shape(place / "dest") == shape(root)


# Sending


def test_what_vouches_for_others_comes_after_them(root, place, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", 1)
    write(root, {"large": "22"} | {f"f{i}": f"{i}" for i in range(10)})
    made = build(root)
    kinds = []

    class Full(LocalStore):
        def put(self, key, data, *, if_absent=False):
            if len(kinds) == 3:
                kinds.clear()
                raise StoreFull("full")
            kinds.append(key.partition("/")[0])
            return super().put(key, data, if_absent=if_absent)

    store = Full(place / "store")
    with pytest.raises(StoreFull):
        bundle.upload(made, store)
    assert not store.has(layout.tree(made.tree.manifest.digest))
    assert bundle.upload(made, store).files == 0, "all that was missing is the record"
    assert kinds == ["trees"]
    store = Full(place / "another")
    kinds.clear()
    with pytest.raises(StoreFull):
        bundle.upload(made, store)
    assert [key.partition("/")[0] for key in store.list("")] == ["blobs", "pack-indexes", "packs"]


def test_any_store_will_do(root, place):
    write(root, {f"d{i}/f": f"{i}" for i in range(100)})
    store = MemoryStore()
    write(root, {"large": os.urandom(300_000), "executable": os.urandom(300_000)})
    (root / "executable").chmod(0o755)
    made = build(root)
    assert bundle.upload(made, store).files == 102
    bundle.unpack(store, made.tree, place / "dest")
    assert shape(place / "dest") == shape(root)
    for key in (layout.blob(made.digests()["large"]), *store.list(layout.PACKS)):
        content = store.get(key)
        store.put(key, content[:-1])
        with pytest.raises(CorruptRecord, match="not what was sent"):
            bundle.unpack(store, made.tree, place / f"dest-{key[-5:]}")
        assert not store.has(layout.tree(made.tree.manifest.digest))
        assert not store.has(key)
        bundle.upload(made, store)
    bundle.unpack(store, made.tree, place / "dest2")


def _pack_and_send(root: Path, place: Path, barrier, answers) -> None:
    barrier.wait(200)
    made = build(root)
    answers.put((made.tree, bundle.upload(made, LocalStore(place / "store"))))


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
    found = [answers.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(200)
    assert len({tree for tree, _ in found}) == 1
    assert sum(each.files for _, each in found) == 80, "each content was written by one of them"
    bundle.unpack(LocalStore(place / "store"), found[0][0], place / "dest")
    assert shape(place / "dest") == shape(root)
    assert build(root).tree == found[0][0]


def whole(store: LocalStore) -> None:
    """Assert that each record in the store has all there that it vouches for: a submission that
    finds it sends nothing."""
    for key in store.list(layout.TREES):
        contents = packs.Contents.from_json(store.get(key))
        for name in contents.packs:
            assert store.has(layout.pack_index(name))
        for digest in contents.blobs:
            assert store.has(layout.blob(digest))
    for key in store.list(layout.PACK_INDEXES):
        data = store.get(key)
        assert layout.pack_index(packs.parse(data).name) == key
        assert store.get(layout.pack(packs.parse(data).name)).startswith(data)


@FOREVER
@given(
    tree=TREES,
    second=TREES,
    stop=st.integers(1, 12),
    wide=st.sampled_from([2, 64]),
    small=st.sampled_from([-1, 10, 1000]),
    full=st.sampled_from([1, 60, 1000]),
)
def test_a_record_never_precedes_what_it_names(
    tmp_path_factory, tree, second, stop, wide, small, full
):
    """Whenever a submission is cut off; what it left is of use to the next."""

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
        patched.setattr(manifest, "_WIDE", wide)
        patched.setattr(packs, "SMALL_BYTES", small)
        patched.setattr(packs, "PACK_BYTES", full)
        for name, each in (("first", tree), ("second", {"shared": tree, "own": second})):
            (place / name).mkdir()
            plant(place / name, each)
            made = build(place / name, default_excludes=False)
            try:
                bundle.upload(made, store)
            except StoreFull:
                whole(store)
                bundle.upload(made, store)
            whole(store)
            bundle.unpack(store, made.tree, place / f"{name}-dest")
            assert shape(place / f"{name}-dest") == shape(place / name)


def test_of_an_unchanged_folder_nothing_is_sent(root, place):
    write(root, {f"d{i}/e{j}/f": os.urandom(500) for i in range(5) for j in range(5)})
    _, store = sent(root, place)
    before = set(store.list(layout.PACK_INDEXES))
    write(root, {"d1/e2/f": "changed"})
    made = build(root)
    upload = bundle.upload(made, store)
    (new,) = set(store.list(layout.PACK_INDEXES)) - before
    lists = manifest.split(made.manifests)
    sent_too = packs.parse(store.get(new)).spans.keys()
    assert len(sent_too) == 4, "a file, and the lists of e2, d1 and the root"
    assert len(sent_too & lists.keys()) == 3
    assert (upload.files, upload.size_bytes) == (1, 7)


def test_of_a_wide_folder_a_part_is_sent(root, place):
    write(root, {f"f{i}": f"{i}" * 100 for i in range(700)})
    _, store = sent(root, place)
    write(root, {"f77": "changed"})
    made = build(root)
    assert bundle.upload(made, store).lists_bytes < len(made.manifests) / 10


def test_deep_trees_travel(root, place):
    write(root, {"d/" * 600 + "a": "1", "d/" * 300 + "b": "2"})
    made, store = sent(root, place)
    bundle.unpack(store, made.tree, place / "dest")
    assert shape(place / "dest") == shape(root)
    assert len(listed(made)) == 602


@pytest.mark.parametrize("name", ["x", "f", "caf\xe9", os.fsdecode(b"\xff")])
def test_a_file_becomes_a_folder_and_a_file_again(root, place, name):
    store = LocalStore(place / "store")
    digests = []
    for number, files in enumerate([{name: "1"}, {f"{name}/{name}": "1"}, {name: "1"}]):
        shutil.rmtree(root)
        root.mkdir()
        write(root, files)
        (root / "empty").mkdir()
        made = build(root, clock_ns=later)
        bundle.upload(made, store)
        bundle.unpack(store, made.tree, place / f"dest{number}")
        assert shape(place / f"dest{number}") == shape(root)
        digests.append(made.tree.manifest.digest)
    assert digests[0] == digests[2] != digests[1]


# Unpacking what is not what was sent


def noticed(store: LocalStore, made: bundle.Bundle, dest: Path) -> bool:
    """Whether a host finds something wrong, and sees to it that the next submission sends it."""
    try:
        bundle.unpack(store, made.tree, dest)
    except CorruptRecord as error:
        told = str(error).lower()
    else:
        return False
    assert "submit the job again" in told
    assert not store.has(layout.tree(made.tree.manifest.digest))
    return True


@FOREVER
@given(data=st.data())
def test_any_byte_changed_in_the_store_is_noticed_and_mended(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("p").resolve()
    same = {f"{folder}/{name}": name for folder in ("d", "p/q/d", "p/d") for name in "bef"}
    write(place / "root", {"a": "one", "large": "five!", "p/q/only": "b"} | same)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "_WIDE", 2)
        patched.setattr(packs, "SMALL_BYTES", 4)
        made, store = sent(place / "root", place)
        key = data.draw(st.sampled_from(sorted(store.list(""))))
        content = bytearray(store.get(key))
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        store.put(key, bytes(content))
        # Whole in spite of it: what only a submission reads, or what only prune does.
        if not noticed(store, made, place / "dest"):
            assert shape(place / "dest") == shape(place / "root")
            assert key.startswith((layout.PACK_INDEXES, layout.TREES))
        bundle.upload(made, store)
        bundle.unpack(store, made.tree, place / "dest2")
        assert shape(place / "dest2") == shape(place / "root")


def keys_of(store: LocalStore, digest: str) -> list[str]:
    """Where a content lies: its own object, or a pack."""
    own = layout.blob(digest)
    return [own] if store.has(own) else packs_with(store, digest)


def packs_with(store: LocalStore, digest: str) -> list[str]:
    indexes = [packs.parse(store.get(key)) for key in store.list(layout.PACK_INDEXES)]
    return [layout.pack(index.name) for index in indexes if digest in index.spans]


@pytest.mark.parametrize("small", [0, 1000])
def test_what_is_missing_is_noticed_and_mended(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    made, store = sent(root, place)
    for number, find in enumerate(
        (
            lambda: keys_of(store, made.digests()["a"]),
            lambda: keys_of(store, made.tree.manifest.digest),
            lambda: [layout.tree(made.tree.manifest.digest)],
        )
    ):
        for key in find():
            store.delete(key)
        with pytest.raises(CorruptRecord, match="missing"):
            bundle.unpack(store, made.tree, place / f"dest{number}")
        bundle.upload(made, store)
        bundle.unpack(store, made.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


@pytest.mark.parametrize("small", [0, 1000])
def test_a_loop_of_symlinks_is_missing_content(root, place, small, monkeypatch):
    monkeypatch.setattr(packs, "SMALL_BYTES", small)
    write(root, {"a": "1", "b": "2"})
    made, store = sent(root, place)
    for number, digest in enumerate((made.digests()["a"], made.tree.manifest.digest)):
        (key,) = keys_of(store, digest)
        store.delete(key)
        store.path(key).symlink_to(store.path(key))
        assert not store.has(key)
        with pytest.raises(CorruptRecord, match="submit the job again"):
            bundle.unpack(store, made.tree, place / f"dest{number}")
        bundle.upload(made, store)
        bundle.unpack(store, made.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_a_file_in_place_of_all_packs(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    shutil.rmtree(store.path(layout.PACKS))
    store.path(layout.PACKS).touch()
    with pytest.raises(CorruptRecord, match="A pack of the source tree is missing"):
        bundle.unpack(store, made.tree, place / "dest")


def test_a_pack_that_claims_more_than_memory_holds_is_damaged(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    for key in keys_of(store, made.tree.manifest.digest):
        store.put(key, store.get(key)[:8] + b"\xff" * 4)
    with pytest.raises(CorruptRecord, match="cut off"):
        bundle.unpack(store, made.tree, place / "dest")


@pytest.mark.parametrize("path", ["deep/er", "wide/7", "", "deep/er/a", "large"])
def test_what_is_wrong_below_is_told_by_its_place_and_mended(root, place, path, monkeypatch):
    """Also for another tree that shares what is damaged."""
    monkeypatch.setattr(packs, "SMALL_BYTES", 10)
    write(root, {"deep/er/a": "1", "other/b": "2", "large": "x" * 11})
    write(root, {f"wide/{n}": f"{n}" for n in range(200)})
    made, store = sent(root, place)
    write(root, {"other/b": "3"})
    second, _ = sent(root, place)
    digest = {"": made.tree.manifest.digest} | {
        each.path: each.digest for each in manifest.unfold(made.manifests) if each.path == path
    }
    for key in keys_of(store, digest[path]):
        content = bytearray(store.get(key))
        index = None if path == "large" else packs.parse(content[: packs.index_bytes(content[:12])])
        content[0 if index is None else index.spans[digest[path]].offset] ^= 1
        store.put(key, bytes(content))
    with pytest.raises(CorruptRecord, match=path or "The list of the source tree"):
        bundle.unpack(store, made.tree, place / "dest")
    for number, each in enumerate([made, second]):
        assert not store.has(layout.tree(each.tree.manifest.digest))
        write(root, {"other/b": "2" if each is made else "3"})
        bundle.upload(each, store)
        whole(store)
        bundle.unpack(store, each.tree, place / f"again{number}")
        assert shape(place / f"again{number}") == shape(root)


def test_it_unpacks_into_an_empty_folder_only(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    (place / "dest").mkdir()
    bundle.unpack(store, made.tree, place / "dest")
    with pytest.raises(StoreError, match="not empty"):
        bundle.unpack(store, made.tree, place / "dest")
    write(place, {"file": ""})
    with pytest.raises(StoreError, match="could not be unpacked"):
        bundle.unpack(store, made.tree, place / "file")


DIGEST = hashlib.sha256(b"x").hexdigest()
FILE = ["f", "a", 0o644, 1, DIGEST]
HOSTILE = {
    "up": [["f", "..", 0o644, 1, DIGEST]],
    "up by a path": [["f", "../a", 0o644, 1, DIGEST]],
    "up inside": [["d", "d", 0o755, [["d", "..", 0o755, [FILE]]]]],
    "absolute": [["f", "/tmp/a", 0o644, 1, DIGEST]],
    "path for a name": [["d", "d", 0o755, []], ["f", "d/a", 0o644, 1, DIGEST]],
    "twice": [FILE, FILE],
    "twice in parts": [["s", [FILE]], ["s", [FILE, ["f", "b", 0o644, 1, DIGEST]]]],
    "folder twice": [["d", "d", 0o755, []], ["d", "d", 0o755, [FILE]]],
    "file and folder": [FILE, ["d", "a", 0o755, []]],
    "below a link": [["d", "d", 0o755, []], ["l", "l", "d"], ["d", "l", 0o755, [FILE]]],
    "link up": [["l", "l", "../etc"]],
    "link out by a detour": [["d", "d", 0o755, [["l", "l", "../../x"]]]],
    "link out by a link": [FILE, ["l", "l", "."], ["l", "m", "l/../a"]],
    "absolute link": [["l", "l", "/etc/passwd"]],
    "link to nothing": [["l", "l", "b"]],
    "link to a link": [FILE, ["l", "b", "a"], ["l", "c", "b"]],
    "link to itself": [["l", "l", "l"]],
    "empty link": [["l", "l", ""]],
    "object for a target": [FILE, ["l", "l", {"a": 1}]],
    "nul in a target": [FILE, ["l", "l", "a\0"]],
    "number for a name": [["f", 7, 0o644, 1, DIGEST]],
    "object for a name": [["f", {}, 0o644, 1, DIGEST]],
    "fraction for a size": [["f", "a", 0o644, 1.0, DIGEST]],
    "number for a digest": [["f", "a", 0o644, 1, 7]],
    "more than there is to a file": [[*FILE, 1]],
    "less than there is to a file": [FILE[:-1]],
    "device": [["c", "a", 0o644]],
    "setuid": [["f", "a", 0o4755, 1, DIGEST]],
    "negative size": [["f", "a", 0o644, -1, DIGEST]],
    "short digest": [["f", "a", 0o644, 1, DIGEST[:-1]]],
    "path for a digest": [["f", "a", 0o644, 1, "../" + DIGEST[3:]]],
    "path for a list": [["d", "d", 0o755, "../" + DIGEST[3:]]],
    "path for a part": [["s", "../" + DIGEST[3:]]],
    "file for a list": [["d", "d", 0o755, DIGEST]],
    "no list": [["d", "d", 0o755]],
    "no part": [["s"]],
    "number for a part": [["s", 3]],
    "nul": [["f", "a\0", 0o644, 1, DIGEST]],
    "dot": [["d", ".", 0o755, []]],
    "empty": [["d", "", 0o755, []]],
    "bool": [["d", "a", True, []]],
    "text": ["fa"],
    "number": [3],
    "object": [{}],
    "nothing": [[]],
}


def keep(rows: list, lists: dict[str, bytes]) -> tuple[Blob, int]:
    """Make a list, and those that stand in it in place of their digests; return it, and how many
    files they name."""
    files, flat = 0, []
    for row in rows:
        if isinstance(row, list) and row and isinstance(row[-1], list):
            below, inside = keep(row[-1], lists)
            flat.append([*row[:-1], below.digest])
            files += inside
        else:
            flat.append(row)
            files += isinstance(row, list) and row[:1] == ["f"]
    data = json.dumps({"schema": manifest.SCHEMA, "entries": flat}).encode()
    digest = hashlib.sha256(data).hexdigest()
    lists[digest] = data
    return Blob(digest, len(data)), files


def packed(place: Path, root: Blob, lists: dict[str, bytes]) -> LocalStore:
    """A store with these lists, and one file."""
    store = LocalStore(place / "store")
    index, parts = packs.build({DIGEST: b"x"}, lists)
    store.put(layout.pack(index.name), b"".join([index.data, *parts]))
    store.put(layout.tree(root.digest), packs.Contents((index.name,)).to_json())
    return store


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_write_nothing(place, rows):
    lists: dict[str, bytes] = {}
    root, files = keep(rows, lists)
    with pytest.raises(CorruptRecord):
        bundle.unpack(packed(place, root, lists), Tree(root, files, files), place / "deep/dest")
    assert not (place / "deep").exists()


def test_harmless_manifests_written_by_hand_are_unpacked(place):
    """Or the test above could find fault with all of them."""
    lists: dict[str, bytes] = {}
    root, files = keep(
        [["s", [FILE, ["l", "l", "d/a"]]], ["s", [["d", "d", 0o755, [FILE, ["l", "l", "../a"]]]]]],
        lists,
    )
    bundle.unpack(packed(place, root, lists), Tree(root, files, files), place / "dest")
    assert sorted(shape(place / "dest")) == ["a", "d", "d/a", "d/l", "l"]


def test_lists_that_unfold_without_end_are_refused(place, monkeypatch):
    monkeypatch.setattr(manifest, "_MOST_ENTRIES", 1000)
    for kind in (["d", "{}", 0o755], ["s"]):
        lists: dict[str, bytes] = {}
        below = keep([], lists)[0]
        for _ in range(60):
            below = keep(
                [
                    [part.format(n) if part == "{}" else part for part in kind] + [below.digest]
                    for n in "12"
                ],
                lists,
            )[0]
        with pytest.raises(CorruptRecord, match="more than 1,000"):
            bundle.unpack(packed(place, below, lists), Tree(below, 0, 0), place / "dest")


@given(
    st.binary()
    | st.sampled_from(
        [b"[]", b"{}", b'{"schema":1,"entries":[]}', b'{"schema":2,"entries":3}', b"[" * 5000]
    )
)
def test_garbage_is_no_manifest(data):
    with pytest.raises(CorruptRecord):
        manifest.contents("", data)


def test_a_tree_of_another_size_is_refused(root, place):
    write(root, {"a": "1"})
    made, store = sent(root, place)
    with pytest.raises(CorruptRecord, match="not the one of this plan"):
        bundle.unpack(store, Tree(made.tree.manifest, 2, 1), place / "dest")


def test_stamps_are_trusted_when_both_times_are_old():
    now, second = 10**18, 10**9
    assert cache.trusted((now - 3 * second, now - 3 * second, 1, 1, 1, 1), now)
    assert not cache.trusted((now - 3 * second, now - second, 1, 1, 1, 1), now)
    assert not cache.trusted((now - second, now - 3 * second, 1, 1, 1, 1), now)
    assert not cache.trusted((now - 3 * second, now + 3 * second, 1, 1, 1, 1), now)
    assert cache.trusted((), now)


def test_nothing_is_left_beside_the_notes(root, place):
    write(root, {"a": "1"})
    for _ in range(3):
        build(root, clock_ns=later)
    assert len(os.listdir(place / "cache/trees")) == 1
    shutil.rmtree(place / "cache")
    assert build(root).tree.files == 1
