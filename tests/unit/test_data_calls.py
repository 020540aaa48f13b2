"""Declared data in a call's arguments and volumes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
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
from data_cases import load, paths_in

import kinetic
from kinetic._client import planning
from kinetic._config import settings as configuration
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._datasets import call_data
from kinetic._datasets.data import Data
from kinetic._pickling import call
from kinetic.errors import PicklingError, SetupFailed, UsageError


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


# -- with a call -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mount", "path"),
    [
        ("/in", "/in/a.txt"),
        ("/in/a.txt", "/in/a.txt"),
        ("/in/b.txt", "/in/b.txt"),
        ("/in/a.csv", "/in/a.csv"),
        ("/in.d/a", "/in.d/a/a.txt"),
    ],
)
def test_a_file_is_in_a_folder_or_has_a_path_of_its_kind(mount, path, folder, cache):
    loaded = load(cache=cache, volumes={mount: Data(folder / "a.txt")})
    assert [each.mount for each in loaded.data] == [path]


def test_what_the_plan_says(folder, cache):
    data, mounted = Data(folder), Data(folder / "a.txt", fuse=True)
    loaded = load(data, Data("gs://bucket/x/"), cache=cache, volumes={"/in/a": mounted})
    assert [(each.source, each.is_dir, each.mount) for each in loaded.data] == [
        (mounted.path, False, "/in/a/a.txt"),
        (data.path, True, ""),
        ("gs://bucket/x/", True, ""),
    ]
    assert [each.tree is None for each in loaded.data] == [True, False, True]


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
        pickler = call.BatchPickler(len, env_vars={}, external=Data)
        packed, function = pickler.pack((value, data), {}), pickler.function.data
    else:
        packed, function = call.pack(len, (value, data), {}, env_vars={}, external=Data), b""
    assert packed.external == (data,)
    _, args, _ = call.unpack(packed.data, function, external=("/there",))
    assert (get(args[0]), args[1]) == ("/there", "/there")
    assert call.find_instances(Data, len, [((value,), {})]) == (data,)


def test_data_of_the_function_comes_before_that_of_each_of_its_calls(folder):
    own, one, two = Data(folder), Data(folder), Data(folder)
    pickler = call.BatchPickler(closed_over(own), env_vars={}, external=Data)
    assert pickler.function.external == (own,)
    for mine in (one, two, own):
        packed = pickler.pack((mine, [mine]), {})
        assert packed.external == tuple(dict.fromkeys((own, mine)))
        paths = ("/own",) if mine is own else ("/own", "/mine")
        func, args, _ = call.unpack(packed.data, pickler.function.data, external=paths)
        assert (func(), args) == ("/own", (paths[-1], [paths[-1]]))


def test_a_call_that_cannot_be_pickled_has_no_data_and_says_why_when_it_is_packed(folder):
    lock = threading.Lock()
    assert call.find_instances(Data, len, [((Data(folder), lock), {})]) == ()
    with pytest.raises(PicklingError, match="lock"):
        call.pack(len, (Data(folder), lock), {}, env_vars={}, external=Data)


def test_data_that_a_host_was_not_given_is_told(folder):
    packed = call.pack(len, (Data(folder),), {}, env_vars={}, external=Data)
    with pytest.raises(SetupFailed, match="missing on this host"):
        call.unpack(packed.data)


@pytest.mark.starts_processes
def test_data_of_the_function_is_in_the_plan(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "pyproject.toml").touch()
    planned_call = planned(closed_over(Data(folder)))
    assert [each.source for each in planned_call.plan.data] == [str(folder)]
    assert planned_call.bundle is not None
    assert "images" not in paths_in(planned_call.bundle)


@pytest.mark.starts_processes
def test_a_plan_with_data_survives_json(folder, cache):
    loaded = load(Data(folder), cache=cache)
    plan = dataclasses.replace(planned(lambda d: d, Data(folder)).plan, data=loaded.data)
    assert Plan.from_json(plan.to_json()) == plan
    old = plan.to_json()
    del old["data"]
    assert Plan.from_json(old).data == ()


def planned(func, *args, **options) -> planning.Planned:
    call = kinetic.run(accelerator="cpu", **options)(func)
    return planning.plan_call(
        func, args, {}, call.options, settings=configuration.load(), place=Place("local")
    )


def test_data_below_the_project_is_not_sent_with_the_source(folder, monkeypatch):
    project = folder.parent
    (project / "pyproject.toml").write_text("")
    (project / "more").mkdir()
    (project / "more" / "c.txt").write_text("c")
    monkeypatch.chdir(project)
    sources = lambda *a, **k: paths_in(planned(os.path.basename, *a, **k).bundle)  # noqa: E731 - basename is not the project's
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
    assert sources(Data(project)) == sources("x")  # The function's own folder is always sent.


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        (["/data"], "must be a dict"),
        ({"data": 1}, "must be absolute paths, such as '/data'; got 'data'"),
        ({7: 1}, "must be absolute paths, such as '/data'; got 7"),
        ({"/data": "/here"}, "must be kinetic.Data"),
        ({"/": None}, "the system needs that path"),
        ({"/x/..": None}, "the system needs that path"),
        ({"//proc/x": None}, "the system needs that path"),
        ({"/_kinetic/x": None}, "the system needs that path"),
        ({"/a": None, "/a/": None}, "overlap"),
        ({"/a": None, "/a/b": None}, "overlap"),
        ({"/a/b": None, "/a": None}, "overlap"),
    ],
)
def test_wrong_volumes_are_refused_at_the_decorator(folder, volumes, words):
    fill = (
        {k: Data(folder) if v is None else v for k, v in volumes.items()}
        if isinstance(volumes, dict)
        else volumes
    )
    with pytest.raises(UsageError, match=words):
        kinetic.run(accelerator="cpu", volumes=fill)


def test_volumes_with_similar_names_are_fine(folder):
    data = Data(folder)
    assert list(call_data.check_volumes({"/a/": data, "/ab": data, "//c/./d": data})) == [
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


@pytest.mark.starts_processes
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
    loaded = load(data, twin, cache=cache)
    assert len({each.tree.manifest.digest for each in loaded.data if each.tree}) == 1
    assert random.Random(0).choice(loaded.data).source == str(folder)
