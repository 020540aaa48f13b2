"""What jobs left behind on this machine: from facts to findings. Pure.

In: facts about jobs, files and processes, as `facts` gathers them; the time. Out: `Finding`s, and
what may be removed.
"""

from __future__ import annotations

from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.values import dataclass
from kinetic.errors import name_some

SETTLED_S = 60.0
"""Anything younger may belong to a job that is just beginning or ending."""
UNFINISHED_S = 3600.0
"""A write that has not grown for this long is abandoned."""
_SHOWN = 3


@dataclass(frozen=True)
class LocalJob:
    """One job of this machine.

    Attributes:
        job_id: its id.
        created_at: seconds since the epoch.
        has_verdict: whether it is judged.
        goes_on: whether its supervisor is alive, or may be starting.
        left: files and folders that only a running job has, if it does not run.
    """

    job_id: str
    created_at: float
    has_verdict: bool
    goes_on: bool
    left: tuple[str, ...] = ()

    @property
    def orphaned(self) -> bool:
        """Whether no process is left to judge it."""
        return not self.has_verdict and not self.goes_on


@dataclass(frozen=True)
class Process:
    """A process of a job: its id, its role ("agent 0"), its job, and for how long it has run."""

    pid: int
    role: str
    job_id: str
    age_s: float


@dataclass(frozen=True)
class Scrap:
    """A temporary file or folder: where it is, how long it has been unchanged, and whether it is an
    unfinished write of the store."""

    path: str
    age_s: float
    is_write: bool = False


@dataclass(frozen=True)
class Traces:
    """Everything that jobs left here.

    Attributes:
        jobs: of this store and this machine.
        processes: of jobs, on this machine; also those of other stores.
        scraps: temporary files and folders.
        damaged: unreadable records: where they are, and what is wrong.
    """

    jobs: tuple[LocalJob, ...] = ()
    processes: tuple[Process, ...] = ()
    scraps: tuple[Scrap, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()


def orphans(traces: Traces) -> tuple[str, ...]:
    """Jobs without a supervisor and without a verdict."""
    return tuple(job.job_id for job in traces.jobs if job.orphaned)


def strays(traces: Traces) -> tuple[Process, ...]:
    """Processes of jobs of this store that should have ended with their job."""
    ended = {job.job_id for job in traces.jobs if not job.goes_on}
    return tuple(p for p in traces.processes if p.job_id in ended and p.age_s >= SETTLED_S)


def removable(traces: Traces) -> tuple[tuple[str, str], ...]:
    """Files and folders that are no longer needed: the job that they belong to ("" for none), and
    the path."""
    busy = {process.job_id for process in traces.processes}
    of_jobs = [
        (job.job_id, path)
        for job in traces.jobs
        if not job.goes_on and job.job_id not in busy
        for path in job.left
    ]
    scraps = [
        ("", s.path)
        for s in traces.scraps
        if s.age_s >= (UNFINISHED_S if s.is_write else SETTLED_S)
    ]
    return tuple(of_jobs + scraps)


def check(traces: Traces) -> list[Finding]:
    """Report what was left."""
    found = [*_report_damage(traces), *_report_orphans(traces), *_strays(traces), *_scraps(traces)]
    return found or [
        ok(
            "leftovers",
            f"None: {_count_noun(len(traces.jobs), 'job')} of this machine, all in order.",
        )
    ]


def _report_damage(traces: Traces) -> list[Finding]:
    return [
        warn(
            "records",
            f"{path} cannot be read: {fault}",
            "Remove the file if you do not need what is left in it.",
        )
        for path, fault in traces.damaged
    ]


def _report_orphans(traces: Traces) -> list[Finding]:
    ids = orphans(traces)
    if not ids:
        return []
    detail = (
        f"{_count_noun(len(ids), 'job')} ended without a verdict, because the supervisor was "
        f"killed: {name_some(ids, _SHOWN)}."
    )
    return [
        warn(
            "orphans",
            detail,
            "`kinetic doctor --fix` judges them by what their hosts reported.",
            fixable=True,
        )
    ]


def _strays(traces: Traces) -> list[Finding]:
    found = strays(traces)
    if not found:
        return []
    named = [f"{p.role} of {p.job_id}, process {p.pid}" for p in found]
    pids = " ".join(str(p.pid) for p in found)
    return [
        problem(
            "processes",
            f"Processes of jobs that have ended still run: {name_some(named, _SHOWN)}.",
            f"kill -9 {pids}",
        )
    ]


def _scraps(traces: Traces) -> list[Finding]:
    paths = [path for _job, path in removable(traces)]
    if not paths:
        return []
    detail = (
        f"{_count_noun(len(paths), 'temporary file or folder', 'temporary files or folders')} "
        "of jobs that have ended or never began: "
    )
    return [
        warn(
            "leftovers",
            f"{detail}{name_some(paths, _SHOWN)}.",
            "`kinetic doctor --fix` removes them.",
            fixable=True,
        )
    ]


def _count_noun(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
