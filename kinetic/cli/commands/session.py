"""`kinetic session`: holds slices, so that calls run on them without waiting for machines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from kinetic._client.board import text
from kinetic._core.session import DEFAULT_NAME, IDLE_S, LIFETIME_S
from kinetic.cli import exit_codes, output
from kinetic.cli.commands.run import table_options
from kinetic.cli.context import AppContext, pass_app
from kinetic.cli.lazy import Lazy, LazyGroup, complete_with
from kinetic.cli.options import DURATION, json_option
from kinetic.errors import NotFound, UsageError, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kinetic._client.sessions import SessionHandle, SessionStatus
    from kinetic._core.plan import Plan
    from kinetic._core.ref import JobRef

_COLUMNS = ("NAME", "ACCELERATOR", "STATE", "HELD", "$/H", "COST", "CALLS")
_STOP_S = 60.0
"""Longest wait in seconds for a session to end."""

_PACKAGE = "kinetic.cli.commands.session"
_COMMANDS = {
    "start": Lazy(f"{_PACKAGE}:start", "Start a session and wait for its hosts."),
    "list": Lazy(f"{_PACKAGE}:list_sessions", "List the sessions that hold slices; also `ls`."),
    "status": Lazy(f"{_PACKAGE}:status", "Show a session, its cost and its calls."),
    "stop": Lazy(f"{_PACKAGE}:stop", "End sessions and free their slices."),
}

_GROUP_HELP = """Hold slices, so that calls run on them without waiting for machines.

A session runs one call after the other. It belongs to no process, and costs money until it ends:
after some time without a call, or when you stop it.

\b
Examples:
  kinetic session start tpu-v6e-16 --name dev
  kinetic run --session dev train.py
  kinetic session list
  kinetic session stop dev
"""

_START_HELP = """Start a session and wait until its hosts are there.

If a session with this name holds these slices already, use it. Ctrl-C leaves the session starting.

\b
Examples:
  kinetic session start tpu-v6e-16 --name dev
  kinetic session start tpu-v6e-16 --name big --slices 2 --budget 100
  kinetic session start cpu:4 --name dev --keep
"""

_LIST_HELP = """List the sessions that hold slices, or wait for them.

HELD is the time since their hosts were there. CALLS counts all calls so far.

\b
Examples:
  kinetic session list
  kinetic session list --all --json      with sessions that have ended
"""

_STATUS_HELP = """Show what a session holds, what it costs, and its calls.

\b
Examples:
  kinetic session status dev
  kinetic session status dev --json
"""

_STOP_HELP = """End sessions, free their slices, and wait until they have ended.

A session that runs a call is left alone (exit code 4), unless --force is given.

\b
Examples:
  kinetic session stop dev
  kinetic session stop dev big --force      also ends their calls
"""


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    aliases={"ls": "list"},
    elsewhere={"create": "kinetic session start", "show": "kinetic session status"}
    | dict.fromkeys(("rm", "cancel", "down", "kill"), "kinetic session stop"),
    help=_GROUP_HELP,
    short_help="Hold slices, so that calls run on them without waiting for machines.",
)
def session() -> None:
    """Group of the commands about sessions."""


_name_argument = click.argument("name", shell_complete=complete_with("sessions"))


@click.command("start", help=_START_HELP)
@click.argument("accelerator", shell_complete=complete_with("accelerators"))
@click.option(
    "--name",
    metavar="NAME",
    default=DEFAULT_NAME,
    show_default=True,
    help="Name of the session.",
)
@click.option(
    "--idle-timeout",
    metavar="DURATION",
    type=DURATION,
    default=IDLE_S,
    show_default=text.limit(IDLE_S),
    help="Time without a call after which the session ends.",
)
@click.option(
    "--max-lifetime",
    metavar="DURATION",
    type=DURATION,
    default=LIFETIME_S,
    show_default=text.limit(LIFETIME_S),
    help="Time after which the session ends, even while a call runs.",
)
@table_options("slices", "budget", "start_timeout", "env", "secrets")
@click.option("--spot", is_flag=True, help="Use preemptible machines.")
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the processes between calls, with arrays on devices and the state of modules.",
)
@click.option("--detach", "-d", is_flag=True, help="Do not wait for the hosts.")
@table_options(
    *("backend", "queue", "priority", "reservation", "local_storage", "network_devices"),
    *("service_account", "cpu", "memory", "shm", "privileged"),
)
@pass_app
def start(
    app: AppContext, /, *, accelerator: str, name: str, detach: bool, **options: Any
) -> int | None:
    """Start a session; return the exit code."""
    from kinetic._client.sessions import list_ignored

    handle, is_new = app.hold(accelerator, {"name": name, **options})
    if not is_new:
        ignored = list_ignored(
            handle,
            idle_timeout=options["idle_timeout"],
            max_lifetime=options["max_lifetime"],
            keep=options["keep"] or None,
            budget=options["budget"],
        )
        output.notice(handle.describe_existence(ignored))
    if not detach:
        try:
            handle.wait_until_ready(
                lambda reason: output.notice(f"kinetic: waiting for the session {name}: {reason}")
            )
        except KeyboardInterrupt:
            output.notice(
                f"\nThe session {name} keeps starting ({handle.job.job_id}). To see it: kinetic "
                f"session status {name}\nTo stop it: kinetic session stop {name}"
            )
            return exit_codes.INTERRUPTED
    output.line(
        f"The session {name} {'will hold' if detach else 'holds'} {handle.describe_slices()}; it "
        f"ends {handle.describe_end()}.\nTo use it: kinetic run --session {name} -- CMD\nTo stop "
        f"it: kinetic session stop {name}"
    )
    return exit_codes.OK


@click.command("list", help=_LIST_HELP)
@click.option("--all", "show_all", is_flag=True, help="List also sessions that have ended.")
@json_option
@pass_app
def list_sessions(app: AppContext, /, *, show_all: bool, as_json: bool) -> None:
    """Print one line for each session."""
    jobs = app.board.refs()
    refs = [ref for ref in jobs if ref.session_name]
    standings = app.board.read_standings(refs)
    statuses = []
    for ref in refs:
        standing = standings[ref.job_id]
        if show_all or standing.ended_at is None:
            with contextlib.suppress(NotFound):  # It is being removed.
                statuses.append(app.session_of(ref).describe(standing))
    totals = [len(_calls_of(jobs, status)) for status in statuses]
    if as_json:
        rows = zip(statuses, totals, strict=True)
        return output.json_document([_document(status, total) for status, total in rows])
    if not statuses:
        return output.notice(
            "There are no sessions yet."
            if show_all
            else "No session is running. To start one: kinetic session start ACCELERATOR --name "
            "NAME"
        )
    cells = [_cells(status, total) for status, total in zip(statuses, totals, strict=True)]
    output.table(_COLUMNS, cells, right=("HELD", "$/H", "COST"), cut="ACCELERATOR")
    return None


def _calls_of(jobs: Sequence[JobRef], status: SessionStatus) -> list[JobRef]:
    """Return all calls of a session, newest first."""
    return [ref for ref in jobs if ref.place.session == status.job_id]


def _document(status: SessionStatus, total: int) -> dict[str, Any]:
    return status._asdict() | {"total_calls": total}


def _cells(status: SessionStatus, total: int) -> tuple[str, ...]:
    slices = status.accelerator
    return (
        status.name,
        slices if status.slices == 1 else f"{status.slices} x {slices}",
        status.state,
        text.duration(status.held_s) if status.held_s else "-",
        _in_usd(status.usd_per_hour),
        _in_usd(status.cost_usd),
        f"{total}{_describe_calls(status.calls)}",
    )


def _in_usd(amount: float | None) -> str:
    from kinetic._core.accelerators.prices import in_usd

    return "-" if amount is None else in_usd(amount)


def _describe_calls(calls: Sequence[str]) -> str:
    """Return how many calls wait behind the running one, or that none waits; "" if none runs."""
    waiting = len(calls) - 1
    return f", {waiting} waiting" if waiting > 0 else ", 1 running" if calls else ""


@click.command("status", help=_STATUS_HELP)
@json_option
@_name_argument
@pass_app
def status(app: AppContext, /, *, name: str, as_json: bool) -> None:
    """Print the state of a session."""
    handle = app.find_session(name)
    state, plan = handle.status(), app.board.read_plan(handle.job.ref)
    calls = _calls_of(app.board.refs(), state)
    idle_s = _idle_s(app, state, calls)
    if as_json:
        terms, limits = plan.holds, {}
        if terms is not None:
            limits = {n: getattr(terms, n) for n in ("idle_timeout_s", "max_lifetime_s")}
        document = _document(state, len(calls)) | {"idle_s": idle_s} | limits
        return output.json_document(document | {"keep": bool(plan.options.keep)})
    has_ended = state.state not in ("PENDING", "RUNNING", "UNKNOWN")
    names = {ref.job_id: f"{ref.job_id} ({ref.display_name})" for ref in calls}
    running, *waiting = [names.get(job_id, job_id) for job_id in state.calls] or [""]
    more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    cost, usd = plan.cost, state.cost_usd or 0.0
    facts = [
        ("Session", f"{name} ({state.job_id})"),
        ("State", state.state),
        ("Reason", state.reason),
        ("Holds", handle.describe_slices()),
        ("Held for", text.duration(state.held_s) if state.held_s else ""),
        ("Cost", text.describe_cost(cost, usd, is_over=has_ended) if cost else ""),
        ("Running", running),
        ("Waiting", f"{waiting[0]}{more}" if waiting else ""),
        ("Idle for", "" if idle_s is None else text.duration(idle_s)),
        ("Calls", str(len(calls))),
        ("Keeps", "processes between calls" if plan.options.keep else ""),
        ("Ends", "" if has_ended else _describe_end(handle, plan, state, idle_s)),
    ]
    output.line(text.align_pairs([(name, value) for name, value in facts if value]))
    return None


def _idle_s(app: AppContext, status: SessionStatus, calls: Sequence[JobRef]) -> float | None:
    """Return the seconds since the last call ended, or since the hosts were up if there was no
    call. Return None while a call runs, before the hosts are up, and after the session's end."""
    if status.calls or status.state != "RUNNING" or not status.held_s:
        return None
    ended_at = app.board.read_standing(calls[0]).ended_at if calls else None
    since_end = status.held_s if ended_at is None else app.now() - ended_at
    return max(0.0, min(status.held_s, since_end))


def _describe_end(
    handle: SessionHandle, plan: Plan, status: SessionStatus, idle_s: float | None
) -> str:
    """Return when the session ends by itself; before its hosts are up, the limits that end it."""
    if plan.holds is None or not status.held_s:
        return handle.describe_end()
    idle_since = None if idle_s is None else -idle_s
    ends_in_s = plan.holds.ends_at(-status.held_s, idle_since, plan.limits.budget_s)
    rest = "at the latest" if idle_s is None else "unless a call comes"
    return f"in {text.duration(ends_in_s)}, {rest}"


@click.command("stop", help=_STOP_HELP)
@click.option("--force", "-f", is_flag=True, help="Also end the calls that run or wait.")
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_with("sessions")
)
@pass_app
def stop(app: AppContext, /, *, names: tuple[str, ...], force: bool) -> int:
    """End sessions; return the exit code."""
    # Find all sessions first, so that a wrong name does not leave the work half done.
    handles = [app.find_session(name) for name in dict.fromkeys(names)]
    code, stopping = exit_codes.OK, []
    for handle in handles:
        if app.board.verdict(handle.job.ref) is not None:
            output.notice(f"The session {handle.name} has already ended.")
            continue
        try:
            handle.stop(force=force)
        except UsageError as error:
            output.error(str(error))
            code = exit_codes.REFUSED
        else:
            stopping.append(handle)
    for handle in stopping:
        output.line(_await_end(handle))
    return code


def _await_end(handle: SessionHandle) -> str:
    """Wait until a session has ended; return a line about that for the user."""
    try:
        handle.job.wait(_STOP_S)
    except WaitTimeout:
        return (
            f"The session {handle.name} is being stopped. To see it: kinetic session status "
            f"{handle.name}"
        )
    status = handle.status()
    held = f"held for {text.duration(status.held_s)}"
    cost = f", and cost about {_in_usd(status.cost_usd)}" if status.cost_usd else ""
    return f"The session {handle.name} has ended; it was {held}{cost}."
