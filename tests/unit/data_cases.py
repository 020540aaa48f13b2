"""Shortcuts for tests of declared data: load it, and list the paths of a bundle."""

from __future__ import annotations

from pathlib import Path

from kinetic._datasets import call_data
from kinetic._source import bundle, manifest


def load(*held, cache: Path, volumes=()) -> call_data.CallData:
    return call_data.load(held, dict(volumes), cache_dir=cache)


# -- packing ---------------------------------------------------------------------------------------


def paths_in(found: bundle.Bundle) -> list[str]:
    return sorted(entry.path for entry in manifest.decode(found.manifest))
