"""The states of a job, and the one function that decides its state. Pure.

In: the stored verdict, the backend's phase, times. Out: a `JobStatus`, a `JobStanding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic.errors import CorruptRecord, KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome

STARTING_S = 60.0
"""Seconds for which a job unknown to its backend counts as being submitted."""
UNKNOWN = "UNKNOWN"
SUBMITTING = "it is being submitted"


class JobStatus(StrEnum):
    """The state of a job. New members may be added, so loops should test `ended`.

    Example:
        ```python
        if job.status().ended:
            print(job.logs())
        ```
    """

    PENDING = "PENDING"
    """The job is being submitted, or waits for its hosts."""
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    NOT_FOUND = "NOT_FOUND"
    """The records of the job were removed."""

    @property
    def ended(self) -> bool:
        """True if the state is final."""
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
    """Return the status of a job. Python, the command line, notebooks and batches all use this
    function.

    Args:
        verdict: the verdict of the stored outcome, or None.
        phase: the backend's phase; it counts only without a verdict.
        recorded: True if the plan and the reference are in the store.
        created_at: when the reference was written, in seconds since the epoch.
        now: the time on the same clock. If the backend does not know the job after a minute, the
            job was never started, even if the clock has been set back since.
    """
    if verdict is not None:
        return status_of_verdict(verdict)
    if phase is not JobStatus.NOT_FOUND:
        return phase
    if not recorded:
        return JobStatus.NOT_FOUND
    being_submitted = abs(now - created_at) < STARTING_S
    return JobStatus.PENDING if being_submitted else JobStatus.FAILED


class JobStanding(NamedTuple):
    """The state of a job, with its reason and times.

    Attributes:
        state: a `JobStatus`; UNKNOWN when the backend or the store cannot be reached.
        reason: one line on why the job is in this state, failed or cannot be reached; or "".
        ended_at: when the job ended, in seconds since the epoch; None without a verdict.
        started_at: when the function started; None if it never did, or the time was not read.
        outcome: the whole outcome; None if only an excerpt was read.
        error: the error for which the state is unknown, or `NotFound` if the records were removed.
    """

    state: str
    reason: str = ""
    ended_at: float | None = None
    started_at: float | None = None
    outcome: Outcome | None = None
    error: KineticError | None = None

    @property
    def status(self) -> JobStatus:
        """The state; raises `error` if the state is unknown."""
        if self.error is not None and not isinstance(self.error, NotFound):
            raise self.error
        return JobStatus.NOT_FOUND if self.error is not None else JobStatus(self.state)


def standing_of_verdict(verdict: Mapping[str, Any], created_at: float) -> JobStanding:
    """Return the state and times of a job, from its stored outcome or an excerpt of that.

    Raises:
        CorruptRecord: the document is damaged.
    """
    try:
        started = [float(report.get("started_at") or 0.0) for report in verdict.get("reports", ())]
        state, lines = status_of_verdict(verdict["verdict"]), verdict.get("reason", "").splitlines()
        ended_at = float(verdict.get("ended_at") or created_at)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecord(f"the record is not a job's outcome: {error!r}") from error
    reason = lines[0] if lines and state is JobStatus.FAILED else ""
    return JobStanding(state, reason, ended_at, min(filter(None, started), default=None))
