"""`kinetic jobs kill`: the loss of a host or a slice, on purpose.

In: a job's id, a slice, a host, a signal. Out: a report of which hosts were sent it.
"""

from __future__ import annotations

import sys

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import job_argument, json_option, yes_option

_HELP = """Kill hosts of a running job on purpose, to see what it does when it loses them.

By default the processes that run the function get SIGKILL, as in a crash. On a cluster the pods are
deleted: with KILL at once, with TERM they have their time to end. To stop a job, use `kinetic jobs
cancel`.

\b
Examples:
  kinetic jobs kill job-1a2b --slice 1
  kinetic jobs kill job-1a2b --slice 1 --host 0
  kinetic jobs kill job-1a2b --host 3 --agents --signal TERM  # preempts it
"""


@click.command("kill", help=_HELP)
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
        _confirm(f"{'the agents of ' if agents else ''}{named}", name)
    killed = handle.kill_hosts(slice_, host, signal=signal, agents=agents)
    if as_json:
        output.json_document({"job_id": handle.job_id, "signal": name, "hosts": list(killed)})
        return exit_codes.OK
    output.line(f"{name} was sent to {killing.name_machines(ref, killed)} of {ref.job_id}.")
    if missed := tuple(sorted(set(hosts) - set(killed))):
        output.notice(f"Nothing runs on {killing.name_machines(ref, missed)} at present.")
    return exit_codes.OK


def _confirm(whom: str, name: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{name} would be sent to {whom}. Add --yes to send it unasked.")
    click.confirm(f"Send {name} to {whom}?", abort=True, err=True)
