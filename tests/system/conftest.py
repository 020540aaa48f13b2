"""Fixtures of the tests of the whole system.

In: pytest's requests. Out: fixtures. Called by pytest.
"""

from __future__ import annotations

import pytest
from cluster.fixtures import SHARES_FILES
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
