"""JAX's profiler in elastic jobs: refused, since slices may come and go in a profile.

In: functions and programs that ask for a profile. Out: an error that is no loss, or the profile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kinetic

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


def elastic(function, **options):
    return kinetic.run("tpu-v6e-8", slices=(1, 2), **options)(function)


def profile(folder, how):
    import jax

    if how == "trace":
        with jax.profiler.trace(folder):
            jax.numpy.ones(3).sum()
    elif how == "start_trace":
        from jax.profiler import start_trace

        start_trace(folder)
    else:
        jax.profiler.start_server(0)
    return sorted(path.name for path in Path(folder, "plugins").iterdir())


PROGRAM = "import sys, jax; jax.profiler.start_trace(sys.argv[1])"


def run_a_program(folder):
    command = [sys.executable, "-c", PROGRAM, folder]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("how", ["trace", "start_trace", "start_server"])
def test_a_profile_is_refused(tmp_path, how):
    with pytest.raises(RuntimeError, match=r"does not work in an elastic job.*slices=2") as told:
        elastic(function=profile, max_failures=1)(str(tmp_path), how)
    assert type(told.value).__name__ == "ProfilingRefused", "and not taken for the loss of a slice"


@pytest.mark.long
def test_a_program_is_refused_a_profile_too(tmp_path):
    assert "does not work in an elastic job" in elastic(function=run_a_program)(str(tmp_path))


@pytest.mark.long
def test_who_insists_gets_a_profile(tmp_path):
    remote = elastic(function=profile, env={"KINETIC_PROFILE_ELASTIC": "1"})
    assert remote(str(tmp_path), "trace") == ["profile"]
    fixed = kinetic.run("cpu")(profile)
    (tmp_path / "fixed").mkdir()
    assert fixed(str(tmp_path / "fixed"), "trace") == ["profile"]
