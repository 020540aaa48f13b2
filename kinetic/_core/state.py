"""What a job can be, and the one function that says what it is.

In: the stored verdict, the backend's phase, whether the records are there, times. Out: a
`JobStatus`. Pure.
"""

from __future__ import annotations

from enum import StrEnum

STARTING_S = 60.0
"""A job that its backend does not know counts as being submitted for this long."""


class JobStatus(StrEnum):
    """What a job can be. New members may be added: loops should ask `ended`."""

    PENDING = "PENDING"
    """Being submitted, or waiting for its hosts."""
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    NOT_FOUND = "NOT_FOUND"
    """Its records were removed."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


def status_of_verdict(verdict: str) -> JobStatus:
    """Return what a job with this verdict is.

    Raises:
        ValueError: there is no such verdict.
    """
    return JobStatus(verdict.upper())


def status_of(
    verdict: str | None, phase: JobStatus, *, recorded: bool, created_at: float, now: float
) -> JobStatus:
    """Return what a job is. The only answer: for Python, the command line, notebooks and batches.

    Args:
        verdict: of the stored outcome; None while there is none.
        phase: what the backend says; it counts only while there is no verdict.
        recorded: whether the plan and the reference are in the store.
        created_at: when the reference was made, in seconds since the epoch.
        now: the same clock. A job that no backend knows a minute later was never started; a clock
            that was set back since does not make it start for ever.
    """
    if verdict is not None:
        return status_of_verdict(verdict)
    if phase is not JobStatus.NOT_FOUND:
        return phase
    if not recorded:
        return JobStatus.NOT_FOUND
    being_submitted = abs(now - created_at) < STARTING_S
    return JobStatus.PENDING if being_submitted else JobStatus.FAILED
