"""What is remembered of the memory that functions take, and when it warns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._backends.local import simulation
from kinetic._core import layout
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.exits import Exit
from kinetic._core.options import Options
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.plan import Blob, Plan, Versions
from kinetic._store import footprints
from kinetic._store.local import LocalStore

GIB = 1 << 30


def plan(name: str = "train", accelerator: str = "tpu-v6e-16", **more: Any) -> Plan:
    options, versions = Options(resolve(accelerator)), Versions("3.11", "3", "0")
    return Plan(
        "job-00000001",
        name,
        Place("local"),
        options,
        payload=Blob("", 0),
        versions=versions,
        created_at=0.0,
        **more,
    )


def ran(*peaks: int, verdict: Verdict = Verdict.SUCCEEDED, started_at: float = 1.0) -> Outcome:
    reports = [
        HostReport(host, Exit.RETURNED, peak_rss_bytes=peak, started_at=started_at)
        for host, peak in enumerate(peaks)
    ]
    return Outcome(verdict, reports=tuple(reports))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_the_largest_host_of_the_last_run_counts_on_any_slice(store: LocalStore) -> None:
    assert footprints.peak_bytes(store, plan()) == 0
    footprints.remember(store, plan(), ran(GIB, 2 * GIB))
    assert footprints.peak_bytes(store, plan(accelerator="tpu-v6e-256")) == 2 * GIB
    assert footprints.peak_bytes(store, plan("other")) == 0
    assert footprints.peak_bytes(store, plan(client_root="/elsewhere")) == 0
    footprints.remember(store, plan(), ran(GIB))
    assert footprints.peak_bytes(store, plan()) == GIB


def test_a_run_that_failed_can_only_raise_it(store: LocalStore) -> None:
    footprints.remember(store, plan(), ran(GIB))
    footprints.remember(store, plan(), ran(GIB // 2, verdict=Verdict.FAILED))
    assert footprints.peak_bytes(store, plan()) == GIB
    footprints.remember(store, plan(), ran(3 * GIB, verdict=Verdict.FAILED))
    assert footprints.peak_bytes(store, plan()) == 3 * GIB


def test_what_any_host_takes_is_not_recorded(store: LocalStore) -> None:
    footprints.remember(store, plan(), ran(100 << 20))
    footprints.remember(store, plan(), ran(GIB, started_at=0.0))  # its function never started
    footprints.remember(store, plan(), Outcome(Verdict.FAILED))
    assert [*store.list("footprints")] == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"[]", b"{}", b'{"peak_rss_bytes": "much"}', b'{"peak_rss_bytes": -5}', b"\xff"],
)
def test_a_damaged_record_is_no_record(store: LocalStore, garbage: bytes) -> None:
    footprints.remember(store, plan(), ran(GIB))
    (key,) = store.list("footprints")
    store.put(key, garbage)
    assert footprints.peak_bytes(store, plan()) == 0
    footprints.remember(store, plan(), ran(GIB))
    assert footprints.peak_bytes(store, plan()) == GIB
    assert key == layout.footprint(key[11:75])


def test_a_warning_says_what_may_be_needed() -> None:
    text = simulation.footprint_warning(plan(), 2 * GIB, 6 * GIB)
    assert text.startswith(
        "train took 2.0 GiB on a host when it ran last: 4 hosts may need about 7.5 GiB, and 6.0 "
        "GiB are available"
    )
    one = simulation.footprint_warning(plan(accelerator="cpu"), 2 * GIB, GIB)
    assert one.startswith(
        "train took 2.0 GiB on a host when it ran last, and 1.0 GiB are available here."
    )
    for peak, available in ((2 * GIB, 8 * GIB), (0, 1), (100 << 20, GIB), (2 * GIB, None)):
        assert simulation.footprint_warning(plan(), peak, available) == ""
    assert (
        simulation.footprint_warning(
            replace(plan(), options=Options(resolve("tpu-v6e-16"), slices=2)), 2 * GIB, 8 * GIB
        )
        != ""
    )
