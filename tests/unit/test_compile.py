"""The real compiler, and what goes to it: in processes of their own, because JAX, once it has
started a backend, warns of every fork of the tests after these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


CASES = ("compile_cases.py", "compile_fault_cases.py", "compile_program_cases.py")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", CASES)
def test_the_cases_pass_where_jax_may_start(cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]
