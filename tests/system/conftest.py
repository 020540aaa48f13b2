"""Fixtures of the tests of the whole system.

In: pytest's requests. Out: fixtures. Called by pytest.
"""

from __future__ import annotations

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from elastic_jobs import Watched, reached
from places import EVERYWHERE, Place


@pytest.fixture(params=EVERYWHERE)
def place(request, home, monkeypatch):
    """Where the jobs of the test go: each place in turn."""
    folder = home.parent / "shared"
    if request.param != "kubernetes":
        monkeypatch.setenv("KINETIC_BACKEND", request.param)
        return Place(request.param, folder)
    if request.node.get_closest_marker("shares_files") and not SHARES_FILES:
        pytest.skip("needs pods that share files with this machine, as its own processes do")
    return Place(request.param, folder, request.getfixturevalue("on_cluster"))


@pytest.fixture
def begin(home, tmp_path):
    """Start an elastic job; if asked to `wait`, until host 0 has done two steps of attempt 1."""

    def begin(remote, *args, wait=False, **more):
        handle = remote.run_async(str(tmp_path), *args, **more)
        if wait:
            reached(tmp_path, 1, 0)
        return Watched(home, handle)

    return begin
