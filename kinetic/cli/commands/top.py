"""`kinetic jobs top`: activity of the hosts of running jobs."""

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
_HELP = """Show the activity of running jobs' hosts: CPU, memory, output and idle time.

On a terminal the table is updated until you press q. CPU is the share of one processor since the
last update, or at first since the function started. STILL is the time for which a host has neither
computed nor printed anything.

\b
Examples:
  kinetic jobs top
  kinetic jobs top --interval 5s job-1a2b
  kinetic jobs top --once | grep waiting
  kinetic jobs top --json | jq '.[].members[] | select(.stalled_s > 60)'
"""


@click.command("top", help=_HELP, short_help="Show the activity of running jobs' hosts.")
@click.option("--once", "one_table", is_flag=True, help="Print one table and exit.")
@click.option(
    "--interval",
    metavar="DURATION",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Time between updates.",
)
@json_option
@jobs_argument("running_jobs", required=False)
@pass_app
def top(
    app: AppContext, /, *, job_ids: tuple[str, ...], one_table: bool, interval: float, as_json: bool
) -> None:
    """Show running jobs."""
    chosen = {app.find(job_id).job_id for job_id in job_ids}
    with ActivityWatch(app, chosen) as watch:
        if as_json:
            return output.json_document(activity.document(watch.poll_to_end()))
        if one_table or not output.can_redraw():
            return _print(watch.poll_to_end())
        with contextlib.suppress(KeyboardInterrupt):  # A usual way to quit.
            _draw(watch, max(interval, 0.1))
    return None


def _print(lines: list[HostLine]) -> None:
    if not lines:
        return output.notice("No job is running.")
    return output.table(
        activity.COLUMNS,
        map(activity.cells, lines),
        left_out=activity.list_hidden_columns(output.width(), lines),
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
                f"{text.count(len(lines) - room, 'more line')}: --once shows all of them"
                if len(lines) > room
                else ""
            )
            head = (
                f"{activity.headline(lines)}    q: quit"
                if lines
                else "No job is running.    q: quit"
            )
            screen.show(
                head,
                activity.COLUMNS,
                map(activity.cells, lines[:room]),
                more,
                left_out=activity.list_hidden_columns(width, lines),
                right=activity.RIGHT,
                cut=activity.CUT,
            )
            if screen.wait(interval_s):
                return
