"""Jobs of one host that end in less than a second, before the host has connected to its gang."""

from __future__ import annotations

import time

import pytest
from gangs import wait_until

import kinetic
from kinetic.errors import BudgetUsedUp, JobCancelled


def clean_up_when_ended(marker):
    marker.touch()
    try:
        time.sleep(600)
    finally:
        print("cleaned up")


def fail_soon(seconds):
    time.sleep(seconds)
    raise LookupError("soon")


def test_a_function_that_is_cancelled_at_once_has_run(home, tmp_path):
    marker = tmp_path / "begun"
    job = kinetic.run("cpu")(clean_up_when_ended).run_async(marker)
    wait_until(marker.exists, "the function does not begin")
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result()
    assert "cleaned up" in job.logs()
    (report,) = job.outcome().reports
    assert "had not joined" not in report.detail
    assert "ready" in {event["kind"] for event in job.events()}


def test_an_attempt_lasts_as_long_as_its_function(home):
    job = kinetic.run("cpu")(fail_soon).run_async(0.9)
    with pytest.raises(LookupError):
        job.result()
    at = {event["kind"]: event["time"] for event in job.events()}
    assert at["ended"] - at["ready"] >= 0.9


def test_short_attempts_use_up_a_budget(home, monkeypatch):
    monkeypatch.setenv("KINETIC_PRICES", "cpu=3600")
    job = kinetic.run("cpu", retries=5, budget="$2")(fail_soon).run_async(0.9)
    with pytest.raises(BudgetUsedUp):
        job.result()
    assert job.outcome().attempt < 6
