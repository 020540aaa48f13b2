"""Fixtures of tests that start JAX in pytest's own process. These run in a second pytest, after
that of all other tests: once JAX has started a backend, it warns about every fork."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ABSENT = Path(__file__).parents[1] / "absent"
"""A folder of stand-ins for large packages that Keras would import without need."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(ABSENT))


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make this process look like the worker of a job; return the folder of its host."""
    folder = tmp_path_factory.mktemp("host")
    monkeypatch.setenv("KINETIC_JOB_ID", "job-0000000a")
    monkeypatch.setenv("KINETIC_HOST_INDEX", "0")
    monkeypatch.setenv("KINETIC_PREEMPTION", str(folder))
    return folder
