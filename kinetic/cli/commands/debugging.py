"""`kinetic jobs debug`: attach an editor's debugger to the leader of a job that was started with
debug=True.

In: a job's id, a port. Out: what to write into launch.json; a forwarded port until the job ends.
"""

from __future__ import annotations

import click

from kinetic.cli import exit_codes, output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.options import job_argument

_HELP = """Attach a debugger to a job that was started with debug=True.

Waits until the leader's debugger listens, says what to write into launch.json, and forwards the
port until the job ends or Ctrl-C.

\b
Examples:
  kinetic jobs debug job-1a2b
  kinetic jobs debug --port 5679 job-1a2b
"""


@click.command("debug", help=_HELP)
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
