"""`kinetic jobs stacks`, `debug`, `cancel`, `kill`, `cleanup`, `prune`: look into or end jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import text
from kinetic._core.ref import JobRef
from kinetic.cli import exit_codes, output
from kinetic.cli.context import BATCH, AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import AGE, confirm, job_argument, jobs_argument, json_option, yes_option
from kinetic.errors import BackendUnavailable, KineticError, StoreError

if TYPE_CHECKING:
    from kinetic._client.batch.handle import BatchHandle
    from kinetic._core.place import Place
    from kinetic.cli.pruning import Swept

LISTED = 20
"""At most this many removed jobs are listed; a dry run lists all."""

_STACKS_HELP = """Show the Python stacks of a running job, on every host.

Hosts with the same stack are grouped; the smallest group comes first.

\b
Example:
  kinetic jobs stacks job-1a2b
"""

_CANCEL_HELP = """Stop jobs.

Each function gets SIGTERM first. Logs and records stay.

\b
Examples:
  kinetic jobs cancel job-1a2b
  kinetic jobs cancel 1a2b 77c0
  kinetic jobs cancel grp-1a2b      a batch: also stops submitting its inputs
"""

_CLEANUP_HELP = """Remove jobs from their backend (--k8s) and from the store (--gcs).

A running job is stopped first.

\b
Examples:
  kinetic jobs cleanup job-1a2b
  kinetic jobs cleanup --no-gcs job-1a2b      keeps its records and logs
"""

_PRUNE_HELP = """Remove the records, logs and stored files of old jobs.

Then remove source files, payloads and data in the store that no remaining job needs, and compiled
programs, if they are older than a day (in a bucket: if no submission has used them for a week). You
can submit jobs at the same time. Files in output folders are never removed.

\b
Examples:
  kinetic jobs prune --dry-run
  kinetic jobs prune --older-than 30d --yes
"""
_KILL_HELP = """Kill hosts of a running job, to test how it recovers from losing them.

By default, the processes that run the function get SIGKILL, as in a crash. On a cluster, the pods
are deleted: KILL deletes them at once, TERM gives them their grace period. To stop a job, use
`kinetic jobs cancel` instead.

\b
Examples:
  kinetic jobs kill job-1a2b --slice 1
  kinetic jobs kill job-1a2b --slice 1 --host 0
  kinetic jobs kill job-1a2b --host 3 --agents --signal TERM  # a preemption
"""
_DEBUG_HELP = """Attach a debugger to a job that was started with debug=True.

Wait for the leader's debugger, print the configuration for launch.json, and forward the port until
the job ends or you press Ctrl-C.

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
    """Print the stacks of all hosts; return the exit code."""
    handle = app.handle(job_id)
    stacks_by_host = handle.stacks()
    if as_json:
        output.json_document({str(host): stack for host, stack in stacks_by_host.items()})
    else:
        from kinetic._core.gang import blame

        if difference := app.board.gang(handle.ref, None).current.difference:
            output.line(difference)
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
    """Cancel jobs and batches."""
    batches, refs = _find_all(app, job_ids)
    for batch in batches:
        if _has_ended(batch):
            output.notice(f"{batch.group_id} has already ended.")
            continue
        batch.cancel()
        output.line(f"{batch.group_id} is cancelled. No more inputs are submitted.")
    for ref in refs:
        if app.board.verdict(ref) is not None:
            output.notice(f"{ref.job_id} has already ended.")
            continue
        app.handle_of(ref).cancel(cleanup_timeout=0)
        output.line(f"{ref.job_id} is being cancelled.")


def _has_ended(batch: BatchHandle[Any]) -> bool:
    """True if every input has ended, or its job was removed or refused; False if the backend
    does not answer."""
    try:
        statuses = dict(batch.statuses())
    except KineticError:
        return False
    without_job = batch.submission_failures.keys() | batch.unavailable_children.keys()
    is_complete = len(statuses.keys() | without_job) == len(batch)
    return is_complete and all(status.ended for status in statuses.values())


@click.command("cleanup", help=_CLEANUP_HELP)
@click.option(
    "--k8s/--no-k8s", default=True, help="Remove the job's processes or pods on its backend."
)
@click.option(
    "--gcs/--no-gcs", default=True, help="Remove its records, logs and value from the store."
)
@click.option("--cleanup-timeout", metavar="SECONDS", type=float, default=180.0, hidden=True)
@click.option("--cleanup-poll-interval", metavar="SECONDS", type=float, default=2.0, hidden=True)
@click.option("--yes", "-y", is_flag=True, hidden=True, expose_value=False)  # Never asks.
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
    """Clean up jobs and batches."""
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
    """Return the batches and jobs with these ids. Find all of them before the caller changes any,
    so that a wrong id does not leave the work half done."""
    groups = [text_id for text_id in ids if text_id.startswith(BATCH)]
    batches = {batch.group_id: batch for batch in map(app.open_batch, groups)}
    jobs = map(app.find_to_end, (text_id for text_id in ids if text_id not in groups))
    refs = list({ref.job_id: ref for ref in jobs}.values())
    return list(batches.values()), refs


@click.command("prune", help=_PRUNE_HELP)
@click.option(
    "--older-than",
    metavar="DURATION",
    type=AGE,
    default="7d",
    show_default=True,
    help="Remove only jobs that ended at least this long ago.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the jobs that would be removed, without removing anything.",
)
@yes_option
@json_option
@pass_app
def prune(app: AppContext, /, *, older_than: float, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Remove old records, then unused content. Return the exit code."""
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
            for line in _lines(old, LISTED):
                output.notice(line)
            what = _count_removed(old, unused)
            confirm(f"remove {what} with records and logs", yes=False)
    unreachable: dict[Place, str] = {}
    tried = at_once(
        lambda ref: _try_remove(app, ref, unreachable), old, app.store.calls_at_once // 4
    )
    failed = [problem for problem in tried if problem]
    failed_ids = {problem["job_id"] for problem in failed}
    swept = pruning.Swept()
    try:
        swept = pruning.sweep(app.store, older_than=limit)
    except StoreError as error:
        output.notice(f"warning: Unused content was not removed: {error}")
        failed.append({"job_id": "", "error": str(error)})
    return _report(
        "Removed",
        [ref for ref in old if ref.job_id not in failed_ids],
        swept,
        failed,
        as_json,
        listed=LISTED,
    )


def _count_removed(refs: list[JobRef], swept: Swept) -> str:
    unfinished = text.count(len(swept.orphans), "unfinished submission") if swept.orphans else ""
    return ", ".join(filter(None, [text.count(len(refs), "job"), unfinished]))


def _lines(refs: list[JobRef], limit: int | None) -> list[str]:
    """Return a line for each of the first `limit` jobs, and one that counts the others."""
    lines = [f"  {ref.job_id}  {text.printable(ref.display_name)}" for ref in refs[:limit]]
    return [*lines, f"  and {len(refs) - len(lines)} more"] if len(lines) < len(refs) else lines


def _try_remove(
    app: AppContext, ref: JobRef, unreachable: dict[Place, str]
) -> dict[str, Any] | None:
    """Remove one job. Return a failure as a JSON object instead of raising it, so that other jobs
    are removed too; None on success.

    A backend that does not answer is added to `unreachable`. Its other jobs are then skipped,
    because each would time out.
    """
    from kinetic.cli import pruning

    problem = unreachable.get(ref.place, "")
    if not problem:
        try:
            pruning.remove(app, ref)
            return None
        except BackendUnavailable as error:
            problem = unreachable[ref.place] = str(error)
        except KineticError as error:
            problem = str(error)
        output.notice(f"warning: {ref.job_id} was not removed: {problem}")
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
@click.option(
    "--slice", "slice_", metavar="N", type=int, help="Kill the hosts of this slice, counted from 0."
)
@click.option(
    "--host", metavar="N", type=int, help="Kill only this host of the slice, or of the whole job."
)
@click.option(
    "--signal",
    metavar="NAME",
    default="KILL",
    show_default=True,
    shell_complete=complete_with("signals"),
    help="Signal to send: a name or a number.",
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
    """Kill hosts of a job."""
    from kinetic._client import killing

    handle = app.handle(job_id)
    hosts, name = killing.choose_hosts(handle.ref, slice_, host), killing.signal_of(signal).name
    ref = handle.ref
    machines = f"{killing.name_machines(ref, hosts)} of {ref.job_id}"
    if not yes and not handle.status().ended:
        target = f"{'the agents of ' if agents else ''}{machines}"
        confirm(f"send {name} to {target}", yes=False)
    killed = handle.kill_hosts(slice_, host, signal=signal, agents=agents)
    if as_json:
        output.json_document({"job_id": handle.job_id, "signal": name, "hosts": list(killed)})
        return exit_codes.OK
    output.line(f"{name} was sent to {killing.name_machines(ref, killed)} of {ref.job_id}.")
    if missed := tuple(sorted(set(hosts) - set(killed))):
        output.notice(f"No process was running on {killing.name_machines(ref, missed)}.")
    return exit_codes.OK


@click.command("debug", help=_DEBUG_HELP)
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=5678,
    show_default=True,
    help="Port on this machine; 0 for any free port.",
)
@click.option(
    "--working-dir",
    metavar="PATH",
    help="Folder of the job's source on this machine. [default: the folder it was sent from]",
)
@job_argument("running_jobs")
@pass_app
def debug(app: AppContext, /, *, job_id: str, port: int, working_dir: str | None) -> int:
    """Forward the debugger's port."""
    handle, forward = app.handle(job_id), None
    try:
        forward = handle.debug_attach(port, working_dir)
        forward.wait()
    except KeyboardInterrupt:  # Also while the command still waits for the debugger.
        if forward is not None:
            forward.terminate()
        output.notice(
            f"\n{handle.job_id} keeps running. To attach again: kinetic jobs debug {handle.job_id}"
        )
        return exit_codes.INTERRUPTED
    return exit_codes.OK
