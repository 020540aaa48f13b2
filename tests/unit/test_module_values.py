"""Warnings about variables that the program has changed in a module: hosts import the module's
file, where they have their first values."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic._pickling.module_values import list_changes

NAME = "module_values_test"
SOURCE = """
import typing
RATE: float = 0.1
LARGE = 2
NAMES = ["a"]
MODEL = None
TWICE = 1
TWICE = 2
MADE = dict(a=1)
made_once = None
def setup(model):
    global MODEL
    MODEL = model
def get():
    global made_once
    if made_once is None:
        made_once = object()
    return made_once
def own():
    return RATE, get(), made_once
class Kept:
    RATE = 7
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def warnings_of(
    func: Callable[..., Any], config: types.ModuleType, modules: tuple[str, ...] = (NAME,)
) -> str:
    space = {"__name__": "__main__", "config": config}
    in_script = types.FunctionType(func.__code__, space, func.__name__)
    return "\n".join(list_changes(in_script, modules))


config: Any
"""The test's module, under the name by which functions of the script refer to it."""


def read() -> object:
    return config.RATE, config.LARGE, config.NAMES, config.MODEL, config.TWICE, config.MADE


def set_first() -> object:
    config.LARGE = 1
    return config.LARGE, [lambda: config.MADE], "7".count("RATE"), config


def import_there() -> object:
    from module_values_test import RATE  # type: ignore[import-not-found]

    return RATE


def test_the_module_may_be_reached_in_any_way(config: types.ModuleType) -> None:
    config.RATE = 7

    def closed_over() -> object:
        return [config.RATE for _ in range(1)]

    for func in (closed_over, import_there, functools.partial(closed_over)):
        (warning,) = list_changes(func, [NAME])
        assert warning.startswith(f"{NAME}.RATE was changed")


def test_nothing_is_said_of_what_is_as_the_file_says(config: types.ModuleType) -> None:
    vars(config)["LARGE"] = 2.0
    assert warnings_of(read, config) == ""


def test_what_was_set_is_named_and_not_its_value(config: types.ModuleType) -> None:
    config.RATE = 0.5
    config.NAMES.append("b")
    config.setup(config.Kept())
    config.TWICE, config.MADE = 3, {}  # kinetic cannot tell their values in the file.
    assert warnings_of(read, config) == (
        f"{NAME}.RATE was changed since {NAME} was imported. Hosts import the file, where it is "
        "0.1: pass the value as an argument."
    )
    assert warnings_of(read, config, ()) == "", "it is sent by value"


def test_only_what_the_function_reads_counts(config: types.ModuleType) -> None:
    config.RATE = config.LARGE = 7
    assert warnings_of(set_first, config) == ""


def test_functions_of_the_module_read_their_own(config: types.ModuleType) -> None:
    config.get()
    assert list_changes(config.own, [NAME]) == ()
    config.RATE = 7
    (warning,) = list_changes(types.MethodType(config.own, 1), [NAME])
    assert warning.startswith(f"{NAME}.RATE was changed")


def test_what_cannot_be_read_is_no_error(config: types.ModuleType) -> None:
    config.RATE = 7
    assert list_changes(print, [NAME]) == ()
    Path(str(config.__file__)).write_text("RATE = (")
    assert warnings_of(read, config) == ""
