"""What running jobs are doing, as rows: one for each host. Pure.

In: references, snapshots of gangs (see `Gang.snapshot`), the time. Out: `HostLine`s, cells, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kinetic._client.board import shape, text
from kinetic._core.gang.members import MISSING
from kinetic._core.gang.messages import Activity
from kinetic._core.gang.picture import AttemptPicture
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass

STILL_S = 5.0
"""Shorter stalls are not shown."""
SILENT_S = 3.0
_SAME_S = 0.3
"""Hosts report their processor time once a second: two reports closer than this are the same."""
SAVING = "saving"
"""What a running host does while it writes a checkpoint."""
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?")

RIGHT = ("SLICE", "HOST", "AGE", "CPU", "MEMORY", "LOG", "STILL")
CUT = "LAST LINE"
COLUMNS = (
    "JOB",
    "NAME",
    "ACCELERATOR",
    "SLICE",
    "HOST",
    "STATE",
    "AGE",
    "CPU",
    "MEMORY",
    "LOG",
    "STILL",
    CUT,
)


@dataclass(frozen=True)
class HostLine:
    """What one host is doing; for a job that has not started, only the job's fields are set.

    Attributes:
        ref: its job.
        age_s: of the job.
        host: its index; None if nothing is known of the job's hosts.
        state: what the host is doing or how it has ended, for people; the job's if nothing is known
            of its hosts.
        job_state: the job's status.
        cpu_percent: of one processor; None when unknown.
        rss_bytes: memory of the worker.
        log_bytes: output so far; None when unknown.
        still_s: how long its main thread has stood still.
        silent_s: how long since it was last heard from.
        last_line: the last line that it printed.
        saving_step: of the checkpoint that it is writing; None for none.
        slices: that take part, in the order of their hosts; () unless the job is elastic.
    """

    ref: JobRef
    age_s: float
    host: int | None
    state: str
    job_state: str
    cpu_percent: float | None = None
    rss_bytes: int = 0
    log_bytes: int | None = None
    still_s: float = 0.0
    silent_s: float = 0.0
    last_line: str = ""
    saving_step: int | None = None
    slices: tuple[int, ...] = ()

    @property
    def slice(self) -> int | None:
        """The host's slice; None if the job has one slice."""
        return None if self.host is None else shape.slice_of(self.ref, self.host, self.slices)

    def to_json(self) -> dict[str, Any]:
        """Return the host's fields as a JSON object, without its job."""
        fields = {
            "host": self.host,
            "slice": self.slice or 0,
            "state": self.state,
            "cpu_percent": self.cpu_percent,
            "rss_bytes": self.rss_bytes,
        }
        more = {
            "log_bytes": self.log_bytes,
            "stalled_s": self.still_s,
            "silent_s": self.silent_s,
            "last_line": self.last_line,
            "saving_step": self.saving_step,
        }
        return fields | more


class _Used(NamedTuple):
    """A host's processor time, when it was reported, and its share of a processor by then."""

    cpu_s: float
    at: float
    percent: float | None


class Rates:
    """The share of a processor, from two reports of processor time."""

    def __init__(self) -> None:
        self._reports: dict[tuple[object, ...], _Used] = {}

    def percent(
        self, key: tuple[object, ...], cpu_s: float, running_s: float, at: float
    ) -> float | None:
        """Return the share since the last report; at first, since the function started. `at`: when
        the host reported it."""
        before = self._reports.get(key)
        if before is None or cpu_s < before.cpu_s:  # or another attempt has begun
            after = _Used(cpu_s, at, 100.0 * cpu_s / running_s if running_s > 0 else None)
        elif at - before.at < _SAME_S:
            return before.percent
        else:
            after = _Used(cpu_s, at, 100.0 * (cpu_s - before.cpu_s) / (at - before.at))
        self._reports[key] = after
        return after.percent


def lines(
    ref: JobRef,
    state: str,
    snapshot: Mapping[str, Any] | None,
    rates: Rates,
    now: float,
    *,
    attempt: AttemptPicture | None = None,
) -> list[HostLine]:
    """Return one line for each host, or one for the job while nothing is known of its hosts.

    Without a snapshot, the events of the current attempt say what the hosts do.
    """
    members = snapshot.get("members") if snapshot else None
    of_job = HostLine(ref, now - ref.created_at, None, state, state)
    if not snapshot or not members:
        if attempt is None or attempt.began_at is None:
            return [of_job]
        return [
            replace(
                of_job, host=host, state=str(member.exit or member.state), slices=attempt.slices
            )
            for host, member in enumerate(attempt.members)
        ]
    of_job = replace(of_job, slices=tuple(snapshot.get("slices", ())))
    running_s = float(snapshot.get("running_s", 0.0))
    return [
        _line(replace(of_job, host=int(m["host"]), state=str(m["state"])), m, running_s, rates, now)
        for m in members
    ]


def _line(
    base: HostLine, member: Mapping[str, Any], running_s: float, rates: Rates, now: float
) -> HostLine:
    silent_s = float(member.get("silent_s", 0.0))
    line = replace(
        base,
        log_bytes=int(member["log_bytes"]),
        silent_s=silent_s,
        last_line=_ESCAPES.sub("", str(member.get("last_line", ""))),
    )
    if member.get("exit") or base.state in (MISSING, Activity.RETURNED):
        return line
    saving_step = member.get("saving_step") if base.state == Activity.RUNNING else None
    doing = base.state if saving_step is None else SAVING
    return replace(
        line,
        state="silent" if silent_s > SILENT_S else doing,
        cpu_percent=rates.percent(
            (base.ref.job_id, base.host), float(member["cpu_s"]), running_s, now - silent_s
        ),
        rss_bytes=int(member["rss_bytes"]),
        still_s=float(member["stalled_s"]) if base.state == Activity.RUNNING else 0.0,
        saving_step=saving_step,
    )


def left_out(width: int | None, lines: Iterable[HostLine]) -> list[str]:
    """Return the columns to leave out: slices where no job has several, and on a terminal below 140
    columns what `jobs list` shows as well."""
    slices = [] if any(line.slice is not None for line in lines) else ["SLICE"]
    narrow = ["ACCELERATOR", "NAME", "LOG"] if width is not None and width < 140 else []
    return slices + narrow


def cells(line: HostLine) -> tuple[str, ...]:
    """Return the cells, one for each of the `COLUMNS`."""
    return (
        line.ref.job_id,
        line.ref.display_name,
        line.ref.accelerator,
        "-" if line.slice is None else str(line.slice),
        "-" if line.host is None else str(line.host),
        line.state,
        text.age(line.age_s),
        "-" if line.cpu_percent is None else f"{line.cpu_percent:.0f}%",
        text.size(line.rss_bytes) if line.rss_bytes else "-",
        "-" if line.log_bytes is None else text.size(line.log_bytes),
        text.age(line.still_s) if line.still_s >= STILL_S else "-",
        line.last_line,
    )


def document(lines: Iterable[HostLine]) -> list[dict[str, Any]]:
    """Return the jobs with their hosts, as plain JSON."""
    jobs: dict[str, dict[str, Any]] = {}
    for line in lines:
        job = jobs.setdefault(
            line.ref.job_id,
            line.ref.attributes() | {"state": line.job_state, "age_s": line.age_s, "members": []},
        )
        if line.host is not None:
            job["members"].append(line.to_json())
    return list(jobs.values())


def headline(lines: Sequence[HostLine]) -> str:
    """Return "2 jobs, 5 hosts, 1 standing still"."""
    hosts = [line for line in lines if line.host is not None]
    still = sum(line.still_s >= STILL_S for line in hosts)
    parts = [
        text.count(len({line.ref.job_id for line in lines}), "job"),
        text.count(len(hosts), "host"),
    ]
    return ", ".join([*parts, f"{still} standing still"] if still else parts)
