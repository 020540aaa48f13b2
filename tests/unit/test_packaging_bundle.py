"""Packing, sending and unpacking source trees."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from bundle_cases import FOREVER, TREES, build, later, listed, plant, sent, shape, write
from hypothesis import given
from hypothesis import strategies as st

from kinetic._source import bundle, hashing, walk
from kinetic._source import upload as departure
from kinetic._source.download import unpack
from kinetic._source.upload import Sent, upload
from kinetic.errors import UsageError


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path.resolve()


@pytest.fixture
def root(place) -> Path:
    (place / "root").mkdir()
    return place / "root"


@FOREVER
@given(tree=TREES)
def test_what_is_unpacked_is_what_was_packed(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("p").resolve()
    (place / "root").mkdir()
    plant(place / "root", tree)
    packed, store = sent(place / "root", place, default_excludes=False)
    unpack(store, packed.tree, place / "dest")
    assert shape(place / "dest") == shape(place / "root")


@FOREVER
@given(tree=TREES)
def test_the_digest_depends_on_the_content_only(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("p").resolve()
    bundles = []
    for name, order in (("one", tree), ("two", dict(reversed(tree.items())))):
        (place / name / "root").mkdir(parents=True)
        plant(place / name / "root", order)
        bundles.append(build(place / name / "root"))
    assert bundles[0].tree == bundles[1].tree
    assert bundles[0].manifest == bundles[1].manifest


def test_names_that_are_no_text_survive(root, place):
    name = os.fsdecode(b"caf\xe9 \xff")
    write(root, {name: "x"})
    packed, store = sent(root, place)
    unpack(store, packed.tree, place / "dest")
    assert os.listdir(place / "dest") == [name]
    assert build(root).tree == packed.tree


def test_special_bits_are_never_restored(root, place):
    write(root, {"tool": "x"})
    (root / "tool").chmod(0o6755)
    (root / "folder").mkdir(mode=0o700)
    (root / "folder").chmod(0o1555)
    packed, store = sent(root, place)
    unpack(store, packed.tree, place / "dest")
    assert stat.S_IMODE((place / "dest/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "dest/folder").stat().st_mode) == 0o755, "its owner can remove it"


@pytest.mark.starts_processes
def test_what_is_left_out(root):
    names = (
        ".git/HEAD",
        "p/__pycache__/c",
        "node_modules/n",
        ".venv/v",
        "envy/pyvenv.cfg",
        "envy/lib",
        "data/d",
    )
    write(root, dict.fromkeys(("a.py", *names), "x"))
    assert listed(build(root, exclude=[root / "data"])) == ["a.py", "p"]
    assert listed(build(root, exclude=[Path("data/d")], default_excludes=False)) == [
        ".venv", ".venv/v", "a.py", "data", "envy", "envy/lib", "envy/pyvenv.cfg",
        "node_modules", "node_modules/n", "p",
    ]  # fmt: skip


def test_a_missing_root_is_a_usage_error(place):
    with pytest.raises(UsageError, match="does not exist"):
        build(place / "nowhere")


@pytest.mark.starts_processes
def test_links_inside_stay_links_and_others_are_followed(root, place):
    init(root)
    write(root, {"src/a.py": "a", "ignored/big": "b", ".gitignore": "ignored/\n"})
    write(place, {"outside/lib/o.py": "o"})
    (root / "inner").symlink_to(root / "src/a.py")
    (root / "src/up").symlink_to("..")
    (root / "folder").symlink_to("src")
    (root / "lib").symlink_to(place / "outside/lib")
    (root / "one.py").symlink_to(place / "outside/lib/o.py")
    (root / "hidden").symlink_to("ignored/big")
    packed, store = sent(root, place)
    unpack(store, packed.tree, place / "dest")
    unpacked = shape(place / "dest")
    assert {path: what[1] for path, what in unpacked.items() if what[0] == "link"} == {
        "inner": "src/a.py",
        "src/up": "..",
        "folder": "src",
    }
    assert {path: what[2] for path, what in unpacked.items() if what[0] == "file"} == {
        ".gitignore": b"ignored/\n", "src/a.py": b"a", "lib/o.py": b"o", "one.py": b"o",
        "hidden": b"b",
    }  # fmt: skip
    assert packed.warnings == ()


def test_loops_and_broken_links_are_named(root, place):
    write(root, {"a/x": ""})
    write(place, {"out/y": ""})
    (place / "out/again").symlink_to(place / "out")
    (root / "a/out").symlink_to(place / "out")
    (root / "gone").symlink_to("nowhere")
    (root / "self").symlink_to("self")
    packed = build(root)
    assert listed(packed) == ["a", "a/out", "a/out/y", "a/x"]
    assert any("a/out/again" in text and "contains them" in text for text in packed.warnings)
    assert any("gone, self" in text for text in packed.warnings)


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
    packed = build(root)
    assert listed(packed) == []
    assert "pipe" in packed.warnings[0]


@pytest.mark.starts_processes
def test_what_cannot_be_read_is_left_out_by_name():
    # Other users can read this folder, unlike pytest's own folders.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        root.chmod(0o755)
        write(root, {"ok": "1", "locked": "2", "closed/x": "3"})
        (root / "locked").chmod(0)
        (root / "closed").chmod(0)

        def read():
            packed = bundle.build(root, cache_dir=Path("/nonexistent"))
            return listed(packed), packed.warnings

        files, warnings = as_nobody(read)
        (root / "closed").chmod(0o700)
    assert files == ["closed", "ok"]
    assert "closed, locked" in warnings[0]


def as_nobody(act):
    """Call `act` in a child process as another user, who may not read every file."""
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


class Reads(list):
    """Records the files that are read, in order."""


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
    packed, store = sent(root, place, clock_ns=later)
    reads.clear()
    write(root, {"a": "3"})
    packed = build(root)
    assert reads == ["a"]
    receipt = upload(packed, store)
    assert (receipt.files, receipt.size_bytes) == (1, 1)
    assert receipt.lists_bytes < 1000, "the list of its folder, no other"
    assert upload(packed, store) == Sent(0, 0)


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


def init(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", folder], check=True)


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
    "repository above": lambda r: (init(r.parent), write(r.parent, {".gitignore": "a\n"})),
    "swap": lambda r: ((r / "d/b").unlink(), (r / "d/b").mkdir()),
}


@pytest.mark.starts_processes
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(root, place, change):
    if change != "repository above":
        init(root)
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
    second = build(place / "root")
    assert (second.manifest, second.tree) == (good.manifest, good.tree)


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
    packed, store = sent(root, place)
    unpack(store, packed.tree, place / "dest")
    assert shape(place / "dest") == shape(root)
