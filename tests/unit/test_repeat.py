"""The program behind `make test-repeat`, which lists tests that fail in some runs only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import repeat

SOMETIMES = """
import pathlib

def test_every_second_time():
    count = pathlib.Path("count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    assert number % 2 == 0, "the second time"

def test_always(): pass
"""


def run_repeatedly(folder: Path, times: int, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    pytest = ["-q", "-p", "no:cacheprovider", "test_it.py"]
    command = [sys.executable, repeat.__file__, str(times), *pytest]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Plugins take half of the time.
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.starts_processes
def test_a_test_that_fails_once_is_listed_with_its_output(tmp_path: Path) -> None:
    done = run_repeatedly(tmp_path, 2, SOMETIMES)
    assert done.returncode == 1
    assert "run 1-alone: green; 2 tests" in done.stdout
    assert "run 2-busy: 1 failed; 2 tests" in done.stdout
    assert "test_it::test_every_second_time: failed in 1 of 2 runs (2-busy)" in done.stdout
    assert "AssertionError: the second time" in done.stdout
    assert done.stdout.endswith("1 of 2 runs were green\n")


@pytest.mark.starts_processes
def test_runs_without_tests_are_not_green(tmp_path: Path) -> None:
    done = run_repeatedly(tmp_path, 1, "import no_such_module")
    assert done.returncode == 1
    assert "pytest ended with 2" in done.stdout
    assert done.stdout.endswith("0 of 1 runs were green\n")
