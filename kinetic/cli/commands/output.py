"""`kinetic jobs logs`, `result` and `wait`: a job's output, its value and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board.line_prefix import Prefixer
from kinetic._core.state import SUBMITTING
from kinetic.cli import exit_codes, output
from kinetic.cli.context import BATCH, AppContext, pass_app
from kinetic.cli.options import (
    DURATION,
    check_hosts,
    host_options,
    ignore_option,
    job_argument,
    json_option,
)
from kinetic.errors import UsageError, a_type
from kinetic.job_status import JobStatus

if TYPE_CHECKING:
    from kinetic._client.batch.handle import BatchHandle
    from kinetic._client.handle import JobHandle

_LOGS_HELP = """Print the logs of a job: everything that its hosts wrote to stdout and stderr.

Without -f, print the present logs and exit. With -f, wait for the job to start, print its output
as it comes, and exit when the job ends.

\b
Examples:
  kinetic jobs logs -f job-1a2b
  kinetic jobs logs -f --last
  kinetic jobs logs -n 50 --host 3 job-1a2b
  kinetic jobs logs --attempt 1 job-1a2b
  kinetic jobs logs --all-hosts --timestamps job-1a2b | grep loss
"""

_RESULT_HELP = """Wait for a job and print its return value.

If the job failed, print the exception that the call would have raised, and exit with 1. The value
stays in the store.

\b
Examples:
  kinetic jobs result job-1a2b
  kinetic jobs result --json --timeout 5m job-1a2b
"""

_timeout_option = click.option(
    "--timeout",
    metavar="DURATION",
    type=DURATION,
    help="Stop waiting after this time and exit with 124. The job keeps running.",
)

_WAIT_HELP = """Wait for a job to end.

Exit with 0 if the job succeeded, with 1 if it failed or was cancelled. For a batch (grp-...), exit
with 0 if all of its inputs succeeded.

\b
Examples:
  kinetic jobs wait job-1a2b && echo done
  kinetic jobs wait --timeout 2h job-1a2b
"""


_EXPLAIN_HELP = """Explain on one page why a job failed, hangs or waits.

Show the cause, the first host to fail with its last lines of output, what the other hosts did,
attempts, memory, how the time was spent, and what to do next.

\b
Examples:
  kinetic jobs explain job-1a2b
  kinetic jobs explain --last
  kinetic jobs explain --json job-1a2b
"""


@click.command("explain", help=_EXPLAIN_HELP)
@json_option
@job_argument("jobs")
@pass_app
def explain(app: AppContext, /, *, job_id: str, as_json: bool) -> None:
    """Print one page about a job."""
    page = app.handle(job_id).explain()
    if as_json:
        return output.json_document(page.facts)
    return output.line(str(page))


@click.command("logs", help=_LOGS_HELP)
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the job ends.")
@click.option(
    "--tail",
    "-n",
    metavar="N",
    type=click.IntRange(min=0),
    help="Start with the last N lines of each host.",
)
@host_options(
    all_hosts='Read all hosts; start each line with "[host N] ".',
    attempt="Read only attempt N, counted from 1. [default: all, in order]",
)
@click.option(
    "--timestamps",
    is_flag=True,
    help="Start each line with the time when it was printed (UTC).",
)
@ignore_option("--no-resume", is_flag=True)
@job_argument("jobs")
@pass_app
def logs(
    app: AppContext,
    /,
    *,
    job_id: str,
    follow: bool,
    tail: int | None,
    hosts: tuple[int, ...],
    all_hosts: bool,
    attempt: int | None,
    timestamps: bool,
) -> None:
    """Print the logs."""
    from kinetic._backends.base import LogRequest

    ref = app.find(job_id)
    chosen = None if all_hosts else check_hosts(ref, hosts or (0,))
    prefixer = Prefixer(hosts=chosen is None or len(chosen) > 1, times=timestamps)
    request = LogRequest(hosts=chosen, follow=follow, tail=tail, attempt=attempt)
    if follow and app.board.read_standing(ref).reason == SUBMITTING:
        output.notice(f"kinetic: {ref.job_id} is not running yet: {SUBMITTING}.")
    chunks = app.handle_of(ref).chunks(request, output.notice)
    if not output.copy_log(chunks, prefixer, flush=follow) and tail != 0:
        yet = " yet" if app.board.read_standing(ref).ended_at is None else ""
        output.notice(
            f"{ref.job_id} has no output{yet}. `kinetic jobs status {ref.job_id}` shows its state."
        )


@click.command("wait", help=_WAIT_HELP)
@_timeout_option
@json_option
@job_argument("jobs")
@pass_app
def wait(app: AppContext, /, *, job_id: str, timeout: float | None, as_json: bool) -> int:
    """Wait for the end of the job or batch; return the exit code."""
    if job_id.startswith(BATCH):
        return _wait_for_batch(app.open_batch(job_id), timeout, as_json=as_json)
    handle = app.handle(job_id)
    outcome = handle.wait(timeout)
    if as_json:
        output.json_document({"job_id": handle.job_id} | outcome.to_json())
    elif not outcome.ok:
        output.error(
            f"{handle.job_id} {outcome.verdict}: {outcome.reason}",
            f"`kinetic jobs result {handle.job_id}` shows the full error.",
        )
    return exit_codes.of_outcome(outcome)


def _wait_for_batch(batch: BatchHandle[Any], timeout: float | None, *, as_json: bool) -> int:
    from kinetic._client.batch.failures import describe_unsubmitted

    batch.wait(timeout, progress=not as_json)
    counts, total = batch.status_counts(), len(batch)
    succeeded, unsubmitted = counts.get(JobStatus.SUCCEEDED, 0), batch.submission_failures
    if as_json:
        facts = {"group_id": batch.group_id, "total": total, "not_submitted": len(unsubmitted)}
        jobs = {str(status).lower(): count for status, count in counts.items()}
        output.json_document(facts | {"jobs": jobs})
    elif succeeded < total:
        counts_words = (
            f"{succeeded:,} of {total:,} inputs succeeded. {describe_unsubmitted(unsubmitted)}"
        )
        output.error(
            f"{batch.group_id}: {counts_words.rstrip()}",
            f"`kinetic jobs list --group {batch.group_id}` lists its jobs.",
        )
    return exit_codes.OK if succeeded == total else exit_codes.FAILED


@click.command("result", help=_RESULT_HELP)
@_timeout_option
@click.option(
    "--cleanup/--no-cleanup",
    default=None,
    help="Free the job's resources on its backend. Its records stay in either case.",
)
@click.option("--cleanup-timeout", metavar="SECONDS", type=float, default=180.0, hidden=True)
@click.option("--cleanup-poll-interval", metavar="SECONDS", type=float, default=2.0, hidden=True)
@json_option
@job_argument("jobs")
@pass_app
def result(
    app: AppContext,
    /,
    *,
    job_id: str,
    timeout: float | None,
    cleanup: bool | None,
    cleanup_timeout: float,
    cleanup_poll_interval: float,
    as_json: bool,
) -> int:
    """Print the job's value; return the exit code."""
    handle = app.handle(job_id)
    if not handle.wait(timeout).ok:
        return print_failure(handle)
    value = handle.result(
        cleanup=cleanup,
        cleanup_timeout=cleanup_timeout,
        cleanup_poll_interval=cleanup_poll_interval,
        stream_logs=False,
    )
    _print_value(value, as_json)
    return exit_codes.OK


def print_failure(handle: JobHandle[Any], *, is_printed: bool = False) -> int:
    """Print the error of a failed job as the call would raise it, and return the exit code. With
    `is_printed`, leave out the leader's last lines, which have been printed already."""
    problem = handle.error(is_printed=is_printed)
    if problem is not None:
        output.failure(problem)
    return exit_codes.FAILED


def _spell_numbers(value: Any) -> Any:
    """Return the value with infinite and NaN floats as "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, dict):
        return {key: _spell_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_numbers(item) for item in value]
    return output.json_number(value) if isinstance(value, float) else value


def _print_value(value: Any, as_json: bool) -> None:
    if not as_json:
        return output.line(repr(value))
    try:
        plain = _spell_numbers(value)
        return output.json_document(plain, lambda part: _spell_numbers(_simplify(part)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The value cannot be written as JSON ({error}). Without --json, its repr is printed."
        ) from error


def _simplify(value: Any) -> Any:
    """Return an array as nested lists of numbers, and an array scalar as a number.

    Raises:
        TypeError: the value is neither an array nor an array scalar.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it contains {a_type(value)}")
