"""Leftovers of jobs on this machine: jobs without a verdict, processes, damaged records.

Leftovers are only reported. An orphaned job is judged when its status is read, and `kinetic jobs
prune` removes records.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence

from kinetic._backends import registry
from kinetic._backends.base import Processes
from kinetic._client.board.text import count
from kinetic._core import layout, preemption
from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.outcome import Outcome
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store import index
from kinetic._store.local import LocalStore
from kinetic._store.many import has_many
from kinetic._system import locks, processes
from kinetic.errors import KineticError, NotFound, UnsupportedVersion, name_some

SETTLED_S = 60.0
"""Leftovers younger than this many seconds are ignored: their job may be starting or ending."""
LOCAL = Place("local")
"""The place of jobs on this machine."""
_NAMED_AT_MOST = 3
_FUNCTION_VARIABLE = preemption.VARIABLE.encode()
"""An environment variable of every process that runs a job's function, and of its children."""
_TITLE = re.compile(r"kinetic-(supervisor|agent|worker) (job-[0-9a-f]+)(?: host (\d+))?")


@dataclass(frozen=True)
class Process:
    """A process of a job, with its role, such as "agent 0", and its age in seconds."""

    pid: int
    role: str
    job_id: str
    age_s: float


def probe(
    store: LocalStore, now: float, list_processes: Callable[[], Iterator[Process]] | None = None
) -> list[Finding]:
    """Return findings about leftovers in the store and among the processes of this machine.

    Args:
        store: the local store.
        now: the time in seconds since the epoch.
        list_processes: lists the processes of jobs, for tests.
    """
    refs, damaged = _read_references(store)
    damaged += [fault for ref in refs for fault in _find_damage(store, ref)]
    findings = [
        warn(
            "records",
            f"{path} cannot be read: {fault}",
            "Copy the file if you want to recover its content, then remove it.",
        )
        for path, fault in damaged
    ]
    local = [ref for ref in refs if ref.backend == LOCAL.backend]
    ended, orphans = _find_ended(store, local, now)
    if orphans:
        text = f"{count(len(orphans), 'job')} ended without a result, because the supervisor was "
        findings.append(
            warn(
                "orphans",
                f"{text}killed: {name_some(orphans, _NAMED_AT_MOST)}.",
                "`kinetic jobs wait ID` computes the result from the reports of the job's hosts.",
            )
        )
    strays = [
        process
        for process in (list_processes or _list_processes)()
        if process.job_id in ended and process.age_s >= SETTLED_S
    ]
    if strays:
        named = [f"{p.role} of {p.job_id} (process {p.pid})" for p in strays]
        findings.append(
            problem(
                "processes",
                f"Processes of ended jobs are still running: {name_some(named, _NAMED_AT_MOST)}.",
                f"kill -9 {' '.join(str(p.pid) for p in strays)}",
            )
        )
    if unfinished := list(_find_unfinished(store, now)):
        text = f"{count(len(unfinished), 'submission')} ended before the job began: "
        remedy = "`kinetic jobs prune` removes them."
        findings.append(
            warn("leftovers", f"{text}{name_some(unfinished, _NAMED_AT_MOST)}.", remedy)
        )
    in_order = f"None: {count(len(local), 'job')} on this machine, all in order."
    return findings or [ok("leftovers", in_order)]


def _read_references(store: LocalStore) -> tuple[list[JobRef], list[tuple[str, str]]]:
    refs, damaged = [], []
    for job_id in index.list_ids(store):
        try:
            refs.append(index.find(store, job_id))
        except NotFound:
            continue  # The job was removed meanwhile.
        except KineticError as fault:
            damaged.append((str(store.path(layout.JobKeys(job_id).ref)), str(fault)))
    return refs, damaged


def _find_damage(store: LocalStore, ref: JobRef) -> Iterator[tuple[str, str]]:
    keys = layout.JobKeys(ref.job_id)
    for key, read in ((keys.plan, Plan.read), (keys.outcome, Outcome.read)):
        try:
            read(store.get(key))
        except (NotFound, UnsupportedVersion):
            continue
        except (KineticError, TypeError, AttributeError) as fault:
            yield str(store.path(key)), str(fault)


def _find_ended(
    store: LocalStore, refs: Sequence[JobRef], now: float
) -> tuple[set[str], list[str]]:
    """Return the ids of the jobs that no longer run, and of those among them without a verdict."""
    backend = registry.make(LOCAL, store)
    outcomes = {ref.job_id: layout.JobKeys(ref.job_id).outcome for ref in refs}
    judged = has_many(store, list(outcomes.values()))
    open_jobs = [ref for ref in refs if outcomes[ref.job_id] not in judged]
    statuses = backend.status(open_jobs) if open_jobs else {}
    ended: set[str] = set()
    for ref in refs:
        status = statuses.get(ref.job_id)
        has_ended = status is None or (status.phase.ended and now - ref.created_at >= SETTLED_S)
        runs = isinstance(backend, Processes) and backend.processes(ref) is not None
        if has_ended and not runs:
            ended.add(ref.job_id)
    return ended, [ref.job_id for ref in open_jobs if ref.job_id in ended]


def _find_unfinished(store: LocalStore, now: float) -> Iterator[str]:
    """Yield the ids of jobs whose submission died before it wrote the reference."""
    for job_id in sorted(set(store.parts(layout.JOBS)).difference(index.list_ids(store))):
        folder = store.path(layout.JobKeys(job_id).prefix)
        with contextlib.suppress(OSError):
            is_held = locks.is_record_held(folder / "local" / "lock")
            if not is_held and now - folder.lstat().st_mtime >= SETTLED_S:
                yield job_id


def _list_processes() -> Iterator[Process]:
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if processes.owner(pid) != os.geteuid():
                continue
            command = processes.command_line(pid).replace(b"\0", b" ").decode(errors="replace")
            if title := _TITLE.match(command):
                role = title[1] if title[3] is None else f"{title[1]} {title[3]}"
                yield Process(pid, role, title[2], processes.age_s(pid))
                continue
            pairs = (each.partition(b"=") for each in processes.environ(pid).split(b"\0"))
            environ = {name: value for name, _, value in pairs}
            if _FUNCTION_VARIABLE not in environ:  # A user may set KINETIC_JOB_ID by hand.
                continue
            if job_id := environ.get(b"KINETIC_JOB_ID", b"").decode(errors="replace"):
                yield Process(pid, "a program of the function", job_id, processes.age_s(pid))
