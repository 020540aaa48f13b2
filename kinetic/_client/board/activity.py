"""The activity of running jobs as rows, one for each host. Pure."""

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
"""Stalls shorter than this many seconds are not shown."""
SILENT_S = 3.0
_SAME_S = 0.3
"""Two reports less than this many seconds apart are the same report: hosts report every second."""
SAVING = "saving"
IDLE = "idle"
"""The state shown for a running host that is writing a checkpoint."""
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
    """The activity of one host. A job whose hosts have not reported has one line, with the fields
    about the job.

    Attributes:
        ref: the job.
        age_s: the age of the job, in seconds.
        host: the index of the host; None for a line about the job as a whole.
        state: the host's activity or exit, for people; the job's state if `host` is None.
        job_state: the job's status.
        cpu_percent: processor time as a percentage of one processor; None if unknown.
        rss_bytes: memory of the worker.
        log_bytes: size of the output so far; None if unknown.
        still_s: seconds since the main thread last moved.
        silent_s: seconds since the host's last report.
        last_line: the last line that the host printed.
        saving_step: the step of the checkpoint that the host is writing; None for none.
        slices: the slices that take part, in the order of their hosts; () unless the job is
            elastic.
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
    """A report of a host's processor time, with the percentage used since the previous report."""

    cpu_s: float
    at: float
    percent: float | None


class Rates:
    """Computes each host's use of one processor in percent from reports of its processor time."""

    def __init__(self) -> None:
        self._reports: dict[tuple[object, ...], _Used] = {}

    def percent(
        self, key: tuple[object, ...], cpu_s: float, running_s: float, at: float
    ) -> float | None:
        """Return how much of one processor a host has used, in percent. The time counted is that
        since the host's previous report, or for the first report the `running_s` seconds since its
        function started. `at` is the time of this report, in seconds."""
        before = self._reports.get(key)
        if before is None or cpu_s < before.cpu_s:  # A new attempt counts from zero.
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
    """Return a line for each host, or one line for the job if nothing is known of its hosts.
    Without the leader's `snapshot`, the hosts' states come from `attempt`, the current one."""
    members = snapshot.get("members") if snapshot else None
    line = HostLine(ref, now - ref.created_at, None, state, state)
    if not snapshot or not members:
        if attempt is None or attempt.began_at is None:
            return [line]
        return [
            replace(line, host=host, state=str(member.exit or member.state), slices=attempt.slices)
            for host, member in enumerate(attempt.members)
        ]
    line = replace(line, slices=tuple(snapshot.get("slices", ())))
    running_s = float(snapshot.get("running_s", 0.0))
    return [
        _line(replace(line, host=int(m["host"]), state=str(m["state"])), m, running_s, rates, now)
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
        is_held = base.ref.session_name and base.state != MISSING  # Its last call has ended.
        return replace(line, state=IDLE, last_line="") if is_held else line
    saving_step = member.get("saving_step") if base.state == Activity.RUNNING else None
    activity = base.state if saving_step is None else SAVING
    return replace(
        line,
        state="silent" if silent_s > SILENT_S else activity,
        cpu_percent=rates.percent(
            (base.ref.job_id, base.host), float(member["cpu_s"]), running_s, now - silent_s
        ),
        rss_bytes=int(member["rss_bytes"]),
        still_s=float(member["stalled_s"]) if base.state == Activity.RUNNING else 0.0,
        saving_step=saving_step,
    )


def list_hidden_columns(width: int | None, lines: Iterable[HostLine]) -> list[str]:
    """Return the columns to leave out: SLICE if no job has several slices, and on a terminal
    narrower than 140 columns those that `kinetic jobs list` shows too."""
    slices = [] if any(line.slice is not None for line in lines) else ["SLICE"]
    narrow = ["ACCELERATOR", "NAME", "LOG"] if width is not None and width < 140 else []
    return slices + narrow


def cells(line: HostLine) -> tuple[str, ...]:
    """Return the cells of a line, one for each of the `COLUMNS`."""
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
    """Return the jobs with their hosts as a JSON document."""
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
    """Return the counts of jobs and hosts: "2 jobs, 5 hosts, 1 standing still"."""
    hosts = [line for line in lines if line.host is not None]
    still = sum(line.still_s >= STILL_S for line in hosts)
    parts = [
        text.count(len({line.ref.job_id for line in lines}), "job"),
        text.count(len(hosts), "host"),
    ]
    return ", ".join([*parts, f"{still} standing still"] if still else parts)
