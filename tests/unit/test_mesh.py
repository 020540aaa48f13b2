"""Meshes over slices: grouping devices by slice, and sizes that do not fit."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

import kinetic
from kinetic._in_job import mesh, slices
from kinetic.errors import UsageError


class Device(NamedTuple):
    id: int
    process_index: int
    slice_index: int


def devices(count: int, hosts: int = 2, chips: int = 4, *, has_index: bool = True) -> list[Any]:
    """Make the fake devices of `count` slices, in reverse order; without `has_index`, the
    `slice_index` that JAX reports is 0 for all."""
    every = [
        Device(index, index // chips, index // chips // hosts if has_index else 0)
        for index in range(count * hosts * chips)
    ]
    return every[::-1]


@pytest.fixture
def job(monkeypatch):
    def begin(count):
        monkeypatch.setenv(slices.COUNT, str(count))

    return begin


@pytest.mark.parametrize("has_index", [True, False])
def test_devices_fall_into_slices(job, has_index):
    job(3)
    groups = mesh._by_slice(devices(3, has_index=has_index))
    assert [{device.id // 8 for device in group} for group in groups] == [{0}, {1}, {2}]
    assert {len(group) for group in groups} == {8}


def test_outside_a_job_there_is_one_slice():
    assert (kinetic.slice_index(), kinetic.num_slices()) == (0, 1)
    assert len(mesh._by_slice(devices(2, has_index=False))) == 1


def test_slices_that_are_not_alike(job):
    job(2)
    with pytest.raises(UsageError, match="from each slice; got 8, 3"):
        mesh._by_slice(devices(2)[5:])
    with pytest.raises(UsageError, match="11 devices cannot be split into 2 equal slices"):
        mesh._by_slice(devices(2, has_index=False)[5:])


@pytest.mark.parametrize(
    ("axes", "total", "words"),
    [
        ({"data": 3}, 2, "dcn={'data': 3} does not fit: there are 2 slices, and the product"),
        ({"data": 2}, 1, "there is 1 slice,"),
        ({"data": -1, "more": -1}, 2, "One size may be -1"),
        ({"data": 0}, 2, "must be 2"),
        ({"data": -2, "more": -1}, 2, "must be 2"),
        ({"data": -1, "more": 3}, 8, "must be 8"),
        ({}, 2, "must be 2"),
    ],
)
def test_sizes_that_do_not_fit(axes, total, words):
    with pytest.raises(UsageError) as caught:
        mesh._fill_rest("dcn", axes, total, "slice")
    assert words in str(caught.value)


def test_what_is_open_takes_what_the_others_leave():
    for known, rest in itertools.product((1, 2, 3), (1, 2, 5)):
        assert mesh._fill_rest("ici", {"a": known, "b": -1}, known * rest, "device") == {
            "a": known,
            "b": rest,
        }
