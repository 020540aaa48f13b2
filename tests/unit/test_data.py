"""`kinetic.Data`: what can be declared, its digest, packing, and what travels instead of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import random
import threading
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kinetic
from kinetic._client import planning
from kinetic._client.remote import RemoteCallable
from kinetic._config import settings as configuration
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._datasets import call_data
from kinetic._datasets import data as declared
from kinetic._datasets.data import Data
from kinetic._pickling import call
from kinetic._source import bundle, download, manifest
from kinetic._store.local import LocalStore
from kinetic.errors import PicklingError, SetupFailed, UsageError, UsageTypeError


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


def load(*held, cache: Path, volumes=()) -> call_data.CallData:
    return call_data.load(held, dict(volumes), cache_dir=cache)


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
    assert os.listdir(data) == os.listdir(folder)  # it is a path wherever one is taken


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere/at/all",), "there is no file or folder"),
        (("/dev/null",), "neither a file nor a folder"),
        (("",), "is empty"),
        (("a\0b",), "is empty"),
        (("s3://bucket/x",), "cannot be read from s3"),
        (("gs://B/x",), "cannot be the name of a bucket"),
        (("gs:///x",), "cannot be the name of a bucket"),
        (("gs://bucket/../x/",), "without '.' and '..'"),
        (("hf://",), "hf://owner/name"),
        (("hf://a/b/c",), "hf://owner/name"),
        (("hf://a/b?splits=x",), "'splits' cannot be used"),
        (("hf://a/b?split=",), "'split' cannot be used"),
        (("hf://a/b?split=x&split=y",), "'split' cannot be used"),
        (("hf://a/b?split",), "malformed"),
        (("hf://a/b", True), "cannot be mounted"),
    ],
)
def test_what_cannot_be_data_is_refused(arguments, told):
    with pytest.raises(UsageError, match=told):
        Data(*arguments)


def test_wrong_types_are_refused(folder):
    with pytest.raises(UsageTypeError, match="takes a path"):
        Data(7)  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="takes a path"):
        Data(b"x")  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="fuse"):
        Data(str(folder), fuse=1)  # type: ignore[arg-type]


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
    """Write what can be written of a random tree, in the given order; return that."""
    written: dict[tuple[str, ...], bytes] = {}
    top.mkdir()
    for parts, content in tree.items():
        place = top.joinpath(*parts)
        if any(parts[: n + 1] in written for n in range(len(parts))) or place.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
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
    digest, tree = data.content_hash(), data.packed(cache_dir=cache).tree
    (folder / "a.txt").write_text("changed")
    assert data.content_hash() == digest
    assert data.packed(cache_dir=cache).tree == tree
    assert Data(folder).content_hash() != digest
    assert Data(folder).packed(cache_dir=cache).tree != tree


def test_circles_of_links_end(folder):
    (folder / "sub" / "up").symlink_to(folder)
    assert len(Data(folder).content_hash()) == 64


def test_only_local_data_has_a_digest():
    with pytest.raises(UsageError, match="only local data"):
        Data("gs://bucket/x/").content_hash()


# -- packing ---------------------------------------------------------------------------------------


def paths_in(found: bundle.Bundle) -> list[str]:
    return sorted(entry.path for entry in manifest.unfold(found.manifests))


def test_nothing_is_left_out_of_data(folder, cache):
    for name in (".git", "__pycache__", ".venv", "node_modules"):
        (folder / name).mkdir()
        (folder / name / "x").write_text("x")
    (folder / ".gitignore").write_text("*.txt\n")
    (folder / ".kineticignore").write_text("sub/\n")
    (folder / "empty").mkdir()
    found = bundle.build_data(folder, cache_dir=cache)
    assert {
        "a.txt",
        "sub/b.txt",
        ".git/x",
        "__pycache__/x",
        ".venv/x",
        "node_modules/x",
        "empty",
    } <= set(paths_in(found))


def test_a_file_is_a_tree_of_one(folder, cache, tmp_path):
    store = LocalStore(tmp_path / "store")
    found = bundle.build_data(folder / "a.txt", cache_dir=cache)
    assert paths_in(found) == ["a.txt"]
    bundle.upload(found, store)
    download.unpack(store, found.tree, tmp_path / "there")
    assert (tmp_path / "there" / "a.txt").read_text() == "a"


def test_a_link_to_another_file_is_seen(folder, cache):
    link = folder / "link"
    link.symlink_to("a.txt")
    before = bundle.build_data(link, cache_dir=cache).tree
    link.unlink()
    link.symlink_to("sub/b.txt")
    assert bundle.build_data(link, cache_dir=cache).tree != before


def test_data_and_source_tree_of_one_folder_are_different_things(folder, cache):
    (folder / ".gitignore").write_text("a.txt\n")
    assert "a.txt" in paths_in(bundle.build_data(folder, cache_dir=cache))
    assert "a.txt" not in paths_in(bundle.build(folder, cache_dir=cache))
    assert "a.txt" in paths_in(bundle.build_data(folder, cache_dir=cache))


def test_unchanged_data_is_not_read_again_and_sends_nothing(folder, cache, tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "store")
    long_ago = 1_000_000_000
    for path in (folder / "a.txt", folder / "sub" / "b.txt", folder / "sub", folder):
        os.utime(path, (long_ago, long_ago))
    later = lambda: 10**18 * 5  # noqa: E731 - a clock, long after the files were changed
    first = bundle.build_data(folder, cache_dir=cache, clock_ns=later)
    assert bundle.upload(first, store).files == 2
    monkeypatch.setattr(bundle.hashing, "contents", lambda *a: pytest.fail("it was read again"))
    again = bundle.build_data(folder, cache_dir=cache, clock_ns=later)
    assert bundle.upload(again, store) == bundle.Sent(0, 0)


def test_data_that_cannot_be_read_is_refused(folder, cache, monkeypatch):
    real = os.scandir

    def guarded(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    # the tests may run as root, whom no permission stops
    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(UsageError, match=r"cannot be read: sub\."):
        bundle.build_data(folder, cache_dir=cache)


def test_secrets_in_data_are_named(folder, cache):
    (folder / "id_rsa").write_text("x")
    found = load(Data(folder), cache=cache)
    assert "look like secrets" in "".join(found.warnings)
    assert "id_rsa" in "".join(found.warnings)


# -- with a call -----------------------------------------------------------------------------------


def test_what_the_plan_says(folder, cache):
    data, mounted = Data(folder), Data(folder / "a.txt", fuse=True)
    found = load(data, Data("gs://bucket/x/"), cache=cache, volumes={"/in/a": mounted})
    assert [(each.source, each.is_dir, each.mount) for each in found.data] == [
        (mounted.path, False, "/in/a"),
        (data.path, True, ""),
        ("gs://bucket/x/", True, ""),
    ]
    assert [each.tree is None for each in found.data] == [True, False, True]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Config:
    where: Any


class Slotted:
    __slots__ = ("where",)

    def __init__(self, where: Any) -> None:
        self.where = where


def closed_over(data: Any) -> Callable[[], Any]:
    return lambda: data


def with_default(data: Any) -> Callable[[], Any]:
    def function(where=data, *, more=data):
        assert where is more
        return where

    return function


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "alone": (lambda d: d, lambda got: got),
    "list": (lambda d: [1, [d]], lambda got: got[1][0]),
    "tuple": (lambda d: (d,), lambda got: got[0]),
    "dict": (lambda d: {"k": d}, lambda got: got["k"]),
    "key": (lambda d: {d: 1}, lambda got: next(iter(got))),
    "key in a tuple": (lambda d: {(1, d): 1}, lambda got: next(iter(got))[1]),
    "set": (lambda d: {d}, lambda got: got.pop()),
    "frozenset": (lambda d: [frozenset({d})], lambda got: next(iter(got[0]))),
    "deque": (lambda d: deque([d], maxlen=3), lambda got: got[0]),
    "defaultdict": (lambda d: defaultdict(list, k=d), lambda got: got["k"]),
    "namedtuple": (lambda d: Pair(1, d), lambda got: got.right),
    "dataclass": (Config, lambda got: got.where),
    "slots": (Slotted, lambda got: got.where),
    "attribute": (
        lambda d: types.SimpleNamespace(deep=types.SimpleNamespace(where=d)),
        lambda got: got.deep.where,
    ),
    "closure": (closed_over, lambda got: got()),
    "default": (with_default, lambda got: got()),
    "partial": (lambda d: functools.partial(Pair, d, right=d), lambda got: got().left),
    "method": (lambda d: Config(d).__eq__, lambda got: got.__self__.where),
    "iterator": (lambda d: iter([d]), next),
    "numpy": (lambda d: numpy.array([[None, d]], dtype=object), lambda got: got[0, 1]),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("in_batch", [False, True])
def test_wherever_data_is_the_host_finds_its_path(folder, name, in_batch):
    put, get = PLACES[name]
    data = Data(folder)
    value = put(data)
    if in_batch:
        made = call.BatchPickler(len, env_vars={}, external=Data)
        packed, function = made.pack((value, data), {}), made.function.data
    else:
        packed, function = call.pack(len, (value, data), {}, env_vars={}, external=Data), b""
    assert packed.external == (data,)
    _, args, _ = call.unpack(packed.data, function, external=("/there",))
    assert (get(args[0]), args[1]) == ("/there", "/there")
    assert call.instances(Data, len, [((value,), {})]) == (data,)


def test_data_of_the_function_comes_before_that_of_each_of_its_calls(folder):
    own, one, two = Data(folder), Data(folder), Data(folder)
    made = call.BatchPickler(closed_over(own), env_vars={}, external=Data)
    assert made.function.external == (own,)
    for mine in (one, two, own):
        packed = made.pack((mine, [mine]), {})
        assert packed.external == tuple(dict.fromkeys((own, mine)))
        places = ("/own",) if mine is own else ("/own", "/mine")
        func, args, _ = call.unpack(packed.data, made.function.data, external=places)
        assert (func(), args) == ("/own", (places[-1], [places[-1]]))


def test_a_call_that_cannot_be_pickled_has_no_data_and_says_why_when_it_is_packed(folder):
    lock = threading.Lock()
    assert call.instances(Data, len, [((Data(folder), lock), {})]) == ()
    with pytest.raises(PicklingError, match="lock"):
        call.pack(len, (Data(folder), lock), {}, env_vars={}, external=Data)


def test_data_that_a_host_was_not_given_is_told(folder):
    packed = call.pack(len, (Data(folder),), {}, env_vars={}, external=Data)
    with pytest.raises(SetupFailed, match="not on this host"):
        call.unpack(packed.data)


def test_data_of_the_function_is_in_the_plan(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "pyproject.toml").touch()
    made = planned(closed_over(Data(folder)))
    assert [each.source for each in made.plan.data] == [str(folder)]
    assert made.bundle is not None
    assert "images" not in paths_in(made.bundle)


def test_a_plan_with_data_survives_json(folder, cache):
    found = load(Data(folder), cache=cache)
    plan = dataclasses.replace(planned(lambda d: d, Data(folder)).plan, data=found.data)
    assert Plan.from_json(plan.to_json()) == plan
    old = plan.to_json()
    del old["data"]
    assert Plan.from_json(old).data == ()


def planned(func, *args, **options) -> planning.Planned:
    call = kinetic.run(accelerator="cpu", **options)(func)
    assert isinstance(call, RemoteCallable)
    return planning.make(call._spec(args, {}), configuration.load(), Place("local"))


def test_data_below_the_project_is_not_sent_with_the_source(folder, monkeypatch):
    project = folder.parent
    (project / "pyproject.toml").write_text("")
    (project / "more").mkdir()
    (project / "more" / "c.txt").write_text("c")
    monkeypatch.chdir(project)
    sources = lambda *a, **k: paths_in(planned(os.path.basename, *a, **k).bundle)  # noqa: E731 - no function of this project
    assert sources("x") == [
        "images",
        "images/a.txt",
        "images/sub",
        "images/sub/b.txt",
        "more",
        "more/c.txt",
        "pyproject.toml",
    ]
    assert sources(Data(folder)) == ["more", "more/c.txt", "pyproject.toml"]
    assert sources("x", volumes={"/in": Data(project / "more")})[-1] == "pyproject.toml"
    assert "more/c.txt" not in sources([{"deep": Data(project / "more" / "c.txt")}])
    assert sources(Data(project)) == sources("x")  # the function's own folder is always sent


@pytest.mark.parametrize(
    ("volumes", "told"),
    [
        (["/data"], "must be a dict"),
        ({"data": 1}, "'data' is not an absolute path"),
        ({7: 1}, "7 is not an absolute path"),
        ({"/data": "/here"}, "must be kinetic.Data"),
        ({"/": None}, "the system needs that path"),
        ({"/x/..": None}, "the system needs that path"),
        ({"//proc/x": None}, "the system needs that path"),
        ({"/_kinetic/x": None}, "the system needs that path"),
        ({"/a": None, "/a/": None}, "lie in one another"),
        ({"/a": None, "/a/b": None}, "lie in one another"),
        ({"/a/b": None, "/a": None}, "lie in one another"),
    ],
)
def test_wrong_volumes_are_refused_at_the_decorator(folder, volumes, told):
    fill = (
        {k: Data(folder) if v is None else v for k, v in volumes.items()}
        if isinstance(volumes, dict)
        else volumes
    )
    with pytest.raises(UsageError, match=told):
        kinetic.run(accelerator="cpu", volumes=fill)


def test_volumes_with_similar_names_are_fine(folder):
    data = Data(folder)
    assert list(call_data.volumes({"/a/": data, "/ab": data, "//c/./d": data})) == [
        "/a",
        "/ab",
        "/c/d",
    ]


def test_a_call_in_this_process_gets_the_local_path(folder):
    @kinetic.run(accelerator="cpu")
    def where(data, deep):
        return data, deep

    data, rest = Data(folder), [1, {2}]
    path = str(folder)
    assert where.local(data, [{"k": data}]) == (path, [{"k": path}])
    assert where.local({data}, {data: Pair(1, data)}) == ({path}, {path: Pair(1, path)})
    assert where.local(data, rest)[1] is rest
    ring: list[Any] = [data]
    ring.append(ring)
    assert where.local(data, ring)[1][0] == path


def test_without_data_nothing_of_it_is_loaded(tmp_path):
    import subprocess
    import sys

    code = (
        "import kinetic, sys\n"
        "f = kinetic.run(accelerator='cpu')(len)\n"
        "f.plan([1])\n"
        "print([m for m in sys.modules if m.startswith('kinetic._datasets')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        cwd=tmp_path,
    )
    assert done.stdout == "[]\n", done.stderr


def test_copies_of_an_instance_are_data_too(folder, cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = Data(folder)
        twin = copy.copy(data)
    found = load(data, twin, cache=cache)
    assert len({each.tree.manifest.digest for each in found.data if each.tree}) == 1
    assert random.Random(0).choice(found.data).source == str(folder)
