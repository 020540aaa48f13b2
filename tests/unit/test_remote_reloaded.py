"""Decorated functions whose module was reloaded, for example by `%autoreload`: names imported
before the reload run the new code."""

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
    assert train.func is module.train.func
    module.edit(333)
    assert train.local() == (333, 333)


def test_it_travels_as_what_the_file_says_now(module):
    train = module.train
    module.edit(2)
    assert pickle.loads(cloudpickle.dumps(train))() == (2, 2)


def test_options_stay(module):
    train, big, chosen = module.train, module.big, module.train.with_options(timeout=7)
    module.edit(2, on="cpu:4")
    latest = chosen.with_options(name="latest")
    assert [function.local() for function in (train, big, chosen, latest)] == [(2, 2)] * 4
    assert [function.options.topology.name for function in (train, big)] == ["cpu", "cpu:2"]
    assert [function.options.timeout_s for function in (chosen, latest)] == [7, 7]


def test_what_nothing_takes_the_place_of_stays(module):
    inner, train = module.local(), module.train
    module.edit(2)
    assert inner.local() == 1
    del module.train
    assert train.local() == (1, 1)
    module.train = lambda: None
    assert train.local() == (1, 1)


def test_functions_of_the_script_are_left_alone(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", module)
    train = module.train
    train.__module__ = "__main__"
    module.edit(2)
    assert train.local() == (1, 1)
