"""The local tier, whole states and misuse, in a process of its own: once JAX is in use, a fork
warns, and other tests fork.

In: the cases in `checkpoint_…_cases`. Out: whether they pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    "checkpoint_foreign_cases.py",
    "checkpoint_leaf_cases.py",
    "checkpoint_local_cases.py",
    "checkpoint_misuse_cases.py",
]
LEFT_BEHIND = "ignore::pytest.PytestUnraisableExceptionWarning"
"""Orbax's readers that fail leave coroutines behind, which nobody awaits."""


def assert_pass(names, *options):
    cases = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *cases]
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(600)
def test_states_are_written_read_and_put_together():
    assert_pass(CASES)


@pytest.mark.timeout(600)
def test_what_is_damaged_is_never_restored():
    assert_pass(["checkpoint_damage_cases.py"], "-W", LEFT_BEHIND)
