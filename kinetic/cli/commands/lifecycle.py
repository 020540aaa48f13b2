"""`kinetic jobs stacks`, `debug`, `cancel`, `kill`, `cleanup` and `prune`: inspecting, stopping and
removing jobs.

In: ids, ages. Out: a report of what was done.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import text
from kinetic._core.ref import JobRef
from kinetic.cli import exit_codes, output
from kinetic.cli.context import BATCH, AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import AGE, job_argument, jobs_argument, json_option, yes_option
from kinetic.errors import BackendUnavailable, KineticError, StoreError

if TYPE_CHECKING:
    from kinetic._client.batch.handle import BatchHandle
    from kinetic._core.place import Place
    from kinetic.cli.pruning import Swept

LISTED = 20
"""How many removed jobs are named; a dry run names all."""

_STACKS_HELP = """Show where the Python code of a running job stands, on every host.

Hosts that stand at the same place are shown together; the odd one out comes first.

\b
Example:
  kinetic jobs stacks job-1a2b
"""

_CANCEL_HELP = """Stop jobs. Their functions get SIGTERM first; their logs and records stay.

\b
Examples:
  kinetic jobs cancel job-1a2b
  kinetic jobs cancel 1a2b 77c0
  kinetic jobs cancel grp-1a2b      a batch: nothing more is submitted
"""

_CLEANUP_HELP = """Remove what jobs hold on their backend (--k8s) and what they left in the store
(--gcs).

A job that is running is stopped first.

\b
Examples:
  kinetic jobs cleanup job-1a2b
  kinetic jobs cleanup --no-gcs job-1a2b      keep its records and logs
"""

_PRUNE_HELP = """Remove the records, logs and kept files of jobs that ended long ago.

Then removes stored source files, payloads and data that no remaining job needs and that are older
than a day (in a bucket: that no submission has used for a week). It is safe to submit jobs at the
same time. Files that functions left in their output folders are never removed.

\b
Examples:
  kinetic jobs prune --dry-run
  kinetic jobs prune --older-than 30d --yes
"""
_KILL_HELP = """Kill hosts of a running job on purpose, to see what it does when it loses them.

By default the processes that run the function get SIGKILL, as in a crash. On a cluster the pods are
deleted: with KILL at once, with TERM they have their time to end. To stop a job, use `kinetic jobs
cancel`.

\b
Examples:
  kinetic jobs kill job-1a2b --slice 1
  kinetic jobs kill job-1a2b --slice 1 --host 0
  kinetic jobs kill job-1a2b --host 3 --agents --signal TERM  # preempts it
"""
_DEBUG_HELP = """Attach a debugger to a job that was started with debug=True.

Waits until the leader's debugger listens, says what to write into launch.json, and forwards the
port until the job ends or Ctrl-C.

\b
Examples:
  kinetic jobs debug job-1a2b
  kinetic jobs debug --port 5679 job-1a2b
"""


@click.command("stacks", help=_STACKS_HELP)
@json_option
@job_argument("running_jobs")
@pass_app
def stacks(app: AppContext, /, *, job_id: str, as_json: bool) -> int:
    """Print the stacks of all hosts."""
    stacks_by_host = app.handle(job_id).stacks()
    if as_json:
        output.json_document({str(host): stack for host, stack in stacks_by_host.items()})
    else:
        from kinetic._core.gang import blame

        output.line(blame.format_groups(stacks_by_host).rstrip())
    return exit_codes.OK


@click.command("cancel", help=_CANCEL_HELP)
@click.option("--cleanup-timeout", metavar="SECONDS", type=float, default=180.0, hidden=True)
@click.option("--cleanup-poll-interval", metavar="SECONDS", type=float, default=2.0, hidden=True)
@jobs_argument("running_jobs", required=True)
@pass_app
def cancel(
    app: AppContext,
    /,
    *,
    job_ids: tuple[str, ...],
    cleanup_timeout: float,
    cleanup_poll_interval: float,
) -> None:
    """Ask jobs to stop."""
    batches, refs = _find_all(app, job_ids)
    for batch in batches:
        batch.cancel()
        output.line(f"{batch.group_id} is cancelled: nothing more is submitted.")
    for ref in refs:
        if app.board.verdict(ref) is not None:
            output.notice(f"{ref.job_id} has already ended.")
            continue
        app.handle_of(ref).cancel(cleanup_timeout=0)
        output.line(f"{ref.job_id} is being cancelled.")


@click.command("cleanup", help=_CLEANUP_HELP)
@click.option(
    "--k8s/--no-k8s", default=True, help="What the job holds on its backend: processes, pods."
)
@click.option(
    "--gcs/--no-gcs", default=True, help="What the job left in the store: records, logs, the value."
)
@click.option("--cleanup-timeout", metavar="SECONDS", type=float, default=180.0, hidden=True)
@click.option("--cleanup-poll-interval", metavar="SECONDS", type=float, default=2.0, hidden=True)
@click.option("--yes", "-y", is_flag=True, hidden=True, expose_value=False)  # It never asks.
@jobs_argument("jobs", required=True)
@pass_app
def cleanup(
    app: AppContext,
    /,
    *,
    job_ids: tuple[str, ...],
    k8s: bool,
    gcs: bool,
    cleanup_timeout: float,
    cleanup_poll_interval: float,
) -> None:
    """Remove jobs."""
    batches, refs = _find_all(app, job_ids)
    for batch in batches:
        batch.cleanup(k8s=k8s, gcs=gcs)
        output.line(f"{batch.group_id} is cleaned up.")
    for ref in refs:
        app.handle_of(ref).cleanup(
            k8s=k8s,
            gcs=gcs,
            cleanup_timeout=cleanup_timeout,
            cleanup_poll_interval=cleanup_poll_interval,
        )
        output.line(f"{ref.job_id} is cleaned up.")


def _find_all(app: AppContext, ids: tuple[str, ...]) -> tuple[list[BatchHandle[Any]], list[JobRef]]:
    """Find all batches and jobs before anything is done: one wrong id must not leave half of the
    work done."""
    groups = [each for each in ids if each.startswith(BATCH)]
    batches = {batch.group_id: batch for batch in map(app.open_batch, groups)}
    jobs = map(app.find_to_end, (each for each in ids if each not in groups))
    refs = list({ref.job_id: ref for ref in jobs}.values())
    return list(batches.values()), refs


@click.command("prune", help=_PRUNE_HELP)
@click.option(
    "--older-than",
    metavar="DURATION",
    type=AGE,
    default="7d",
    show_default=True,
    help="Only jobs that ended at least this long ago.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@yes_option
@json_option
@pass_app
def prune(app: AppContext, /, *, older_than: float, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove old records, then content that is not used any more."""
    from kinetic._store.gc_lock import content_age_s
    from kinetic._store.many import at_once
    from kinetic.cli import pruning

    old = pruning.list_ended_before(app, app.now() - older_than)
    limit = app.now() - content_age_s(app.store)
    if dry_run or not yes:
        old_ids = {ref.job_id for ref in old}
        unused = pruning.find_unused(app.store, older_than=limit, without=old_ids)
        if dry_run:
            return _report("Would remove", old, unused, [], as_json, listed=None)
        if old or any((unused.contents, unused.data, unused.orphans, unused.batches)):
            _confirm(old, unused)
    away: dict[Place, str] = {}
    tried = at_once(lambda ref: _try_remove(app, ref, away), old, app.store.calls_at_once // 4)
    failed = [problem for problem in tried if problem]
    failed_ids = {problem["job_id"] for problem in failed}
    swept = pruning.Swept()
    try:
        swept = pruning.sweep(app.store, older_than=limit)
    except StoreError as error:
        output.notice(f"warning: nothing but jobs was removed: {error}")
        failed.append({"job_id": "", "error": str(error)})
    return _report(
        "Removed",
        [ref for ref in old if ref.job_id not in failed_ids],
        swept,
        failed,
        as_json,
        listed=LISTED,
    )


def _confirm(old: list[JobRef], unused: Swept) -> None:
    what = _count_removed(old, unused)
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what} would be removed. Add --yes to remove without being asked.")
    for line in _lines(old, LISTED):
        output.notice(line)
    click.confirm(f"Remove {what} with records and logs?", abort=True, err=True)


def _count_removed(refs: list[JobRef], swept: Swept) -> str:
    unfinished = text.count(len(swept.orphans), "unfinished submission") if swept.orphans else ""
    return ", ".join(filter(None, [text.count(len(refs), "job"), unfinished]))


def _lines(refs: list[JobRef], limit: int | None) -> list[str]:
    """A line for each of the first `limit` jobs, and one for the rest."""
    lines = [f"  {ref.job_id}  {text.printable(ref.display_name)}" for ref in refs[:limit]]
    return [*lines, f"  and {len(refs) - len(lines)} more"] if len(lines) < len(refs) else lines


def _try_remove(app: AppContext, ref: JobRef, away: dict[Place, str]) -> dict[str, Any] | None:
    """Remove one job; report a failure instead of raising, so that the others are removed too.

    A place that does not answer is added to `away`: its other jobs are kept without a try, because
    each would take as long.
    """
    from kinetic.cli import pruning

    problem = away.get(ref.place, "")
    if not problem:
        try:
            pruning.remove(app, ref)
            return None
        except BackendUnavailable as error:
            problem = away[ref.place] = str(error)
        except KineticError as error:
            problem = str(error)
        output.notice(f"warning: {ref.job_id} was kept: {problem}")
    return {"job_id": ref.job_id, "error": problem}


def _report(
    verb: str,
    refs: list[JobRef],
    swept: Swept,
    failed: list[dict[str, Any]],
    as_json: bool,
    *,
    listed: int | None,
) -> int:
    if as_json:
        output.json_document(
            {
                "jobs": [ref.job_id for ref in refs],
                "unfinished_submissions": list(swept.orphans),
                "contents": len(swept.contents),
                "data": len(swept.data),
                "size_bytes": swept.size_bytes,
                "failed": failed,
            }
        )
    else:
        files = f"{text.count(len(swept.contents), 'unused file')} ({text.size(swept.size_bytes)})"
        data = f", {text.count(len(swept.data), 'unused data set')}" if swept.data else ""
        for line in _lines(refs, listed):
            output.line(line)
        output.line(f"{verb} {_count_removed(refs, swept)}{data} and {files}.")
    return exit_codes.STORE if failed else exit_codes.OK


@click.command("kill", help=_KILL_HELP)
@click.option("--slice", "slice_", metavar="N", type=int, help="The hosts of this slice, from 0.")
@click.option(
    "--host", metavar="N", type=int, help="Only this host of the slice; else this one of the job."
)
@click.option(
    "--signal",
    metavar="NAME",
    default="KILL",
    show_default=True,
    shell_complete=complete_with("signals"),
    help="What to send: a name or a number.",
)
@click.option(
    "--agents",
    is_flag=True,
    help="Signal the agents of the hosts instead of the processes that run the function.",
)
@yes_option
@json_option
@job_argument("running_jobs")
@pass_app
def kill(
    app: AppContext,
    /,
    *,
    job_id: str,
    slice_: int | None,
    host: int | None,
    signal: str,
    agents: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Kill hosts."""
    from kinetic._client import killing

    handle = app.handle(job_id)
    hosts, name = killing.choose_hosts(handle.ref, slice_, host), killing.signal_of(signal).name
    ref = handle.ref
    named = f"{killing.name_machines(ref, hosts)} of {ref.job_id}"
    if not yes and not handle.status().ended:
        whom = f"{'the agents of ' if agents else ''}{named}"
        if not sys.stdin.isatty():
            raise click.UsageError(f"{name} would be sent to {whom}. Add --yes to send it unasked.")
        click.confirm(f"Send {name} to {whom}?", abort=True, err=True)
    killed = handle.kill_hosts(slice_, host, signal=signal, agents=agents)
    if as_json:
        output.json_document({"job_id": handle.job_id, "signal": name, "hosts": list(killed)})
        return exit_codes.OK
    output.line(f"{name} was sent to {killing.name_machines(ref, killed)} of {ref.job_id}.")
    if missed := tuple(sorted(set(hosts) - set(killed))):
        output.notice(f"Nothing runs on {killing.name_machines(ref, missed)} at present.")
    return exit_codes.OK


@click.command("debug", help=_DEBUG_HELP)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=5678,
    show_default=True,
    help="Port of this machine; 0 takes any free one.",
)
@click.option(
    "--working-dir",
    metavar="PATH",
    help="Where the job's source is on this machine; by default where it was sent from.",
)
@job_argument("running_jobs")
@pass_app
def debug(app: AppContext, /, *, job_id: str, port: int, working_dir: str | None) -> int:
    """Forward the debugger's port."""
    handle, forward = app.handle(job_id), None
    try:
        forward = handle.debug_attach(port, working_dir)
        forward.wait()
    except KeyboardInterrupt:  # also while still waiting for the debugger
        if forward is not None:
            forward.terminate()
        output.notice(
            f"\n{handle.job_id} keeps running. To attach again: kinetic jobs debug {handle.job_id}"
        )
        return exit_codes.INTERRUPTED
    return exit_codes.OK
