"""What a job can be, and the one function that says what it is.

In: the stored verdict, the backend's phase, whether the records are there, times. Out: a
`JobStatus`. Pure.
"""

from __future__ import annotations

from enum import StrEnum

STARTING_S = 60.0
"""A job unknown to its backend counts as being submitted for this long."""


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
    """Return the status of a job with this verdict.

    Raises:
        ValueError: no verdict has this name.
    """
    return JobStatus(verdict.upper())


def status_of(
    verdict: str | None, phase: JobStatus, *, recorded: bool, created_at: float, now: float
) -> JobStatus:
    """Return the status of a job: the only answer, for Python, the command line, notebooks and
    batches.

    Args:
        verdict: of the stored outcome, or None.
        phase: what the backend says; it counts only while there is no verdict.
        recorded: whether the plan and the reference are in the store.
        created_at: when the reference was made, in seconds since the epoch.
        now: on the same clock. A job unknown to the backend after a minute was never started, also
            if the clock has been set back since.
    """
    if verdict is not None:
        return status_of_verdict(verdict)
    if phase is not JobStatus.NOT_FOUND:
        return phase
    if not recorded:
        return JobStatus.NOT_FOUND
    being_submitted = abs(now - created_at) < STARTING_S
    return JobStatus.PENDING if being_submitted else JobStatus.FAILED
