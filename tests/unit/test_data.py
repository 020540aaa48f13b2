"""`kinetic.Data`: its declaration, its digest, its packing, and the paths that replace it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from data_cases import load, paths_in
from hypothesis import given, settings
from hypothesis import strategies as st

import kinetic
from kinetic._datasets import data as declared
from kinetic._datasets.data import Data
from kinetic._source import bundle, download
from kinetic._source.upload import Sent, upload
from kinetic._store.local import LocalStore
from kinetic.errors import UsageError, UsageTypeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "project" / "images"
    (top / "sub").mkdir(parents=True)
    (top / "a.txt").write_text("a")
    (top / "sub" / "b.txt").write_text("b")
    return top


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- declaring -------------------------------------------------------------------------------------


def test_a_local_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    data = kinetic.Data("images")
    assert (data.path, data.is_dir, data.fuse, data.hf_trust_remote_code) == (
        str(folder),
        True,
        False,
        False,
    )
    assert (data.is_gcs, data.is_hf) == (False, False)
    assert not Data(Path("images/a.txt")).is_dir
    assert os.listdir(data) == os.listdir(folder)  # `Data` is a path (os.PathLike).


def test_a_bucket():
    assert (
        Data("gs://bucket/images/").is_dir,
        Data("gs://bucket").is_dir,
        Data("gs://bucket/").is_gcs,
    ) == (True, True, True)
    with pytest.warns(UserWarning, match="single object. For a folder write gs://bucket/x/"):
        assert not Data("gs://bucket/x").is_dir


def test_a_data_set_of_hugging_face():
    data = Data(
        "hf://owner/name?split=train&config_name=en&revision=main", hf_trust_remote_code=True
    )
    assert (data.is_hf, data.is_dir, data.hf_trust_remote_code) == (True, True, True)
    assert Data("hf://squad").path == "hf://squad"
    assert Data("hf://datasets/owner/name").path == "hf://owner/name"
    assert Data("hf://datasets/owner/name/").path == "hf://owner/name"
    assert Data("hf://datasets/squad?split=train").path == "hf://squad?split=train"
    assert Data("hf://datasets/owner/name@v1").path == "hf://owner/name?revision=v1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/at/all",), "there is no file or folder"),
        (("/dev/null",), "neither a file nor a folder"),
        (("",), "needs the path of a file"),
        (("a\0b",), "needs the path of a file"),
        (("s3://bucket/x",), "cannot read s3://"),
        (("gs://B/x",), "is not a valid bucket name"),
        (("gs:///x",), "is not a valid bucket name"),
        (("gs://bucket/../x/",), "without '.' and '..'"),
        (("hf://",), "hf://owner/name"),
        (("hf://a/b/c",), "hf://owner/name"),
        (("hf://datasets/a/b/c.csv",), "whole data set"),
        (("hf://a/b@v1?revision=v2",), "'revision' is unknown, repeated"),
        (("hf://a/b?splits=x",), "'splits' is unknown, repeated"),
        (("hf://a/b?split=",), "'split' is unknown, repeated"),
        (("hf://a/b?split=x&split=y",), "'split' is unknown, repeated"),
        (("hf://a/b?split",), "malformed"),
        (("hf://a/b", True), "cannot be mounted"),
        (("gs://bucket/runs", False, False, True), "with a slash at its end"),
        (("hf://a/b", False, False, True), "only a folder of a bucket can be writable"),
        (("/tmp", False, False, True), "For files on this machine use output_dir="),
    ],
)
def test_what_cannot_be_data_is_refused(arguments, words):
    names = ("path", "fuse", "hf_trust_remote_code", "writable")
    with pytest.raises(UsageError, match=words):
        Data(**dict(zip(names, arguments, strict=False)))


def test_missing_data_is_a_missing_file():
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        Data("nowhere/at/all")


def test_wrong_types_are_refused(folder):
    with pytest.raises(UsageTypeError, match="needs a path or a URI"):
        Data(7)  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="needs a path or a URI"):
        Data(b"x")  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="fuse"):
        Data(str(folder), fuse=1)  # type: ignore[arg-type]


def test_a_folder_of_a_bucket_that_can_be_written_to():
    data = Data("gs://bucket/runs/", writable=True)
    assert (data.writable, data.fuse, data.is_dir) == (True, True, True)
    assert repr(data) == "Data('gs://bucket/runs/', writable=True)"
    back = pickle.loads(pickle.dumps(data))
    assert (repr(back), back.writable, back.fuse) == (repr(data), True, True)


def test_a_copy_elsewhere_checks_nothing_again(folder):
    data = Data(folder, fuse=True)
    data.content_hash()
    moved = pickle.dumps(data)
    folder.rename(folder.with_name("gone"))
    back = pickle.loads(moved)
    assert (back.path, back.is_dir, back.fuse) == (data.path, True, True)
    assert repr(back) == repr(data) == f"Data({str(folder)!r}, fuse=True)"


# -- the digest ------------------------------------------------------------------------------------


names = st.text(alphabet="abc.é ", min_size=1, max_size=3).filter(
    lambda name: name not in (".", "..")
)


trees = st.dictionaries(
    st.lists(names, min_size=1, max_size=3).map(tuple), st.binary(max_size=4), max_size=6
)


def write(top: Path, tree: dict[tuple[str, ...], bytes]) -> dict[tuple[str, ...], bytes]:
    """Write the files of a random tree in order, except files whose path conflicts with an earlier
    file or folder. Return the files that were written."""
    written: dict[tuple[str, ...], bytes] = {}
    top.mkdir()
    for parts, content in tree.items():
        path = top.joinpath(*parts)
        if any(parts[: n + 1] in written for n in range(len(parts))) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written[parts] = content
    return written


@settings(max_examples=40, deadline=None)
@given(tree=trees, other=trees)
def test_the_digest_is_that_of_names_and_contents(tmp_path_factory, tree, other):
    top = tmp_path_factory.mktemp("hash")
    first = write(top / "first", tree)
    second = write(top / "second", dict(reversed(first.items())))
    third = write(top / "third", other)
    assert Data(top / "first").content_hash() == Data(top / "second").content_hash()
    assert (first == third) is (
        Data(top / "first").content_hash() == Data(top / "third").content_hash()
    )
    assert first == second


def test_the_digest_tells_a_file_from_a_folder_that_holds_it(folder):
    (folder / "sub" / "b.txt").rename(folder / "sub" / "x")
    assert Data(folder / "sub").content_hash() != Data(folder / "sub" / "x").content_hash()


def test_the_digest_is_the_same_with_threads(folder, monkeypatch):
    for n in range(40):
        (folder / f"{n}.bin").write_bytes(bytes([n]) * n)
    threaded = Data(folder).content_hash()
    monkeypatch.setattr(declared, "_THREADED_FROM", 1000)
    assert Data(folder).content_hash() == threaded


def test_an_instance_is_a_snapshot(folder, cache):
    data = Data(folder)
    digest, tree = data.content_hash(), data.pack(cache_dir=cache).tree
    (folder / "a.txt").write_text("changed")
    assert data.content_hash() == digest
    assert data.pack(cache_dir=cache).tree == tree
    assert Data(folder).content_hash() != digest
    assert Data(folder).pack(cache_dir=cache).tree != tree


def test_circles_of_links_end(folder):
    (folder / "sub" / "up").symlink_to(folder)
    assert len(Data(folder).content_hash()) == 64


def test_only_local_data_has_a_digest():
    with pytest.raises(UsageError, match="only local data"):
        Data("gs://bucket/x/").content_hash()


def test_nothing_is_left_out_of_data(folder, cache):
    for name in (".git", "__pycache__", ".venv", "node_modules"):
        (folder / name).mkdir()
        (folder / name / "x").write_text("x")
    (folder / ".gitignore").write_text("*.txt\n")
    (folder / ".kineticignore").write_text("sub/\n")
    (folder / "empty").mkdir()
    built = bundle.build_data(folder, cache_dir=cache)
    assert {
        "a.txt",
        "sub/b.txt",
        ".git/x",
        "__pycache__/x",
        ".venv/x",
        "node_modules/x",
        "empty",
    } <= set(paths_in(built))


def test_a_file_is_a_tree_of_one(folder, cache, tmp_path):
    store = LocalStore(tmp_path / "store")
    built = bundle.build_data(folder / "a.txt", cache_dir=cache)
    assert paths_in(built) == ["a.txt"]
    upload(built, store)
    download.unpack(store, built.tree, tmp_path / "there")
    assert (tmp_path / "there" / "a.txt").read_text() == "a"


def test_a_link_to_another_file_is_seen(folder, cache):
    link = folder / "link"
    link.symlink_to("a.txt")
    before = bundle.build_data(link, cache_dir=cache).tree
    link.unlink()
    link.symlink_to("sub/b.txt")
    assert bundle.build_data(link, cache_dir=cache).tree != before


def test_data_and_source_tree_of_one_folder_are_different_things(folder, cache):
    (folder / ".kineticignore").write_text("a.txt\n")
    assert "a.txt" in paths_in(bundle.build_data(folder, cache_dir=cache))
    assert "a.txt" not in paths_in(bundle.build(folder, cache_dir=cache))
    assert "a.txt" in paths_in(bundle.build_data(folder, cache_dir=cache))


def test_unchanged_data_is_not_read_again_and_sends_nothing(folder, cache, tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "store")
    long_ago = 1_000_000_000
    for path in (folder / "a.txt", folder / "sub" / "b.txt", folder / "sub", folder):
        os.utime(path, (long_ago, long_ago))
    clock = lambda: 10**18 * 5  # noqa: E731 - long after the files were changed
    first = bundle.build_data(folder, cache_dir=cache, clock_ns=clock)
    assert upload(first, store).files == 2
    monkeypatch.setattr(bundle.hashing, "hash_files", lambda *a: pytest.fail("it was read again"))
    second = bundle.build_data(folder, cache_dir=cache, clock_ns=clock)
    assert upload(second, store) == Sent(0, 0)


def test_data_that_cannot_be_read_is_refused(folder, cache, monkeypatch):
    real = os.scandir

    def guarded(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    # Permissions do not stop root, who may run the tests.
    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(UsageError, match=r"cannot be read: sub\."):
        bundle.build_data(folder, cache_dir=cache)


def test_secrets_in_data_are_named(folder, cache):
    (folder / "id_rsa").write_text("x")
    loaded = load(Data(folder), cache=cache)
    assert "look like secrets" in "".join(loaded.warnings)
    assert "id_rsa" in "".join(loaded.warnings)
