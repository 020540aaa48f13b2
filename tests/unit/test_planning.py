"""Planning: project, limits, content to send, warnings. Planning writes only to the cache."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time
import types
from importlib import metadata

import pytest

import kinetic
from kinetic._client import planning
from kinetic._client.plan_view import PlanView
from kinetic._config import settings as configuration
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import Place
from kinetic._pickling import call, envelope
from kinetic._source import bundle, shipment
from kinetic.errors import UsageError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project, whose module `work` has the function `train`."""
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    (root / "data.txt").write_text("x" * 1000)
    (root / "src" / "work.py").write_text("def train(x=1):\n    return x\n")
    monkeypatch.chdir(root)
    module = types.ModuleType("work")
    module.__file__ = str(root / "src" / "work.py")
    exec(compile((root / "src" / "work.py").read_text(), module.__file__, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "work", module)
    monkeypatch.setattr(sys, "path", [str(root / "src"), *sys.path])
    return root


def options_of(**options):
    return Options(topology=resolve("tpu-v6e-16"), **options)


def make(func, *args, environ=None, place=Place("local", "pathways"), **options):  # noqa: B008
    settings = configuration.load(environ)
    return planning.plan_call(
        func,
        args,
        {},
        options_of(**options),
        settings=settings,
        place=place,
        name="train",
        job_id="job-00000001",
        now=5.0,
    )


def test_a_plan_has_everything(project, home):
    planned = make(sys.modules["work"].train, 3, timeout_s=7.0, retries=2, env={"A": "1"})
    plan = planned.plan
    assert (plan.job_id, plan.created_at, plan.place.requested, plan.name, plan.hosts) == (
        "job-00000001",
        5.0,
        "pathways",
        "train",
        4,
    )
    assert (plan.client_root, plan.entry_rel, plan.cwd_rel) == (str(project), "src", "")
    assert "src" in plan.sys_path_rel
    assert plan.tree.files == 3
    assert (plan.limits.timeout_s, plan.limits.start_timeout_s) == (7.0, 600.0)
    assert (plan.options.retries, plan.options.env) == (2, {"A": "1"})
    assert plan.options.timeout_s is None  # The plan has it in `limits` instead.
    assert plan.versions == envelope.read_versions()
    assert plan.payload.size_bytes == len(planned.payload)
    assert call.unpack(planned.payload)[1] == (3,)
    assert planned.warnings == ()
    assert type(plan).from_json(plan.to_json()) == plan
    assert not home.exists(), "planning writes nothing but the cache"


def test_settings_fill_in_what_the_options_leave_open(project):
    environ = {
        "HOME": "/home/me",
        "KINETIC_START_TIMEOUT_S": "30",
        "KINETIC_GRACE_S": "1",
        "KINETIC_OUTPUT_DIR": "out",
    }
    environ |= {"KINETIC_CACHE_DIR": str(project.parent / "cache")}
    plan = make(len, [], environ=environ).plan
    assert (plan.limits.start_timeout_s, plan.limits.grace_s) == (30.0, 1.0)
    assert plan.output_dir == str(project / "out")
    plan = make(len, [], environ=environ, start_timeout_s=4.0, output_dir="gs://bucket/out").plan
    assert (plan.limits.start_timeout_s, plan.output_dir) == (4.0, "gs://bucket/out")


def test_what_is_captured_travels_in_the_payload_and_what_looks_secret_apart(project, monkeypatch):
    for name, value in {"APP_MODE": "fast", "APP_KEY": "hunter2", "APP_SET": "outer"}.items():
        monkeypatch.setenv(name, value)
    planned = make(len, [], capture_env_vars=("APP_*",), env={"APP_SET": "inner"})
    assert envelope.read_header(planned.payload).env_vars == {"APP_MODE": "fast"}
    assert planned.plan.captured == ("APP_MODE",)
    assert planned.plan.secrets == ("APP_KEY",)
    assert planned.secrets == {"APP_KEY": "hunter2"}
    assert "hunter2" not in repr(planned)
    assert b"hunter2" not in planned.payload


def test_what_takes_effect_at_the_start_of_a_process_travels_apart(project, monkeypatch):
    for name, value in {"PYTHONHASHSEED": "7", "APP_MODE": "fast"}.items():
        monkeypatch.setenv(name, value)
    planned = make(len, [], capture_env_vars=("PYTHONHASHSEED", "APP_*"))
    assert planned.secrets == {"PYTHONHASHSEED": "7"}
    assert planned.plan.captured == ("APP_MODE",)


def test_secrets_that_no_program_or_cluster_would_take_are_refused_at_once(project, monkeypatch):
    names = tuple(f"TOKEN_{n}" for n in range(10))
    for name in names:
        monkeypatch.setenv(name, "x" * 131_000)
    where = Place("gke", cluster="c")
    with pytest.raises(UsageError, match=r"have 1,310,000 bytes together.*at most 1,000,000"):
        make(len, [], secrets=names, place=where)
    assert make(len, [], secrets=names[:7], place=where).plan.secrets == names[:7]
    assert make(len, [], secrets=names).plan.secrets == names, "hosts here need no Secret"
    monkeypatch.setattr(planning.configuration, "variables", lambda: {"TOKEN": "x" * 131_066})
    with pytest.raises(UsageError, match=r"The secret TOKEN has 131,073 bytes"):
        make(len, [], secrets=("TOKEN",))


def test_a_large_tree_and_a_large_payload_are_warned_about(project):
    (project / "data.txt").write_bytes(b"d" * 5000)
    (project / "small.txt").write_bytes(b"s" * 49)
    environ = {
        "HOME": "/x",
        "KINETIC_CACHE_DIR": str(project.parent / "cache"),
        "KINETIC_CONTEXT_SIZE_WARN_MB": "0.0005",
    }
    environ |= {"KINETIC_PAYLOAD_SIZE_WARN_MB": "0.001"}
    tree, large = make(len, "y" * 5000, environ=environ).warnings
    assert "data.txt" in tree
    assert "small.txt" not in tree
    assert ".kineticignore" in tree
    assert large == (
        "The call of train is large when pickled: 0.0 MB. Its largest parts: argument 1 (str): 0.0 "
        "MB. Pass a path, or kinetic.Data, and load the data on the host."
    )
    in_session = make(
        len, "y" * 5000, environ=environ, place=Place("local", session="job-0000000a")
    )
    assert in_session.warnings == (tree, large)
    environ |= {"KINETIC_CONTEXT_SIZE_WARN_MB": "0", "KINETIC_PAYLOAD_SIZE_WARN_MB": "0"}
    assert make(len, "y" * 5000, environ=environ).warnings == ()


def test_a_tree_of_very_many_files_is_warned_about(project, monkeypatch):
    monkeypatch.setattr(bundle, "MANY_FILES", 3)
    (project / "rows").mkdir()
    for number in range(3):
        (project / f"rows/{number}").touch()
    (warning,) = make(len, []).warnings
    assert ", 3 of them in rows:" in warning
    assert "kinetic.Data" in warning


def test_a_view_lists_what_would_be_sent_largest_first(project):
    (project / "b.txt").write_text("x" * 500)
    view = kinetic.run(accelerator="cpu")(sys.modules["work"].train).plan(1)
    assert view.files[:2] == (("data.txt", 1000), ("b.txt", 500))
    assert len(view.files) == 4
    assert "files      data.txt (1,000), b.txt (500)" in repr(view)


def test_a_secret_looking_file_is_warned_about(project):
    (project / ".env").write_text("TOKEN=1")
    assert any(".env" in warning for warning in make(len, []).warnings)


def test_the_store_and_the_cache_are_not_shipped(project, monkeypatch):
    monkeypatch.setenv("KINETIC_HOME", str(project / "store"))
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(project / "cache"))
    for folder in ("store", "cache"):
        (project / folder).mkdir()
        (project / folder / "big").write_text("x")
    assert make(len, []).plan.tree.files == 3


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    missing = tmp_path / "gone"
    missing.mkdir()
    monkeypatch.chdir(missing)
    missing.rmdir()
    with pytest.raises(UsageError, match="working directory"):
        make(len, [])


def method_of_a_module(name, file):
    module = types.ModuleType(name)
    if file is not None:
        module.__file__ = file
    exec("def f(): pass", module.__dict__)
    return module


@pytest.mark.parametrize(
    "file",
    [
        None,
        "<stdin>",
        "{stdlib}/json/__init__.py",
        "{site}/numpy/__init__.py",
        "{kinetic}/cli/x.py",
        "/gone/x.py",
    ],
)
def test_a_function_of_no_project_belongs_to_the_callers_folder(tmp_path, monkeypatch, file):
    import json
    from pathlib import Path

    import kinetic

    if file is not None:
        places = {
            "stdlib": Path(json.__file__).parents[1],
            "site": Path(pytest.__file__).parents[1],
            "kinetic": Path(kinetic.__file__).parent,
        }
        file = file.format(**places)
    module = method_of_a_module("elsewhere", file)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    assert shipment.entry_dir(module.f, tmp_path) == tmp_path


def test_a_function_of_a_project_belongs_to_its_file(project, tmp_path):
    train = sys.modules["work"].train
    for func in (
        train,
        functools.partial(functools.partial(train)),
        functools.wraps(train)(lambda: 1),
    ):
        assert shipment.entry_dir(func, tmp_path) == project / "src"


def test_pods_install_kinetic_and_what_the_project_asks_for(project):
    (project / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["scipy"]\n')
    train = sys.modules["work"].train
    settings = dataclasses.replace(configuration.load(), store="gs://bucket")

    def planned(controller="multi", **place):
        options = options_of(debug=True, controller=controller)
        where = Place("pathways", cluster="c", **place)
        return planning.plan_call(train, (), {}, options, settings=settings, place=where)

    planned_call = planned()
    contents = planned_call.installed
    assert set(contents) == {
        planned_call.plan.runtime.digest,
        planned_call.plan.requirements.digest,
    }
    assert len(contents[planned_call.plan.runtime.digest]) == planned_call.plan.runtime.size_bytes
    listed = contents[planned_call.plan.requirements.digest].decode().splitlines()
    assert listed[:2] == ["scipy", f"jax[tpu]=={metadata.version('jax')}"]
    assert f"cloudpickle=={metadata.version('cloudpickle')}" in listed
    assert any(line.startswith("google-cloud-storage") for line in listed)
    assert any(line.startswith("debugpy") for line in listed)
    assert type(planned_call.plan).from_json(planned_call.plan.to_json()) == planned_call.plan
    assert planned(image="bundled").plan.requirements == planned_call.plan.requirements
    own = planned(image="ghcr.io/me/it:1")
    assert own.plan.runtime == planned_call.plan.runtime
    assert b"scipy" not in own.installed[own.plan.requirements.digest]
    assert b"jax" not in own.installed[own.plan.requirements.digest]
    single = planned(controller="single")
    listed = single.installed[single.plan.requirements.digest].decode().splitlines()
    assert f"jax=={metadata.version('jax')}" in listed
    assert any(line.startswith("pathwaysutils") for line in listed)
    lines = (
        "--index-url https://me:pw@it",
        "# mine",
        "",
        "scipy --hash=sha256:0",
        "jax",
        *"abcdefghijkl",
    )
    view = PlanView(planned_call.plan, (), packages=lines)
    assert f"installs   kinetic {planned_call.plan.versions.kinetic}\n" in repr(view)
    assert "  packages   scipy, jax, a, b, c, d, e, f, g, h, i, j and 2 more" in repr(view)
    assert "  cluster    c\n" in repr(view)
    view = PlanView(planned(namespace="ml").plan, ())
    assert "  cluster    c, namespace ml\n" in repr(view)


def test_only_pods_install_anything(project):
    work, settings = sys.modules["work"], configuration.load()

    def plan(settings, place):
        return planning.plan_call(work.train, (), {}, options_of(), settings=settings, place=place)

    for place in (Place("local", "gke"), Place("ray")):
        planned_call = plan(settings, place)
        assert (
            planned_call.plan.runtime,
            planned_call.plan.requirements,
            planned_call.installed,
        ) == (None, None, {})
    ready = dataclasses.replace(settings, pod_python="/usr/bin/python3")
    assert plan(ready, Place("gke")).plan.runtime is None


class Counting:
    """An object that counts in `pickled` how often it is pickled."""

    def __init__(self):
        self.pickled = 0

    def __reduce__(self):
        self.pickled += 1
        return (int, ())


class Holder:
    def __init__(self, data):
        self.data = data


def test_a_call_whose_data_can_be_seen_is_pickled_once(project, home):
    train, value = sys.modules["work"].train, Counting()
    data = kinetic.Data(project / "data.txt")
    ring = [data, {"a": (data, value)}]
    ring += [ring, ring]
    planned = make(train, ring)
    assert value.pickled == 1
    assert planned.plan.tree.files == 2, "the data is not sent twice"


def test_data_that_an_object_holds_is_found_by_pickling(project, home):
    train, value = sys.modules["work"].train, Counting()
    planned = make(train, Holder(kinetic.Data(project / "data.txt")), value)
    assert value.pickled == 2
    assert planned.plan.tree.files == 2


def test_data_that_is_gone_is_not_looked_for(project, home):
    kinetic.Data(project / "data.txt")
    gc.collect()  # Remove the Data objects of other tests.
    value = Counting()
    assert make(sys.modules["work"].train, value).plan.tree.files == 3
    assert value.pickled == 1


def test_calls_a_moment_apart_use_one_bucket(home, monkeypatch):
    """Another environment, a long pause, and a call that was not submitted, get a new one."""
    monkeypatch.setenv("KINETIC_BACKEND", "gke")
    monkeypatch.setenv("KINETIC_PROJECT", "p")
    monkeypatch.setenv("KINETIC_STORE", "gs://bucket/jobs")
    monkeypatch.setattr(planning, "_reused", [])

    def open_one():
        return planning.target_of(options_of()).store

    first = open_one()
    assert open_one() is not first, "it was not submitted"
    planning.reuse_store(first)
    assert open_one() is first
    with monkeypatch.context() as patch:
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/other.json")
        assert open_one() is not first
    assert open_one() is first
    planning._reused[0] = planning._reused[0]._replace(used_at=time.monotonic() - 61.0)
    assert open_one() is not first
