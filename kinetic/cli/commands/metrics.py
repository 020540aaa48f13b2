"""`kinetic jobs metrics`: what jobs have logged with `kinetic.log`, as a table, curves, JSON, CSV,
a picture or event files.

With --follow it prints rows as they are logged, a line each.
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

_HELP = """Show what jobs have logged with kinetic.log, step by step, and figures of their hosts.

On a terminal the first metric, or those of --name, is drawn as curves: one for each job and host.
Host 0 is shown unless you ask for others. A step that was trained again shows as it was trained
last.

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
"""Of a curve; more would not be seen."""


class _Choice(NamedTuple):
    """Which series.

    Attributes:
        names: of metrics; () for all.
        hosts: None for all.
        attempt: None for all.
        repeats: also steps that were trained again.
    """

    names: tuple[str, ...]
    hosts: tuple[int, ...] | None
    attempt: int | None
    repeats: bool


class _ShownJob(NamedTuple):
    ref: JobRef
    reader: MetricsReader

    def series(self, choice: _Choice) -> list[Series]:
        """What was chosen of what was read."""
        everything = self.reader.recording.series(repeats=choice.repeats)
        return [each for each in everything if not choice.names or each.name in choice.names]


@click.command("metrics", help=_HELP, short_help="Show what jobs have logged with kinetic.log.")
@click.option(
    "--name",
    "-n",
    "names",
    metavar="NAME",
    multiple=True,
    help="Only this metric. Repeatable.",
)
@host_options(
    all_hosts="All hosts, each with curves of its own.",
    attempt="Only what the N-th attempt has logged. [default: all, each step as it was trained "
    "last]",
)
@click.option("--repeats", is_flag=True, help="Also steps that were trained again, each time.")
@click.option("--follow", "-f", is_flag=True, help="Print rows until the jobs end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: with --follow a line per row.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, a line per value.")
@click.option(
    "--chart/--no-chart", default=None, help="Draw curves below the table. [default: on a terminal]"
)
@click.option("--plot", "picture", metavar="FILE", help="Draw a picture: loss.png, .svg, .pdf.")
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
    """Show metrics."""
    if as_json and as_csv:
        raise UsageError("Give either --json or --csv.")
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
        output.notice(f"Nothing was logged as {', '.join(unknown)}.")
    cells = [_cells(*row) for row in rows]
    left_out = _left_out(watched, choice)
    output.table(_COLUMNS, cells, left_out=left_out, right=_RIGHT, cut="METRIC")
    if chart:
        size = shutil.get_terminal_size()
        for name in choice.names or _first_names(rows):
            drawn = _draw(name, watched, choice, size.columns)
            if drawn:
                output.line(f"\n{drawn}")
    return None


def _explain_absence(watched: Sequence[_ShownJob], choice: _Choice) -> str:
    everything = (series for each in watched for series in each.reader.recording.series())
    names = dict.fromkeys(series.name for series in everything)
    if choice.names and names:
        return f"No such metric was logged; there are: {', '.join(names)}."
    who = "The job has" if len(watched) == 1 else "The jobs have"
    of = "" if choice.hosts is None else " on the hosts that were asked for (see --all-hosts)"
    return f"{who} logged nothing{of}. A function logs with kinetic.log(step=step, loss=loss)."


def _left_out(watched: Sequence[_ShownJob], choice: _Choice) -> list[str]:
    same_for_all = {"JOB": len(watched) == 1, "HOST": choice.hosts == (0,)}
    return [column for column, is_same in same_for_all.items() if is_same]


def _rows(watched: Sequence[_ShownJob], choice: _Choice) -> list[tuple[JobRef, Series]]:
    return [(each.ref, series) for each in watched for series in each.series(choice) if len(series)]


def _cells(ref: JobRef, series: Series) -> tuple[str, ...]:
    numbers = [value for value in series.values if not math.isnan(value)]
    return (
        series.name,
        ref.job_id,
        str(series.host),
        str(len(series)),
        str(series.steps[-1]) if series.has_steps else "-",
        _word(series.name, series.values[-1]),
        _word(series.name, min(numbers, default=math.nan)),
        _word(series.name, max(numbers, default=math.nan)),
    )


def _word(name: str, value: float) -> str:
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
    """One for each job and host."""
    from kinetic._client.curves import Curve

    several = len(watched) > 1, choice.hosts != (0,)
    return [
        Curve(_label(ref, series, *several), series.decimate(_DRAWN_POINTS))
        for ref, series in _rows(watched, choice)
        if series.name == name
    ]


def _label(ref: JobRef, series: Series, of_jobs: bool, of_hosts: bool) -> str:
    job = f"{text.printable(ref.display_name)} ({ref.job_id})" if of_jobs else ""
    host = f"host {series.host}" if of_hosts else ""
    return ", ".join(filter(None, (job, host))) or text.printable(series.name)


def _draw_picture(path: str, watched: Sequence[_ShownJob], choice: _Choice) -> None:
    from kinetic._client import curves

    rows = _rows(watched, choice)
    logged = dict.fromkeys(each.name for _, each in rows if not each.name.startswith(HOST_PREFIX))
    names = choice.names or tuple(logged) or tuple(dict.fromkeys(each.name for _, each in rows))
    if not rows:
        raise UsageError(_explain_absence(watched, choice))
    curves.draw_picture(path, [(name, _curves(name, watched, choice)) for name in names])
    output.notice(f"kinetic: {path} has {text.count(len(names), 'chart')}.")


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
        f"kinetic: {folder} has {text.count(count, 'value')}; `tensorboard --logdir {folder}` "
        "shows them."
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
    """Print what is logged as it comes."""
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
                words = f"{text.printable(series.name)} {_word(series.name, value)}"
                output.line("  ".join([*where, at, words]))
        output.flush()


def _new_series(
    app: AppContext, watched: Sequence[_ShownJob], choice: _Choice
) -> Iterator[tuple[_ShownJob, Series]]:
    """Yield what each job logs, once, in the order in which it arrives."""
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
    """Yield what each job logs, by turns; None at least every 0.1 s."""
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
                # A job that logs much must not keep the others waiting.
                more = itertools.takewhile(lambda c: c is not None, itertools.islice(chunks, 100))
                for one in itertools.chain([chunk], more):
                    yield job, one


_END: Any = object()
