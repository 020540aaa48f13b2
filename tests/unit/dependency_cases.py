"""A project of the caller, and the requirements that kinetic finds in it for its hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic._source import dependencies
from kinetic._source.dependencies import find

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = {"jax": "0.10.2", "cloudpickle": "3.1.2", "keras": "3.15.1"}
OWN = ("cloudpickle==3.1.2", *dependencies.OWN, *dependencies.OWN_FOR_BUCKETS)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "home" / "me" / "project"
    folder.mkdir(parents=True)
    (folder / ".git").mkdir()
    return folder


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def find_declared(folder):
    return find(folder, home=folder.anchor and Path(folder.anchor) / "nobody")


def texts(folder):
    return [line for line in find_declared(folder).lines if not line.startswith("-")]


def options(folder):
    return [line for line in find_declared(folder).lines if line.startswith("-")]
