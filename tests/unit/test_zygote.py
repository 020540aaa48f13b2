"""What the preloader imports ahead exists."""

from __future__ import annotations

import importlib.util

import pytest

from kinetic._host.local import zygote


@pytest.mark.parametrize("name", [name for name in zygote.LATE if name.startswith("kinetic.")])
def test_our_own_modules_that_are_imported_ahead_exist(name):
    assert importlib.util.find_spec(name) is not None
