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

CASES = sorted(Path(__file__).parent.glob("checkpoint_*_cases.py"))
ABSENT = Path(__file__).parents[1] / "absent"  # what Keras would import without need


@pytest.mark.long
@pytest.mark.timeout(600)
def test_states_are_written_and_read_and_damage_is_never_restored():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, CASES)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ABSENT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
