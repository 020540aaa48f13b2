"""`kinetic jobs metrics`: values that jobs log with `kinetic.log`, as a table, curves, JSON, CSV,
an image or event files.

With --follow, one row for each value as it is logged.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kinetic._client.board import text
from kinetic._core.metrics import HOST_PREFIX
from kinetic.cli import output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.options import check_hosts, host_options, jobs_argument
from kinetic.errors import UsageError

if TYPE_CHECKING:
    from kinetic._client.curves import Curve
    from kinetic._client.metrics import MetricsReader
    from kinetic._core.log_format import LogChunk
    from kinetic._core.metrics import Series
    from kinetic._core.ref import JobRef

_HELP = """Show the metrics that jobs log with kinetic.log, and measurements of their hosts.

On a terminal, the first metric, or each metric of --name, is drawn below the table, with one curve
for each job and host. Only host 0 is shown unless you choose others. If a step was trained several
times, its last values count.

\b
Examples:
  kinetic jobs metrics --last
  kinetic jobs metrics --follow --name loss job-1a2b
  kinetic jobs metrics --name loss --plot loss.png job-1a2b job-3c4d
  kinetic jobs metrics --csv --all-hosts job-1a2b > metrics.csv
  kinetic jobs metrics --tensorboard runs job-1a2b
"""
_COLUMNS = ("METRIC", "JOB", "HOST", "VALUES", "STEP", "LAST", "LEAST", "GREATEST")
_RIGHT = ("VALUES", "STEP", "LAST", "LEAST", "GREATEST")
_CSV = "job_id,host,attempt,step,time,name,value"
_CHART_LINES = 12
_DRAWN_POINTS = 2000
"""Maximum number of points of a curve; more could not be distinguished."""


class _Choice(NamedTuple):
    """A selection of series.

    Attributes:
        names: names of the metrics; () for all.
        hosts: indices of the hosts; None for all.
        attempt: number of the attempt; None for all.
        repeats: include all values of a step that was repeated, not only the last one.
    """

    names: tuple[str, ...]
    hosts: tuple[int, ...] | None
    attempt: int | None
    repeats: bool


class _ShownJob(NamedTuple):
    ref: JobRef
    reader: MetricsReader

    def series(self, choice: _Choice) -> list[Series]:
        """Return the chosen series of the job."""
        everything = self.reader.recording.series(repeats=choice.repeats)
        return [one for one in everything if not choice.names or one.name in choice.names]


@click.command("metrics", help=_HELP, short_help="Show what jobs have logged with kinetic.log.")
@click.option(
    "--name",
    "-n",
    "names",
    metavar="NAME",
    multiple=True,
    help="Show only this metric. Repeatable.",
)
@host_options(
    all_hosts="Show all hosts, each with its own curves.",
    attempt="Show only values of attempt N. [default: for each step, the last attempt]",
)
@click.option(
    "--repeats", is_flag=True, help="Show all values of steps that were trained several times."
)
@click.option(
    "--follow", "-f", is_flag=True, help="Print values as they are logged, until the jobs end."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; with --follow, one line per value."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line per value.")
@click.option(
    "--chart/--no-chart", default=None, help="Draw curves below the table. [default: on a terminal]"
)
@click.option(
    "--plot",
    "picture",
    metavar="FILE",
    help="Draw the curves into an image file: .png, .svg, .pdf.",
)
@click.option("--tensorboard", metavar="DIR", help="Write event files for TensorBoard.")
@jobs_argument("jobs", required=True)
@pass_app
def metrics(
    app: AppContext,
    /,
    *,
    job_ids: tuple[str, ...],
    names: tuple[str, ...],
    hosts: tuple[int, ...],
    all_hosts: bool,
    attempt: int | None,
    repeats: bool,
    follow: bool,
    as_json: bool,
    as_csv: bool,
    chart: bool | None,
    picture: str | None,
    tensorboard: str | None,
) -> None:
    """Show the metrics of jobs."""
    if as_json and as_csv:
        raise UsageError("Give either --json or --csv, not both.")
    choice = _Choice(names, None if all_hosts else hosts or (0,), attempt, repeats)
    watched = [_open(app, job_id, choice) for job_id in dict.fromkeys(job_ids)]
    if follow:
        _print_rows(app, watched, choice, as_json=as_json, as_csv=as_csv)
    else:
        for job in watched:
            job.reader.read_new()
    if picture is not None:
        _draw_picture(picture, watched, choice)
    if tensorboard is not None:
        _write_events(tensorboard, watched, choice)
    if follow:
        return None
    if as_json:
        return output.json_document([_document(job, choice) for job in watched])
    if as_csv:
        return _print_csv(watched, choice)
    if picture is None and tensorboard is None:
        _print_table(watched, choice, chart=output.can_draw() if chart is None else chart)
    return None


def _open(app: AppContext, job_id: str, choice: _Choice) -> _ShownJob:
    from kinetic._client.metrics import MetricsReader
    from kinetic._store import attempts

    ref = app.find(job_id)
    check_hosts(ref, choice.hosts or ())
    if choice.attempt is not None:
        attempts.check(app.store, ref.job_id, choice.attempt)
    reader = MetricsReader(app.store, ref, hosts=choice.hosts, attempt=choice.attempt)
    return _ShownJob(ref, reader)


# -- tables and curves -----------------------------------------------------------------------------


def _print_table(watched: Sequence[_ShownJob], choice: _Choice, *, chart: bool) -> None:
    rows = _rows(watched, choice)
    if not rows:
        return output.notice(_explain_absence(watched, choice))
    if unknown := [name for name in choice.names if name not in {row.name for _, row in rows}]:
        output.notice(f"No values were logged for {', '.join(unknown)}.")
    cells = [_cells(*row) for row in rows]
    same_for_all = {"JOB": len(watched) == 1, "HOST": choice.hosts == (0,)}
    left_out = [column for column, is_same in same_for_all.items() if is_same]
    output.table(_COLUMNS, cells, left_out=left_out, right=_RIGHT, cut="METRIC")
    if chart:
        size = shutil.get_terminal_size()
        for name in choice.names or _first_names(rows):
            drawn = _draw(name, watched, choice, size.columns)
            if drawn:
                output.line(f"\n{drawn}")
    return None


def _explain_absence(watched: Sequence[_ShownJob], choice: _Choice) -> str:
    everything = (series for job in watched for series in job.reader.recording.series())
    names = dict.fromkeys(series.name for series in everything)
    if choice.names and names:
        return f"No metric of this name was logged. The metrics are: {', '.join(names)}."
    subject = "The job has" if len(watched) == 1 else "The jobs have"
    hosts = "" if choice.hosts is None else " on the chosen hosts (see --all-hosts)"
    return (
        f"{subject} logged no metrics{hosts}. Log them in the function: "
        "kinetic.log(step=step, loss=loss)."
    )


def _rows(watched: Sequence[_ShownJob], choice: _Choice) -> list[tuple[JobRef, Series]]:
    return [(job.ref, series) for job in watched for series in job.series(choice) if len(series)]


def _cells(ref: JobRef, series: Series) -> tuple[str, ...]:
    numbers = [value for value in series.values if not math.isnan(value)]
    return (
        series.name,
        ref.job_id,
        str(series.host),
        str(len(series)),
        str(series.steps[-1]) if series.has_steps else "-",
        _format_value(series.name, series.values[-1]),
        _format_value(series.name, min(numbers, default=math.nan)),
        _format_value(series.name, max(numbers, default=math.nan)),
    )


def _format_value(name: str, value: float) -> str:
    is_size = name.startswith(HOST_PREFIX) and name.endswith("_bytes") and math.isfinite(value)
    return text.size(value) if is_size else f"{value:.6g}"


def _first_names(rows: Sequence[tuple[JobRef, Series]]) -> tuple[str, ...]:
    names = [series.name for _, series in rows]
    return (next((name for name in names if not name.startswith(HOST_PREFIX)), names[0]),)


def _draw(name: str, watched: Sequence[_ShownJob], choice: _Choice, width: int) -> str:
    from kinetic._client import curves

    drawn = _curves(name, watched, choice)
    return curves.draw_text(
        text.printable(name),
        drawn,
        width=min(width, 100),
        height=_CHART_LINES,
        color=sys.stdout.isatty(),
    )


def _curves(name: str, watched: Sequence[_ShownJob], choice: _Choice) -> list[Curve]:
    from kinetic._client.curves import Curve

    several = len(watched) > 1, choice.hosts != (0,)
    return [
        Curve(_label(ref, series, *several), series.decimate(_DRAWN_POINTS))
        for ref, series in _rows(watched, choice)
        if series.name == name
    ]


def _label(ref: JobRef, series: Series, with_jobs: bool, with_hosts: bool) -> str:
    job = f"{text.printable(ref.display_name)} ({ref.job_id})" if with_jobs else ""
    host = f"host {series.host}" if with_hosts else ""
    return ", ".join(filter(None, (job, host))) or text.printable(series.name)


def _draw_picture(path: str, watched: Sequence[_ShownJob], choice: _Choice) -> None:
    from kinetic._client import curves

    rows = _rows(watched, choice)
    everything = dict.fromkeys(series.name for _, series in rows)
    logged = tuple(name for name in everything if not name.startswith(HOST_PREFIX))
    names = choice.names or logged or tuple(everything)
    if not rows:
        raise UsageError(_explain_absence(watched, choice))
    curves.draw_picture(path, [(name, _curves(name, watched, choice)) for name in names])
    output.notice(f"kinetic: Wrote {text.count(len(names), 'chart')} to {path}.")


def _write_events(folder: str, watched: Sequence[_ShownJob], choice: _Choice) -> None:
    from kinetic._client import curves

    runs: dict[str, list[Series]] = {}
    for ref, series in _rows(watched, choice):
        run = ref.job_id if choice.hosts == (0,) else f"{ref.job_id}/host-{series.host}"
        runs.setdefault(run, []).append(series)
    if not runs:
        raise UsageError(_explain_absence(watched, choice))
    count = curves.write_events(folder, list(runs.items()))
    output.notice(
        f"kinetic: Wrote {text.count(count, 'value')} to {folder}. Show them with `tensorboard "
        f"--logdir {folder}`."
    )


# -- for programs ----------------------------------------------------------------------------------


def _document(job: _ShownJob, choice: _Choice) -> dict[str, Any]:
    return {
        "job_id": job.ref.job_id,
        "metrics": [
            {
                "name": series.name,
                "host": series.host,
                "steps": [None if step < 0 else step for step in series.steps],
                "times": list(series.times),
                "values": [output.json_number(value) for value in series.values],
                "attempts": list(series.attempts),
            }
            for series in job.series(choice)
        ],
    }


def _print_csv(watched: Sequence[_ShownJob], choice: _Choice) -> None:
    output.line(_CSV)
    for job in watched:
        for series in job.series(choice):
            for index in range(len(series)):
                output.line(_csv_line(job.ref, series, index))


def _csv_line(ref: JobRef, series: Series, index: int) -> str:
    step = series.steps[index]
    name = series.name
    if any(mark in name for mark in ',"\n'):
        name = '"' + name.replace('"', '""') + '"'
    return (
        f"{ref.job_id},{series.host},{series.attempts[index]},{'' if step < 0 else step},"
        f"{series.times[index]:.3f},{name},{series.values[index]!r}"
    )


# -- following -------------------------------------------------------------------------------------


def _print_rows(
    app: AppContext,
    watched: Sequence[_ShownJob],
    choice: _Choice,
    *,
    as_json: bool,
    as_csv: bool,
) -> None:
    import json

    if as_csv:
        output.line(_CSV)
    for job, series in _new_series(app, watched, choice):
        for index in range(len(series)):
            if as_csv:
                output.line(_csv_line(job.ref, series, index))
                continue
            step, value = series.steps[index], series.values[index]
            if as_json:
                row = {
                    "job_id": job.ref.job_id,
                    "host": series.host,
                    "attempt": series.attempts[index],
                    "step": None if step < 0 else step,
                    "time": series.times[index],
                    "name": series.name,
                    "value": output.json_number(value),
                }
                output.line(json.dumps(row, allow_nan=False))
            else:
                where = [job.ref.job_id] if len(watched) > 1 else []
                where += [] if choice.hosts == (0,) else [f"host {series.host}"]
                at = "-" if step < 0 else f"step {step}"
                words = f"{text.printable(series.name)} {_format_value(series.name, value)}"
                output.line("  ".join([*where, at, words]))
        output.flush()


def _new_series(
    app: AppContext, watched: Sequence[_ShownJob], choice: _Choice
) -> Iterator[tuple[_ShownJob, Series]]:
    """Yield the new values of each job as they are logged, as series with their job."""
    from kinetic._core.metrics import Recording

    for job, chunk in _chunks(app, watched):
        if chunk is None:
            continue
        new = Recording()
        for rows in job.reader.take(chunk):
            new.add(chunk.host, chunk.end.attempt, rows)
        for series in new.series(repeats=True):
            if not choice.names or series.name in choice.names:
                yield job, series


def _chunks(
    app: AppContext, watched: Sequence[_ShownJob]
) -> Iterator[tuple[_ShownJob, LogChunk | None]]:
    """Yield the log chunks of all jobs in turns; yield None at least every 0.1 s."""
    streams = [
        (job, app.handle_of(job.ref).chunks(replace(job.reader.request, follow=True)))
        for job in watched
    ]
    while streams:
        for stream in list(streams):
            job, chunks = stream
            chunk = next(chunks, _END)
            if chunk is _END:
                streams.remove(stream)
            else:
                # Limit the chunks per turn, so that a job with many does not delay the others.
                more = itertools.takewhile(lambda c: c is not None, itertools.islice(chunks, 100))
                for item in itertools.chain([chunk], more):
                    yield job, item


_END: Any = object()
