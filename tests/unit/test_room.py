"""The number of jobs with one accelerator that this machine can run well at the same time."""

from __future__ import annotations

import pytest
from laptop_fakes import plan

from kinetic._backends.base import Capacity
from kinetic._backends.local import simulation
from kinetic._backends.local.backend import LocalBackend
from kinetic._store.local import LocalStore
from kinetic._system import machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("accelerator", "cpus", "available", "jobs"),
    [
        ("cpu", 2, None, 2),
        ("cpu", 2, 64 * GIB, 2),
        ("cpu:8", 2, 64 * GIB, 2),
        ("tpu-v6e-16", 2, 64 * GIB, 1),
        ("tpu-v6e-16", 9, 64 * GIB, 2),
        ("cpu", 8, GIB // 2, 2),
        ("cpu", 8, 0, 1),
    ],
)
def test_the_number_of_jobs_that_processors_and_memory_allow(accelerator, cpus, available, jobs):
    assert simulation.room(plan(accelerator=accelerator), cpus, available) == jobs


def test_room_for_jobs_of_unknown_shape():
    assert simulation.room(None, 4, 64 * GIB) == 4
    assert simulation.room(None, 4, GIB) == 3


def test_the_backend_measures_its_machine_for_room(home):
    backend = LocalBackend(
        LocalStore(home), {}, usable_cpus=lambda: 6, available_memory_bytes=lambda: 64 * GIB
    )
    assert isinstance(backend, Capacity)
    assert backend.room(plan(accelerator="cpu")) == 6
    assert backend.room(None) == 6


@pytest.mark.parametrize(
    ("quota", "cpus"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None), ("", None)]
)
def test_processors_of_a_container(tmp_path, quota, cpus):
    (tmp_path / "cpu.max").write_text(quota)
    free = machine.usable_cpus(tmp_path / "none")
    assert free >= 1
    assert machine.usable_cpus(tmp_path / "cpu.max") == (free if cpus is None else cpus)
