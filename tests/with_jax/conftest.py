"""Tests that start JAX in the process of pytest itself.

They run in a pytest of their own, which `make test` and `make test-all` start after the main one:
once JAX has started a backend, it warns about every fork, and most other tests fork processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ABSENT = Path(__file__).parents[1] / "absent"
"""Stand-ins for large packages that Keras would import without need."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(ABSENT))


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make this process look like the worker of a job; return the folder of the job's host."""
    folder = tmp_path_factory.mktemp("host")
    monkeypatch.setenv("KINETIC_JOB_ID", "job-0000000a")
    monkeypatch.setenv("KINETIC_HOST_INDEX", "0")
    monkeypatch.setenv("KINETIC_PREEMPTION", str(folder))
    return folder
