"""A fixture for tests of decorated functions: a backend that runs calls at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from laptop_fakes import InlineBackend

from kinetic._backends import registry
from kinetic._store.local import LocalStore


@pytest.fixture
def backend(home, monkeypatch):
    """A backend that runs calls at once, for a project in the folder of this file."""
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))
    fake = InlineBackend(LocalStore(home))
    with registry.substitute_backend("local", lambda *_: fake):
        yield fake
