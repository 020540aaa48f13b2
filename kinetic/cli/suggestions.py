"""Values for shell completion: ids of jobs, names of accelerators, backends and profiles.

A failure means no suggestions: an error must not be printed into the line that the user is typing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus

if TYPE_CHECKING:
    from kinetic.cli.context import AppContext

Words = list[Any]
_MAX_IDS = 50
_BATCH_LETTER = "g"
"""First letter of batch ids; no job id contains it."""


def _quiet(
    suggest: Callable[[click.Context, str], Iterable[CompletionItem]],
) -> Callable[[click.Context, click.Parameter, str], Words]:
    @functools.wraps(suggest)
    def quiet(ctx: click.Context, _param: click.Parameter, incomplete: str) -> Words:
        try:
            return list(suggest(ctx, incomplete))
        except Exception:  # noqa: BLE001 - see the module's docstring
            return []

    return quiet


@_quiet
def jobs(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest ids of jobs, newest first. If the typed word does not start with "job-", leave that
    out of the ids. If it starts like an id of a batch, suggest those."""
    return _ids(ctx, incomplete)


@_quiet
def running_jobs(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest ids of jobs that have not ended."""
    return _ids(ctx, incomplete, (JobStatus.PENDING, JobStatus.RUNNING))


def _open_app(ctx: click.Context) -> AppContext:
    """Return the context for the options that were typed: --profile, --project and the like."""
    from kinetic._config import settings
    from kinetic.cli.context import PLACES, make_context

    settings.choose_profile(ctx.find_root().params.get("profile"))
    return make_context({name: ctx.params.get(name) for name in PLACES})


def _ids(
    ctx: click.Context, incomplete: str, states: Collection[str] = ()
) -> Iterable[CompletionItem]:
    from kinetic._client.board import text

    app, prefix = _open_app(ctx), incomplete.lower()

    def choose_word(ref: JobRef) -> str:
        return ref.job_id if ref.job_id.startswith(prefix) else ref.job_id.removeprefix("job-")

    refs = app.board.refs()
    if prefix.startswith(_BATCH_LETTER):
        yield from _batches(refs, prefix)
        return
    matching = [ref for ref in refs if choose_word(ref).startswith(prefix)]
    for ref, standing in app.board.select(matching, _MAX_IDS, states)[0]:
        age = text.age(app.now() - ref.created_at)
        about = f"{standing.state.lower()}, {age} old: {ref.display_name} on {ref.accelerator}"
        yield CompletionItem(choose_word(ref), help=about)


def _batches(refs: Iterable[JobRef], prefix: str) -> Iterable[CompletionItem]:
    """Suggest ids of batches that have jobs, newest first."""
    from kinetic._client.board.text import count

    jobs = Counter(ref.group_id for ref in refs if ref.group_id)
    for group_id, number in jobs.items():
        if group_id.startswith(prefix):
            yield CompletionItem(group_id, help=f"a batch of {count(number, 'job')}")


@_quiet
def batches(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest ids of batches."""
    return _batches(_open_app(ctx).board.refs(), incomplete.lower())


@_quiet
def attempts(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest the numbers of the attempts of the job that was typed, newest first."""
    from kinetic._store import attempts as stored

    app = _open_app(ctx)
    # click parses no arguments while the last option lacks its value.
    named = ctx.params.get("job_id") or ctx.args[0]
    newest = stored.find_newest(app.store, app.find(named).job_id)
    numbers = map(str, range(newest, 0, -1))
    return [CompletionItem(number) for number in numbers if number.startswith(incomplete)]


@_quiet
def accelerators(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest accelerators. If a colon was typed, suggest names with ":spot"."""
    from kinetic._client.board.text import count
    from kinetic._core.accelerators.catalog import catalog_rows

    prefix = incomplete.lower()
    suffix = ":spot" if ":" in prefix else ""
    named = [
        (f"{row.name}{suffix}", row)
        for row in catalog_rows()
        if not (suffix and row.name.startswith("cpu"))
    ]
    return [
        CompletionItem(name, help=f"{count(row.hosts, 'host')}, {count(row.chips, 'chip')}")
        for name, row in named
        if name.startswith(prefix)
    ]


@_quiet
def backends(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest backends."""
    from kinetic._core.place import BACKENDS

    return [CompletionItem(name) for name in BACKENDS if name.startswith(incomplete)]


@_quiet
def controllers(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest values of --controller."""
    return [CompletionItem(name) for name in ("multi", "single") if name.startswith(incomplete)]


@_quiet
def sessions(ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest names of sessions that have not ended."""
    app = _open_app(ctx)
    held = [ref for ref in app.board.refs() if ref.session_name]
    refs = [ref for ref in held if ref.session_name.startswith(incomplete)]
    for ref, standing in app.board.select(refs, _MAX_IDS)[0]:
        if standing.ended_at is None:
            yield CompletionItem(
                ref.session_name, help=f"{standing.state.lower()}, on {ref.accelerator}"
            )


@_quiet
def profiles(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest profiles."""
    from kinetic._config import profiles as stored
    from kinetic._config import settings

    by_name = stored.read(settings.profiles_file()).by_name
    named = sorted(
        (name, values) for name, values in by_name.items() if name.startswith(incomplete)
    )
    return [CompletionItem(name, help=", ".join(dict(values).values())) for name, values in named]


@_quiet
def folders(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Let the shell suggest folders."""
    return [CompletionItem(incomplete, type="dir")]


@_quiet
def signals(_ctx: click.Context, incomplete: str) -> Iterable[CompletionItem]:
    """Suggest signals that end or stop a process."""
    names = ("KILL", "TERM", "INT", "ABRT", "SEGV", "STOP", "CONT")
    return [CompletionItem(name) for name in names if name.startswith(incomplete.upper())]
