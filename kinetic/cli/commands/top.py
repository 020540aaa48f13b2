"""`kinetic jobs top`: what the hosts of running jobs are doing.

In: ids, an interval. Out: a table that is redrawn until q or Ctrl-C, one table, or one JSON
document.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import activity, text
from kinetic._client.board.activity import HostLine, Rates
from kinetic._core.ref import JobRef
from kinetic._core.state import UNKNOWN, JobStatus
from kinetic._store import index
from kinetic.cli import output
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.options import DURATION, jobs_argument, json_option
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._client import asking
    from kinetic._rpc.client import ControlClient

_ACTIVE = (JobStatus.PENDING, JobStatus.RUNNING, UNKNOWN)
_SNAPSHOT_TIMEOUT_S = 1.0
_FRAME_LINES = 5
ANSWER_S, _PAUSE_S = 12.0, 0.25
"""How long leaders are waited for that look for questions every ten seconds."""
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
        if once or not sys.stdout.isatty():
            return _print(watch.poll_to_end())
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
            _draw(watch, max(interval, 0.1))
    return None


def _print(found: list[HostLine]) -> None:
    if not found:
        return output.notice("No job is running.")
    columns = activity.columns(output.width(), found)
    rows = [activity.cells(line, columns, whole=output.width() is None) for line in found]
    return output.table(columns, rows, right=activity.RIGHT, cut=activity.CUT)


def _draw(watch: ActivityWatch, interval_s: float) -> None:
    with output.Screen() as screen:
        while True:
            found = watch.poll()
            width, height = screen.size
            columns, room = activity.columns(width, found), max(height - _FRAME_LINES, 1)
            rows = [activity.cells(line, columns, whole=False) for line in found[:room]]
            more = (
                f"{text.count(len(found) - room, 'line')} more: --once shows them all"
                if len(found) > room
                else ""
            )
            head = (
                f"{activity.headline(found)}    q leaves"
                if found
                else "No job is running.    q leaves"
            )
            screen.show(head, columns, rows, more, right=activity.RIGHT, cut=activity.CUT)
            if screen.wait(interval_s):
                return


class ActivityWatch:
    """Polls the jobs that have not ended; a job that has ended is not read again."""

    def __init__(self, app: AppContext, chosen: set[str]) -> None:
        self._app = app
        self._chosen = chosen
        self._refs: dict[str, JobRef] = {}
        self._ended: set[str] = set()
        self._clients: dict[str, tuple[object, ControlClient]] = {}
        self._rates = Rates()
        self._asked: dict[str, asking.ActivityPoll] = {}
        self._unanswered: set[str] = set()

    def __enter__(self) -> ActivityWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for _address, client in self._clients.values():
            client.close()

    def poll_to_end(self, patience_s: float = ANSWER_S) -> list[HostLine]:
        """Return what `poll` does, once the leaders that are asked in the store have answered, or
        have had the time to."""
        give_up_at = time.monotonic() + patience_s
        while True:
            found = self.poll()
            if not self._unanswered or time.monotonic() > give_up_at:
                return found
            time.sleep(_PAUSE_S)

    def poll(self) -> list[HostLine]:
        """Return the hosts of all active jobs, newest job first."""
        self._unanswered.clear()
        found: list[HostLine] = []
        active = self._active()
        standings = self._app.board.look(active)
        for ref in active:
            state = standings[ref.job_id].state
            if state not in _ACTIVE:
                self._ended.add(ref.job_id)
                self._disconnect(ref.job_id)
                continue
            seen = self._snapshot(ref, may_run=state != JobStatus.PENDING)
            attempt = None if seen else self._app.board.gang(ref).current
            found += activity.lines(ref, state, seen, self._rates, self._app.now(), attempt=attempt)
        return found

    def _active(self) -> list[JobRef]:
        ids = set(index.ids(self._app.store)) - self._ended
        wanted = ids & self._chosen if self._chosen else ids
        if not wanted <= self._refs.keys():
            self._refs |= {ref.job_id: ref for ref in self._find(wanted)}
            self._ended |= wanted - self._refs.keys()  # removed since, or damaged
        active = [self._refs[job_id] for job_id in wanted - self._ended]
        return sorted(active, key=lambda ref: (ref.created_at, ref.job_id), reverse=True)

    def _find(self, wanted: set[str]) -> Iterator[JobRef]:
        if not self._chosen:
            yield from self._app.board.refs()
        for job_id in wanted & self._chosen:
            with contextlib.suppress(KineticError):
                yield self._app.find(job_id)

    def _snapshot(self, ref: JobRef, *, may_run: bool) -> dict[str, Any] | None:
        from kinetic._backends.base import Controls

        if ref.place.is_cluster:
            return self._ask_leader(ref) if may_run else None
        try:
            backend = self._app.backend_of(ref)
            address = backend.control(ref) if isinstance(backend, Controls) else None
            return (
                None
                if address is None
                else self._client(ref.job_id, address).snapshot(_SNAPSHOT_TIMEOUT_S)
            )
        except (KineticError, ValueError):  # it is ending, or its supervisor does not answer
            return None

    def _ask_leader(self, ref: JobRef) -> dict[str, Any] | None:
        """What the leader of a job on a cluster has answered."""
        from kinetic._client import asking

        asked = self._asked.setdefault(ref.job_id, asking.ActivityPoll(self._app.store, ref))
        with contextlib.suppress(KineticError):
            if (found := asked.look()) is not None:
                return found
        self._unanswered.add(ref.job_id)
        return None

    def _client(self, job_id: str, address: Any) -> ControlClient:
        entry = self._clients.get(job_id)
        if entry is not None and entry[0] == address:
            return entry[1]
        self._disconnect(job_id)  # another attempt has another address
        from kinetic._rpc.client import ControlClient

        client = ControlClient(address, give_up_s=0.0)
        self._clients[job_id] = (address, client)
        return client

    def _disconnect(self, job_id: str) -> None:
        entry = self._clients.pop(job_id, None)
        if entry is not None:
            entry[1].close()
