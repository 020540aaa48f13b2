"""`kinetic jobs top`: what the hosts of running jobs are doing.

In: ids, an interval. Out: a table that is redrawn until q or Ctrl-C, one table, or one JSON
document.
"""

from __future__ import annotations

import contextlib

import click

from kinetic._client.activity_watch import ActivityWatch
from kinetic._client.board import activity, text
from kinetic._client.board.activity import HostLine
from kinetic.cli import output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.options import DURATION, jobs_argument, json_option

_FRAME_LINES = 5
_HELP = """Show what the hosts of running jobs are doing: processor, memory, output, and for how
long they have stood still.

On a terminal the table is redrawn until you press q. CPU is the share of one processor since the
last update, at first since the function started. STILL is for how long a host has neither computed
nor printed.

\b
Examples:
  kinetic jobs top
  kinetic jobs top --interval 5s job-1a2b
  kinetic jobs top --once | grep waiting
  kinetic jobs top --json | jq '.[].members[] | select(.stalled_s > 60)'
"""


@click.command("top", help=_HELP, short_help="Show what the hosts of running jobs are doing.")
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option(
    "--interval",
    metavar="DURATION",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Time between two updates.",
)
@json_option
@jobs_argument("running_jobs", required=False)
@pass_app
def top(
    app: AppContext, /, *, job_ids: tuple[str, ...], once: bool, interval: float, as_json: bool
) -> None:
    """Show running jobs."""
    chosen = {app.find(job_id).job_id for job_id in job_ids}
    with ActivityWatch(app, chosen) as watch:
        if as_json:
            return output.json_document(activity.document(watch.poll_to_end()))
        if once or not output.can_redraw():
            return _print(watch.poll_to_end())
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
            _draw(watch, max(interval, 0.1))
    return None


def _print(lines: list[HostLine]) -> None:
    if not lines:
        return output.notice("No job is running.")
    return output.table(
        activity.COLUMNS,
        map(activity.cells, lines),
        left_out=activity.left_out(output.width(), lines),
        right=activity.RIGHT,
        cut=activity.CUT,
    )


def _draw(watch: ActivityWatch, interval_s: float) -> None:
    with output.Screen() as screen:
        while True:
            lines = watch.poll()
            width, height = screen.size
            room = max(height - _FRAME_LINES, 1)
            more = (
                f"{text.count(len(lines) - room, 'line')} more: --once shows them all"
                if len(lines) > room
                else ""
            )
            head = (
                f"{activity.headline(lines)}    q leaves"
                if lines
                else "No job is running.    q leaves"
            )
            screen.show(
                head,
                activity.COLUMNS,
                map(activity.cells, lines[:room]),
                more,
                left_out=activity.left_out(width, lines),
                right=activity.RIGHT,
                cut=activity.CUT,
            )
            if screen.wait(interval_s):
                return
