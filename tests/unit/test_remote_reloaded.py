"""Decorated functions whose module was executed anew, as `%autoreload` does it: names that were
imported before run what the file says now."""

from __future__ import annotations

import importlib
import pickle
import sys

import cloudpickle
import pytest

SOURCE = """
import functools
import kinetic

def deco(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@kinetic.run(accelerator="{on}", timeout={n})
def train(base={n}):
    return {n}, base

@kinetic.run(accelerator="cpu")
@deco
def wrapped():
    return {n}

big = train.with_options(accelerator="cpu:2")

def plain():
    return {n}

first = kinetic.run(accelerator="cpu:2")(plain)
plain = kinetic.run(accelerator="cpu")(plain)

@kinetic.run(accelerator="cpu")
def twice():
    return "first"

early = twice

@kinetic.run(accelerator="cpu")
def twice():
    return "second"

class Trainer:
    @kinetic.run(accelerator="cpu")
    def fit(self):
        return {n}

    @kinetic.run(accelerator="cpu")
    @classmethod
    def make(cls):
        return {n}

def local():
    @kinetic.run(accelerator="cpu")
    def inner():
        return {n}
    return inner
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "reloaded_cases.py"
    file.write_text(SOURCE.format(n=1, on="cpu"))
    module = importlib.import_module("reloaded_cases")

    def edit(n, on="cpu"):
        file.write_text(SOURCE.format(n=n, on=on))
        importlib.reload(module)

    module.edit = edit
    yield module
    del sys.modules["reloaded_cases"]


def test_an_imported_name_runs_what_the_file_says_now(module):
    train, wrapped, fit, make = (
        module.train,
        module.wrapped,
        module.Trainer().fit,
        module.Trainer.make,
    )
    module.edit(22)
    assert (train.local(), wrapped.local(), fit.local(), make.local()) == ((22, 22), 22, 22, 22)
    assert train._spec((), {}).func is module.train._func
    module.edit(333)
    assert train.local() == (333, 333)


def test_it_travels_as_what_the_file_says_now(module):
    train = module.train
    module.edit(2)
    assert pickle.loads(cloudpickle.dumps(train))() == (2, 2)


def test_the_options_of_the_decorator_are_those_of_the_file_too(module):
    train = module.train
    module.edit(2, on="cpu:2")
    assert (train.options.topology.name, train.options.timeout_s) == ("cpu:2", 2)
    assert train is not module.train


def test_options_that_were_chosen_stay(module):
    big, first, chosen = module.big, module.first, module.train.with_options(timeout=7)
    module.edit(2, on="cpu:4")
    later = chosen.with_options(name="later")
    assert [each.local() for each in (big, first, chosen, later)] == [(2, 2), 2, (2, 2), (2, 2)]
    assert [each.options.topology.name for each in (big, first)] == ["cpu:2", "cpu:2"]
    assert [each.options.timeout_s for each in (chosen, later)] == [7, 7]
    assert chosen.options.topology.name == "cpu"


def test_one_name_for_two_functions_is_no_reload(module):
    early, twice = module.early, module.twice
    assert (early.local(), twice.local()) == ("first", "second")
    module.edit(2)
    assert (early.local(), twice.local()) == ("first", "second")


def test_what_nothing_takes_the_place_of_stays(module):
    inner, train = module.local(), module.train
    module.edit(2)
    assert inner.local() == 1
    del module.train
    assert train.local() == (1, 1)
    module.train = lambda: None
    assert train.local() == (1, 1)


def test_a_module_that_was_imported_again_is_another_one(module):
    train = module.train
    del sys.modules["reloaded_cases"]
    importlib.import_module("reloaded_cases")
    assert train.local() == (1, 1)


def test_functions_of_the_script_are_left_alone(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", module)
    train = module.train
    train.__module__ = "__main__"
    module.edit(2)
    assert train.local() == (1, 1)
