"""The state of a job, from what Ray says of its driver and what else is known of it.

In: a `RayJob` (None if there is none), `DriverFacts`. Out: a `Status`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kinetic._backends.base import HostStatus, Status
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass
from kinetic._ray.jobs_api import RayJob

STARTING = "its driver is starting"
RESERVING = "its hosts are starting"
GONE = "Ray does not know its driver any more"
STOPPED = "its driver was stopped in Ray"
CANCELLED = "The job was cancelled."
_MOST_WORDS = 300
_SHELL_KILLED = 137
_OF_RAY = re.compile(r"\[?\d{4}-\d\d-\d\d |Job entrypoint command failed|Running entrypoint for ")
"""Lines of Ray's own."""
_UNIMPORTABLE = "ModuleNotFoundError: No module named "


@dataclass(frozen=True)
class DriverFacts:
    """What is known of a job. What is a function is a look into the store, made only if it decides.

    Attributes:
        job: as Ray describes it; None if it does not know it.
        hosts: how many it has.
        is_cancelled: whether somebody has cancelled it.
        has_begun: whether all hosts were ever there.
        was_there: whether it has had a leader.
        waits_for: what its leader waits for, "" if it does not say.
    """

    job: RayJob | None
    hosts: int
    is_cancelled: Callable[[], bool]
    has_begun: Callable[[], bool]
    was_there: Callable[[], bool]
    waits_for: Callable[[], str]


def judge(facts: DriverFacts) -> Status:
    """Return the state of a job without a verdict."""
    said = "" if facts.job is None else facts.job.status
    if said == "PENDING":
        return Status(JobStatus.PENDING, STARTING)
    if said == "RUNNING":
        if facts.has_begun():
            return Status(JobStatus.RUNNING)
        return Status(JobStatus.PENDING, facts.waits_for() or RESERVING)
    if facts.is_cancelled():
        ended = (JobStatus.CANCELLED, CANCELLED, Exit.CANCELLED)
        everywhere = tuple(HostStatus(host, *ended) for host in range(facts.hosts))
        return Status(JobStatus.CANCELLED, CANCELLED, everywhere)
    if facts.job is not None:
        return _fail(STOPPED if said == "STOPPED" else _why_failed(facts.job))
    return _fail(GONE) if facts.was_there() else Status(JobStatus.NOT_FOUND)


def _fail(why: str) -> Status:
    return Status(JobStatus.FAILED, why, (HostStatus(0, JobStatus.FAILED, why),))


def _why_failed(job: RayJob) -> str:
    """Say how a driver has ended that left no verdict: its last words are in Ray's message."""
    lines = [line.strip() for line in job.message.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("kinetic: ")]
    missing = next((line for line in lines if line.startswith(_UNIMPORTABLE)), "")
    if own:
        return own[-1].removeprefix("kinetic: ")
    if missing:
        name = missing.removeprefix(_UNIMPORTABLE).strip("'")
        return (
            f"the driver's Python has no {name}, which kinetic needs: add it to the job's "
            "requirements or to the cluster's image"
        )
    code = job.exit_code
    if code is None:
        return f"Ray ended its driver: {job.message[:_MOST_WORDS] or 'it does not say why'}"
    if code < 0 or code == _SHELL_KILLED:
        return "its driver was killed"
    if code == ProgramCode.TAKEN_AWAY:
        return "its driver was told to end"
    said = next((line for line in reversed(lines) if not _OF_RAY.match(line)), "")
    return f"its driver ended with exit code {code}" + (f": {said[:_MOST_WORDS]}" if said else "")
