"""What a job can be, the one function that says what it is, and what is told to all who ask. Pure.

In: the stored verdict, the backend's phase, whether the records are there, times. Out: a
`JobStatus`, a `JobStanding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic.errors import CorruptRecord, KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome

STARTING_S = 60.0
"""A job unknown to its backend counts as being submitted for this long."""
UNKNOWN = "UNKNOWN"
SUBMITTING = "it is being submitted"


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


class JobStanding(NamedTuple):
    """Where a job stands.

    Attributes:
        state: a `JobStatus`; UNKNOWN when its backend or the store cannot be asked.
        reason: the backend's reason for the state, why the job failed, in one line, or why it
            cannot be asked; "" if there is nothing to say.
        ended_at: when it ended, in seconds since the epoch; None without a verdict.
        started_at: when its function started; None when it never did, or nobody has looked.
        outcome: the whole verdict, where more than an excerpt was read.
        error: why the state is unknown, or that the records were removed.
    """

    state: str
    reason: str = ""
    ended_at: float | None = None
    started_at: float | None = None
    outcome: Outcome | None = None
    error: KineticError | None = None

    @property
    def status(self) -> JobStatus:
        """The state; raises why it is unknown."""
        if self.error is not None and not isinstance(self.error, NotFound):
            raise self.error
        return JobStatus.NOT_FOUND if self.error is not None else JobStatus(self.state)


def standing_of_verdict(verdict: Mapping[str, Any], created_at: float) -> JobStanding:
    """Return the standing of a job whose verdict is this document, or an excerpt of one.

    Raises:
        CorruptRecord: the document is damaged.
    """
    try:
        started = [float(report.get("started_at") or 0.0) for report in verdict.get("reports", ())]
        state, lines = status_of_verdict(verdict["verdict"]), verdict.get("reason", "").splitlines()
        ended_at = float(verdict.get("ended_at") or created_at)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecord(f"it is no verdict: {error!r}") from error
    reason = lines[0] if lines and state is JobStatus.FAILED else ""
    return JobStanding(state, reason, ended_at, min(filter(None, started), default=None))
