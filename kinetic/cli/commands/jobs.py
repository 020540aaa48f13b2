"""`kinetic jobs`: the group, and its commands `list` and `status`."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import text
from kinetic._core.state import UNKNOWN, JobStanding, JobStatus, standing_of_verdict
from kinetic.cli import output
from kinetic.cli.context import BATCH, AppContext, pass_app
from kinetic.cli.lazy import Lazy, LazyGroup, complete_with
from kinetic.cli.options import ignore_option, job_argument, json_option
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kinetic._client.batch.inputs import BatchEnd
    from kinetic._client.batch.records import Batch
    from kinetic._client.board.activity import HostLine
    from kinetic._core.gang.picture import AttemptPicture, GangPicture
    from kinetic._core.outcome import HostReport, Outcome
    from kinetic._core.plan import Cost
    from kinetic._core.ref import JobRef

STATES = (*JobStatus, UNKNOWN)
_COLUMNS = ("ID", "NAME", "ACCELERATOR", "HOSTS", "STATE", "TIME", "AGE", "REASON")
_NARROW = 72
"""Terminals narrower than this show no ACCELERATOR and HOSTS, to leave room for names."""
_HOST_COLUMNS = ("SLICE", "HOST", "ENDED", "MEMORY", "TIME", "DETAIL")
_ATTEMPT_COLUMNS = ("SLICES", "ATTEMPT", "STARTED", "TIME", "ENDED", "REASON")
_LONGEST_NAME = 100
_MOST_HOSTS = 32
_MEMBERS_S = 2.0
"""Seconds to wait for the leader of a job on a cluster to report the activity of its hosts."""
_MOST_ATTEMPTS = 10

_PACKAGE = "kinetic.cli.commands"
_COMMANDS = {
    "list": Lazy(f"{_PACKAGE}.jobs:list_jobs", "List jobs, newest first; also `ls`."),
    "status": Lazy(
        f"{_PACKAGE}.jobs:status",
        "Show the state of a job and of each of its hosts.",
    ),
    "explain": Lazy(
        f"{_PACKAGE}.output:explain", "Explain why a job failed, hangs or waits, on one page."
    ),
    "top": Lazy(f"{_PACKAGE}.top:top", "Show the activity of running jobs' hosts."),
    "logs": Lazy(f"{_PACKAGE}.output:logs", "Print the logs of a job."),
    "metrics": Lazy(
        f"{_PACKAGE}.metrics:metrics", "Show the metrics that jobs log with kinetic.log."
    ),
    "result": Lazy(f"{_PACKAGE}.output:result", "Wait for a job and print its return value."),
    "outputs": Lazy(f"{_PACKAGE}.outputs:outputs", "List or fetch a job's output files."),
    "wait": Lazy(f"{_PACKAGE}.output:wait", "Wait for a job; exit with 0 if it succeeded."),
    "stacks": Lazy(f"{_PACKAGE}.lifecycle:stacks", "Show the Python stacks of a running job."),
    "debug": Lazy(
        f"{_PACKAGE}.lifecycle:debug",
        "Attach a debugger to a job that was started with debug=True.",
    ),
    "cancel": Lazy(f"{_PACKAGE}.lifecycle:cancel", "Stop jobs."),
    "kill": Lazy(
        f"{_PACKAGE}.lifecycle:kill",
        "Kill hosts of a running job, to test how it recovers.",
    ),
    "cleanup": Lazy(
        f"{_PACKAGE}.lifecycle:cleanup", "Free the resources of jobs and remove their records."
    ),
    "prune": Lazy(f"{_PACKAGE}.lifecycle:prune", "Remove the records of old jobs."),
}

_OTHER_TOOLS = {"rm": "cleanup", "show": "status", "exec": "debug", "stop": "cancel"}
_GROUP_HELP = """List jobs, read their logs and results, stop and remove them.

You can shorten an ID to its first characters. --last, or - instead of an ID, selects the newest
job. Jobs that have ended stay in the list until you prune them.

\b
Examples:
  kinetic jobs list --state running
  kinetic jobs logs -f --last
  kinetic jobs logs --all-hosts -n 20 1a2b
  kinetic jobs result --json job-1a2b
  kinetic jobs prune --older-than 7d
"""

_LIST_HELP = """List jobs, newest first.

TIME is how long the function has been running, or ran in its last attempt. AGE is the time since
submission.

\b
Examples:
  kinetic jobs list
  kinetic jobs list --state running --state pending
  kinetic jobs list --all --json
  kinetic jobs list --group grp-1a2b3c4d --state failed
"""

_STATUS_HELP = """Show the state of a job.

For a running job, show the activity of each host; for a job that has ended, how each host ended.
If the job had several attempts, list each with its outcome. If it logs steps, show how its time was
spent.

With the ID of a batch, count its jobs by state and show their total cost.

\b
Examples:
  kinetic jobs status job-1a2b
  kinetic jobs status grp-1a2b
  kinetic jobs status --json job-1a2b
"""


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    aliases={"ls": "list"},
    elsewhere={name: f"kinetic jobs {own}" for name, own in _OTHER_TOOLS.items()},
    help=_GROUP_HELP,
    short_help="List jobs, read their logs, stop and remove them.",
)
def jobs() -> None:
    """Group of the commands about jobs."""


@click.command("list", help=_LIST_HELP)
@click.option(
    "-n",
    "--limit",
    "limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="List at most N jobs.",
)
@click.option("--all", "show_all", is_flag=True, help="List all jobs.")
@click.option(
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    type=click.Choice(STATES, case_sensitive=False),
    help=f"List only jobs in this state: {', '.join(STATES).lower()}. Repeatable.",
)
@click.option(
    "--group",
    metavar="ID",
    shell_complete=complete_with("batches"),
    help="List only jobs of this batch.",
)
@ignore_option("--output-dir")
@json_option
@pass_app
def list_jobs(
    app: AppContext,
    /,
    *,
    limit: int,
    show_all: bool,
    states: tuple[str, ...],
    group: str | None,
    as_json: bool,
) -> None:
    """Print one line for each job, newest first."""
    refs = app.board.refs() if group is None else app.list_batch(group)
    wanted, most = {state.upper() for state in states}, None if show_all else limit
    jobs, more = app.board.select(refs, most, wanted)
    jobs = app.board.add_starts(jobs)
    if as_json:
        return output.json_document(
            [ref.attributes() | _document(standing) for ref, standing in jobs]
        )
    if not jobs:
        return output.notice("No job matches." if states or group else "There are no jobs yet.")
    if group is not None:
        output.notice(f"Batch {app.batch_name(jobs[0][0].group_id or group)}:")
    # Most jobs have no reason: hide the column if no job has one.
    has_reasons = any(standing.reason for _, standing in jobs if standing.state != UNKNOWN)
    left_out = [] if has_reasons else ["REASON"]
    if (output.width() or _NARROW) < _NARROW:
        left_out += ["ACCELERATOR", "HOSTS"]
    now, right = app.now(), ("HOSTS", "TIME", "AGE")
    rows = [_cells(ref, standing, now) for ref, standing in jobs]
    output.table(_COLUMNS, rows, left_out=left_out, right=right, cut="NAME", below="REASON")
    if more:
        output.notice("There are more jobs: --all lists all of them.")
    for why in dict.fromkeys(standing.reason for _, standing in jobs if standing.state == UNKNOWN):
        output.notice(f"The states of some jobs are unknown. The error: {why}")
    return None


def _cells(ref: JobRef, standing: JobStanding, now: float) -> tuple[str, ...]:
    started_at = standing.started_at
    ran = "-" if started_at is None else text.duration((standing.ended_at or now) - started_at)
    return (
        ref.job_id,
        f"{ref.display_name:.{_LONGEST_NAME}}" + "…" * (len(ref.display_name) > _LONGEST_NAME),
        ref.accelerator,
        str(ref.hosts),
        standing.state,
        ran,
        text.age(now - ref.created_at),
        "" if standing.state == UNKNOWN else standing.reason,
    )


def _document(standing: JobStanding) -> dict[str, Any]:
    return {name: getattr(standing, name) for name in ("state", "reason", "started_at", "ended_at")}


@click.command("status", help=_STATUS_HELP)
@json_option
@job_argument("jobs")
@pass_app
def status(app: AppContext, /, *, job_id: str, as_json: bool) -> None:
    """Print the state of a job or a batch."""
    from kinetic._client.goodput import GoodputReader  # Lists do not need it.

    if job_id.startswith(BATCH):
        return _print_batch(app, job_id, as_json=as_json)
    ref = app.find(job_id)
    outcome = app.handle_of(ref).outcome()
    gang = app.board.gang(ref, outcome)
    attempts, cost = gang.attempts, app.board.cost(ref, gang)
    if outcome is None:
        standing = app.board.read_standing(ref)
    else:
        standing = standing_of_verdict(outcome.to_json(), ref.created_at)
    standing = standing._replace(started_at=gang.started_at)
    goodput = GoodputReader(app.board, ref)
    goodput.read(gang, standing.ended_at or app.now())
    # The hosts of a session are shown with the call that they run.
    members = _members(app, ref) if outcome is None and not ref.session_name else []
    if as_json:
        current = _document(standing) | {
            "members": [line.to_json() for line in members],
            "attempts": [attempt.to_json() for attempt in attempts],
            "cost": None if cost is None else _cost_document(*cost),
            "goodput": goodput.to_json(),
        }
        return output.json_document(
            ref.attributes() | current | {"outcome": outcome.to_json() if outcome else None}
        )
    facts = _facts(app, ref, standing, outcome, gang)
    if cost is not None and not cost[0].is_simulated:
        facts.append(("Cost", text.describe_cost(*cost, is_over=outcome is not None)))
    if spent := goodput.describe():
        facts.append(("Time", spent))
    if outcome is None and (awaited := attempts[-1].awaited):
        facts.append(("Waiting for", f"slice {', '.join(map(str, awaited))}"))
    output.line(text.align_pairs(facts))
    if len(attempts) > 1:
        _print_attempts(attempts)
    if members:
        _print_running(members)
    if outcome is not None and len(outcome.reports) > 1 and not _has_never_run(outcome):
        _print_hosts(ref, outcome, attempts[-1].slices)
    return None


def _print_batch(app: AppContext, text_of_id: str, *, as_json: bool) -> None:
    """Print the number of a batch's jobs in each state, and their total cost.

    Raises:
        NotFound: the batch does not exist.
    """
    from kinetic._client.batch.failures import describe_left_out, describe_unsubmitted
    from kinetic._client.batch.records import BatchRecords
    from kinetic._client.board.spending import SpendingWatch

    refs = app.list_batch(text_of_id)
    group_id = (refs[0].group_id if refs else None) or text_of_id
    batch: Batch | None = None
    end: BatchEnd | None = None
    with contextlib.suppress(KineticError):  # Without the batch's record, show only its jobs.
        records = BatchRecords.open(app.store, group_id)
        batch, end = records.batch, records.read_end()
    jobs = app.board.add_starts(app.board.select(refs, None)[0])
    spending = SpendingWatch(app.board).read(jobs)
    counts = Counter(standing.state.lower() for _, standing in jobs)
    unsubmitted: dict[int, Exception] = {}
    if batch is not None and len({ref.group_index for ref, _ in jobs}) < batch.total:
        with contextlib.suppress(KineticError):
            unsubmitted = app.open_batch(group_id).submission_failures
    if as_json:
        batch_facts = {name: getattr(batch, name, None) for name in ("name", "total", "created_at")}
        facts = {"group_id": group_id, **batch_facts, "jobs": counts, "cost": spending.to_json()}
        return output.json_document(facts | {"not_submitted": len(unsubmitted)})
    states = ", ".join(f"{n:,} {state}" for state, n in counts.most_common())
    lines = [
        ("Batch", app.batch_name(group_id)),
        ("Inputs", "" if batch is None else f"{batch.total:,}"),
        ("Jobs", f"{len(jobs):,}: {states}" if jobs else "none"),
        ("Failed", describe_unsubmitted(unsubmitted)),
        ("Left out", describe_left_out(end)),
        ("Cost", spending.describe() if jobs else ""),
    ]
    output.line(text.align_pairs([(name, value) for name, value in lines if value]))
    return None


def _cost_document(cost: Cost, so_far_usd: float) -> dict[str, Any]:
    named = ("usd_per_hour", "origin", "is_simulated")
    return {"so_far_usd": round(so_far_usd, 6)} | {name: getattr(cost, name) for name in named}


def _members(app: AppContext, ref: JobRef) -> list[HostLine]:
    """Return one line for each host of a running job; [] if the hosts' activity is unknown."""
    from kinetic._client.activity_watch import ActivityWatch

    with ActivityWatch(app, {ref.job_id}) as watch:
        lines = watch.poll_to_end(_MEMBERS_S)
        return [line for line in lines if line.host is not None]


def _facts(
    app: AppContext,
    ref: JobRef,
    standing: JobStanding,
    outcome: Outcome | None,
    gang: GangPicture,
) -> list[tuple[str, str]]:
    from kinetic._client.board import shape  # Lists do not need it.

    now, real = app.now(), ref.place.stands_in_for
    facts = [
        ("Job", ref.job_id),
        ("Name", ref.display_name),
        ("State", standing.state),
        ("Reason", standing.reason if outcome is None else ""),
        ("Accelerator", shape.describe_shape(ref, _slices(app, ref))),
        ("Backend", f"{ref.backend} (stands in for {real})" if real else ref.backend),
        *(
            [("Batch", f"{app.batch_name(ref.group_id)}, input {ref.group_index}")]
            if ref.group_id
            else []
        ),
        ("Session", _name_session(app, ref)),
        ("Output", ref.output_dir),
        ("Created", f"{_timestamp(ref.created_at)} ({text.age(now - ref.created_at)} ago)"),
        ("Started", _describe_start(gang, standing.ended_at, now)),
        ("Programs", gang.current.difference),
    ]
    facts = [(name, value) for name, value in facts if value]
    return facts if outcome is None else facts + _ending_facts(ref, outcome)


def _name_session(app: AppContext, ref: JobRef) -> str:
    """Return the name and the job id of the session on which a call runs; "" for other jobs."""
    if not ref.place.session:
        return ""
    with contextlib.suppress(KineticError):  # Its records were removed.
        return f"{app.find(ref.place.session).session_name} ({ref.place.session})"
    return ref.place.session


def _slices(app: AppContext, ref: JobRef) -> int | tuple[int, int]:
    """Return the number of slices of a job with a single controller. For other jobs return 1: their
    number of slices follows from their number of hosts."""
    if not ref.has_single_controller:
        return 1
    plan = app.board.plan(ref)
    return 1 if plan is None else plan.options.slices


def _describe_start(gang: GangPicture, ended_at: float | None, now: float) -> str:
    if gang.started_at is None:
        return ""
    ran = f"{'ran' if ended_at else 'running'} for {text.duration(gang.ran_s(now))}"
    attempts = f" in {len(gang.attempts)} attempts" if len(gang.attempts) > 1 else ""
    return f"{_timestamp(gang.started_at)} ({ran}{attempts})"


def _ending_facts(ref: JobRef, outcome: Outcome) -> list[tuple[str, str]]:
    from kinetic._client.result import describe_files  # Lists do not need it.

    facts: list[tuple[str, Any]] = [
        (
            "Ended",
            f"{_timestamp(outcome.ended_at)} ({text.duration(outcome.ended_at - ref.created_at)} "
            "after submission)",
        ),
        ("Reason", outcome.reason),
        ("Blamed", _name_blamed(outcome)),
        ("Result", text.size(outcome.result_size_bytes) if outcome.ok else ""),
        ("Files", describe_files(ref.job_id, [outcome])),
        ("Attempt", str(outcome.attempt) if outcome.attempt > 1 else ""),
        ("Compiled", _describe_cache(outcome)),
    ]
    return [(name, value) for name, value in facts if value]


def _describe_cache(outcome: Outcome) -> str:
    """Return what JAX's compilation cache saved on the host that took most programs from it."""
    best = max(outcome.reports, key=lambda report: report.cache_hits, default=None)
    if best is None or not best.cache_hits:
        return ""
    programs = "1 program" if best.cache_hits == 1 else f"{best.cache_hits} programs"
    return f"{programs} from the cache, {text.duration(best.compile_saved_s)} saved"


def _name_blamed(outcome: Outcome) -> str:
    """Return the hosts that failed first; "" if no host ever ran, or none is to blame."""
    is_late = outcome.first is not None and str(outcome.first.exit) in ("timeout", "over_budget")
    if str(outcome.verdict) != "failed" or is_late or _has_never_run(outcome):
        return ""
    return ", ".join(f"host {host}" for host in outcome.blamed)


def _has_never_run(outcome: Outcome) -> bool:
    """True if no host ever joined, and the verdict says why."""
    return all(
        str(r.exit) == "never_joined" and (not r.detail or r.detail.rstrip(".") in outcome.reason)
        for r in outcome.reports
    )


def _print_attempts(attempts: Sequence[AttemptPicture]) -> None:
    latest = attempts[-_MOST_ATTEMPTS:]
    output.line()
    rows = [(", ".join(map(str, one.slices)), *_attempt_cells(one)) for one in latest]
    left_out = [] if latest[0].slices else ["SLICES"]
    output.table(_ATTEMPT_COLUMNS, rows, left_out=left_out, right=("TIME",), wrap="REASON")
    if len(attempts) > len(latest):
        earlier = text.count(len(attempts) - len(latest), "earlier attempt")
        output.notice(f"{earlier} not shown: --json lists all of them.")


def _attempt_cells(attempt: AttemptPicture) -> tuple[str, ...]:
    started, ended = attempt.ready_at, attempt.ended_at
    return (
        str(attempt.number),
        "-" if started is None else _timestamp(started),
        "-" if started is None or ended is None else text.duration(ended - started),
        str(attempt.verdict or "-"),
        attempt.reason,
    )


def _print_running(members: list[HostLine]) -> None:
    """Print what the hosts are doing. Of a large gang, print the hosts that have been idle longest,
    and the number of the others."""
    from kinetic._client.board import activity

    idlest = sorted(members, key=lambda line: (-line.still_s, line.host))[:_MOST_HOSTS]
    rows = [activity.cells(line) for line in sorted(idlest, key=lambda line: line.host or 0)]
    left_out = ["JOB", "NAME", "ACCELERATOR", "AGE", *activity.list_hidden_columns(None, idlest)]
    output.line()
    output.table(activity.COLUMNS, rows, left_out=left_out, right=activity.RIGHT, cut=activity.CUT)
    if len(members) > len(idlest):
        output.notice(
            f"{text.count(len(members) - len(idlest), 'more host')}: `kinetic jobs top "
            f"{members[0].ref.job_id}` shows all of them."
        )


def _print_hosts(ref: JobRef, outcome: Outcome, slices: Sequence[int]) -> None:
    """Print how the hosts ended; of a large gang, the failed hosts and the number of the others."""
    from kinetic._client.board import shape

    reports = sorted(outcome.reports, key=lambda r: (r.host not in outcome.blamed, r.ok, r.host))[
        :_MOST_HOSTS
    ]
    output.line()
    output.table(
        _HOST_COLUMNS,
        [
            (str(shape.slice_of(ref, r.host, slices)), *_host_cells(r))
            for r in sorted(reports, key=lambda r: r.host)
        ],
        left_out=["SLICE"] if shape.slice_of(ref, 0) is None else [],
        right=("SLICE", "HOST", "MEMORY", "TIME"),
        wrap="DETAIL",
    )
    if len(outcome.reports) > len(reports):
        output.notice(
            f"{text.count(len(outcome.reports) - len(reports), 'more host')}: --json lists all of "
            "them."
        )


def _host_cells(report: HostReport) -> tuple[str, ...]:
    memory = text.size(report.peak_rss_bytes) if report.peak_rss_bytes else "-"
    ran = text.duration(report.ended_at - report.started_at) if report.started_at else "-"
    return str(report.host), str(report.exit), memory, ran, report.detail


def _timestamp(seconds: float) -> str:
    from datetime import datetime

    try:
        return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S %z}"
    except (OverflowError, OSError, ValueError):  # The record is damaged.
        return "?"
