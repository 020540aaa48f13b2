"""States of a job, and the pure function that decides which one a job is in."""

from __future__ import annotations

import itertools

import pytest

from kinetic._core.outcome import Verdict
from kinetic._core.state import STARTING_S, JobStatus, status_of
from kinetic.job_status import JobStatus as Public

CREATED = 1000.0


def at(verdict=None, phase=JobStatus.NOT_FOUND, *, recorded=True, now=CREATED + 1):
    return status_of(verdict, phase, recorded=recorded, created_at=CREATED, now=now)


def test_the_public_status_has_all_names_and_knows_which_are_final():
    assert Public is JobStatus
    assert {"PENDING", "RUNNING", "SUCCEEDED", "FAILED", "NOT_FOUND"} < set(map(str, Public))
    assert [status for status in JobStatus if not status.ended] == ["PENDING", "RUNNING"]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_decides_the_status_whatever_the_backend_says(verdict):
    for phase, recorded in itertools.product(JobStatus, (True, False)):
        assert at(verdict, phase, recorded=recorded, now=0.0) == verdict.upper()


@pytest.mark.parametrize("phase", [each for each in JobStatus if each is not JobStatus.NOT_FOUND])
def test_without_a_verdict_the_backend_decides_the_status(phase):
    assert at(None, phase, recorded=False, now=1e12) is phase


@pytest.mark.parametrize(
    ("recorded", "now", "status"),
    [
        (True, CREATED, JobStatus.PENDING),
        (True, CREATED + STARTING_S - 1, JobStatus.PENDING),
        (True, CREATED + STARTING_S, JobStatus.FAILED),
        (True, CREATED - STARTING_S, JobStatus.FAILED),
        (False, CREATED, JobStatus.NOT_FOUND),
    ],
    ids=["new", "slow", "interrupted", "clock set back", "removed"],
)
def test_a_job_that_no_backend_knows(recorded, now, status):
    assert at(None, JobStatus.NOT_FOUND, recorded=recorded, now=now) is status
