"""Environment variables that an agent or a worker gets when it starts on a host."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from manifest_cases import PLACE, SETTINGS, env_of, planned

from kinetic._backends.kubernetes.manifests import render
from kinetic._backends.local import launcher
from kinetic._core.variables import select_start_variables
from kinetic._host import identity
from kinetic._host.agent import start_message

ENV = {
    "PYTHONHASHSEED": "7",
    "LD_PRELOAD": "/opt/jemalloc.so",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "3",
    "SEED": "1",
    "JAX_LOG_COMPILES": "1",
    "PYTHONPATH": "/opt/lib",
}
AT_START = {name: ENV[name] for name in tuple(ENV)[:4]}


def test_only_variables_read_at_a_process_start_are_selected():
    assert select_start_variables(ENV) == AT_START


@pytest.mark.parametrize(
    "name", ["LD_SDK_KEY", "LANGFUSE_HOST", "PYTHON_TOKEN", "TZKT_API", "PYTHONHOME"]
)
def test_variables_with_similar_names_are_not_start_variables(name):
    assert select_start_variables({name: "x", "TZ": "UTC", "LC_ALL": "C"}) == {
        "TZ": "UTC",
        "LC_ALL": "C",
    }


@pytest.mark.parametrize("slices", [1, (1, 2)])
def test_containers_get_start_variables_except_the_head(slices):
    plan = planned("tpu-v6e-16", slices=slices, env=ENV, place=replace(PLACE, backend="pathways"))
    workload = render(plan, SETTINGS)[0]
    assert {n: v for n, v in env_of(workload).items() if n in ENV} == AT_START
    if slices != 1:
        assert not ENV.keys() & env_of(workload, of="head").keys()


def environ(base, **env):
    who = identity.from_environ(env_of(render(planned("gpu-l4"), SETTINGS)[0]))
    names = {"root": Path("host"), "output_dir": "", "tree": Path("tree"), "cwd": Path("/t/cwd")}
    space = SimpleNamespace(**names, sys_path=(), editable=())
    world = start_message.World("", 1, 0, 1, "gpu", False)
    plan, who = planned("gpu-l4", env=env), replace(who, base_env=base)
    variables = start_message._environ(who, plan, space, world, debug=False)
    return variables, start_message._requested_path(who, plan, space)


def test_programs_find_the_driver_of_gpus_beside_the_libraries_of_env():
    both = "/mine:/usr/local/nvidia/lib64"
    variables, _ = environ({"LD_LIBRARY_PATH": both}, LD_LIBRARY_PATH="/mine")
    assert variables["LD_LIBRARY_PATH"] == both
    variables, _ = environ({}, LD_LIBRARY_PATH="/mine")
    assert variables["LD_LIBRARY_PATH"] == "/mine"


def test_folders_of_a_pythonpath_are_those_of_this_host():
    variables, folders = environ({}, PYTHONPATH=f"/opt/lib{os.pathsep}src{os.pathsep}")
    assert folders == ["/opt/lib", "/t/cwd/src"]
    assert variables["PYTHONPATH"] == f"/opt/lib{os.pathsep}src{os.pathsep}"
    assert environ({})[1] == []


class FakeZygote:
    def __init__(self, modules, environ):
        self.owner, self.is_open = os.getpid(), True
        self.seed = environ["PYTHONHASHSEED"]

    def import_ahead(self, libraries):
        pass

    def close(self):
        self.is_open = False


def test_many_values_of_start_variables_keep_only_a_few_zygotes(monkeypatch):
    monkeypatch.setattr(launcher, "Zygote", FakeZygote)
    monkeypatch.setattr(launcher, "_zygotes", zygotes := {})
    foreign = FakeZygote((), {"PYTHONHASHSEED": "of the process that forked this one"})
    foreign.owner, zygotes["foreign",] = 1, foreign
    started = []
    for seed in map(str, range(launcher.MOST_ZYGOTES + 2)):
        launcher.warm_up((), {"PYTHONHASHSEED": seed})
        started.append(list(zygotes.values())[-1])
    assert [zygote.is_open for zygote in started] == [False] * 2 + [True] * launcher.MOST_ZYGOTES
    assert list(zygotes.values()) == [foreign, *started[2:]]
    assert foreign.is_open, "another process ends it"
