"""Variables that the interpreter or the loader reads when a process starts, such as PYTHONHASHSEED,
reach the process that runs the function."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kinetic


def hash_of_a_program(seed):
    done = subprocess.run(
        [sys.executable, "-c", "print(hash('kinetic'))"],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.shares_files
def test_start_variables_reach_the_process_and_not_only_its_children(place):
    folder = place.marker("libraries")
    folder.mkdir()
    ctypes.CDLL("libm.so.6")
    mapped = re.search(r"/\S+/libm\S*\.so\S*", Path("/proc/self/maps").read_text())
    shutil.copy(mapped[0], folder / "libofmine.so")
    start = {"PYTHONHASHSEED": "7", "LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "3"}
    names = tuple(start)

    def read_start():
        # Found by LD_LIBRARY_PATH, which the loader read at the start.
        cosine = ctypes.CDLL("libofmine.so").cos
        cosine.argtypes, cosine.restype = [ctypes.c_double], ctypes.c_double
        return cosine(0.0), hash("kinetic"), {name: os.environ.get(name) for name in names}

    assert kinetic.run(accelerator="cpu", env=start)(read_start)() == (
        1.0,
        hash_of_a_program("7"),
        start,
    )


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hosts_of_a_simulated_gang_have_the_seed_that_was_captured(home, monkeypatch, seed):
    monkeypatch.setenv("PYTHONHASHSEED", seed)

    @kinetic.run(accelerator="tpu-v6e-8", capture_env_vars=["PYTHONHASHSEED"], all_hosts=True)
    def read_start():
        return hash("kinetic")

    assert read_start.run_async().results(timeout=200) == [hash_of_a_program(seed)] * 2


@pytest.mark.shares_files
def test_the_function_itself_imports_from_a_pythonpath(place):
    folder = place.marker("mine")
    folder.mkdir()
    (folder / "of_mine.py").write_text("VALUE = 42\n")

    @kinetic.run(accelerator="cpu", env={"PYTHONPATH": str(folder)})
    def use():
        import of_mine

        return of_mine.VALUE

    assert use() == 42
