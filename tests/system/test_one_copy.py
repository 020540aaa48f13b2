"""A host has one copy of each class of a project, as its caller does, and keeps what modules and
scripts register. Each case is a project in its own folder, run as `python main.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_copy_cases import CONFIG, lines, run

pytestmark = [pytest.mark.timeout(300)]


def test_classes_errors_enums_and_caches_of_modules_are_one(tmp_path: Path) -> None:
    trainer = """
import functools, pickle
from cfgmod import CACHE, Color, Config, ConfigError

@functools.lru_cache
def cached(x):
    return object()

def check(config):
    assert isinstance(config, Config), type(config)
    CACHE["seen"] = config
    if config.width < 0:
        raise ConfigError("negative")
    return pickle.loads(pickle.dumps(config)) == config
"""
    main = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import kinetic
import cfgmod
from cfgmod import Color, Config, ConfigError, square

@kinetic.run(accelerator="cpu")
def job(config, color):
    import cfgmod as again
    import trainer
    print("one class:", trainer.check(config), type(config) is again.Config is Config)
    print("one enum:", color is Color.RED is again.Color.RED)
    try:
        trainer.check(Config(-1))
    except ConfigError as error:
        print("caught:", error)
    cache = cfgmod.CACHE
    print(
        "one cache:",
        cache["seen"].width,
        cache is again.CACHE is trainer.CACHE,
        trainer.cached(1) is trainer.cached(1),
    )
    with ProcessPoolExecutor(2, get_context("fork")) as pool:  # This script has no guard.
        print("pool:", list(pool.map(square, [1, 2, 3])))
    return Config(7), Color.RED

config, color = job(Config(3), Color.RED)
print("back:", type(config) is Config, color is Color.RED)
"""
    assert lines(run(tmp_path, {"cfgmod.py": CONFIG, "trainer.py": trainer, "main.py": main})) == [
        "one class: True True",
        "one enum: True",
        "caught: negative",
        "one cache: -1 True True",
        "pool: [1, 4, 9]",
        "back: True True",
    ]


def test_functions_under_decorators_and_closures_share_the_state_of_their_module(
    tmp_path: Path,
) -> None:
    work = """
import functools, kinetic

CALLS = []

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        CALLS.append(function.__name__)
        return function(*args)
    return inner

@logged
def step(x):
    return x + 1

@kinetic.run(accelerator="cpu")
def train(function):
    import work
    CALLS.append("train")
    step(1)
    function()
    return work.CALLS, work.CALLS is CALLS

def make():
    def counted():
        CALLS.append("closure")
    return counted

class Trainer:
    @kinetic.run(accelerator="cpu")
    def fit(self):
        import work
        CALLS.append(type(self) is work.Trainer)
        return work.CALLS
"""
    main = """
import work
CALLS = work.CALLS
print(work.train(work.make()))
print(work.Trainer().fit())
"""
    assert lines(run(tmp_path, {"work.py": work, "main.py": main})) == [
        "(['train', 'step', 'closure'], True)",
        "[True]",
    ]
