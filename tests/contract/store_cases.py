"""The stores with which the tests of the contract run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from doubles.gcs import Double
from doubles.gcs import serving as gcs_double
from doubles.memory_store import MemoryStore

from kinetic._store.base import Store
from kinetic._store.gcs import GcsStore
from kinetic._store.local import LocalStore

AGE_S = 30 * 86400.0
_doubles: list[Double] = []


def grow_old(store: Store) -> None:
    """Make the objects of a bucket a month old, because `renew` skips younger ones."""
    if isinstance(store, GcsStore):
        _doubles[-1].buckets.grow_old("bucket", AGE_S)


@contextmanager
def local(folder: Path) -> Iterator[Store]:
    yield LocalStore(folder / "store")


@contextmanager
def memory(_folder: Path) -> Iterator[Store]:
    yield MemoryStore()


@contextmanager
def distant(_folder: Path) -> Iterator[Store]:
    yield MemoryStore(delay_s=0.0001)


@contextmanager
def gcs(_folder: Path) -> Iterator[Store]:
    with gcs_double("bucket") as double:
        double.buckets.page_size = 100  # So that a few keys fill several pages.
        _doubles.append(double)
        before = os.environ.get("STORAGE_EMULATOR_HOST")
        os.environ["STORAGE_EMULATOR_HOST"] = double.uri
        try:
            yield GcsStore("gs://bucket/some/prefix")
        finally:
            _doubles.remove(double)
            os.environ.pop("STORAGE_EMULATOR_HOST")
            if before is not None:
                os.environ["STORAGE_EMULATOR_HOST"] = before


OPENERS: dict[str, Callable] = {
    "gcs": gcs,
    "local": local,
    "memory": memory,
    "distant": distant,
}
SHARED = ("gcs", "local")
"""Stores that other processes can open by their address, unlike stores in memory."""
