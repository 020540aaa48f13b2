"""The context of commands: the configured store, and the backend of each job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import click

from kinetic._client.access import JobAccess, open_access
from kinetic._core import layout, record
from kinetic._core.ref import NEWEST, JobRef
from kinetic._core.values import dataclass
from kinetic._store import index as stored
from kinetic.errors import KineticError, NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._client.batch.handle import BatchHandle
    from kinetic._client.handle import JobHandle
    from kinetic._client.plan_view import PlanView
    from kinetic._client.remote import RemoteCallable
    from kinetic._client.sessions import SessionHandle

PLACES = ("project", "zone", "cluster", "namespace")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def _refuse(subject: object, options: Mapping[str, Any]) -> NoReturn:
    raise UsageError("This context can neither submit nor plan jobs.")


BATCH = "grp-"
"""The first letters of batch ids."""


@dataclass(frozen=True)
class AppContext(JobAccess):
    """The store of jobs and their backends, for all commands.

    Attributes:
        submit: starts a job, given a function and the arguments of `kinetic.run`.
        plan: returns the plan of a job, given the same arguments; submits nothing.
        hold: returns a session, given an accelerator and the options of `kinetic.session`, and True
            if this call started the session.
    """

    submit: Callable[[Callable[[], None], Mapping[str, Any]], JobHandle[Any]] = _refuse
    plan: Callable[[Callable[[], None], Mapping[str, Any]], PlanView] = _refuse
    hold: Callable[[str, Mapping[str, Any]], tuple[SessionHandle, bool]] = _refuse

    def find(self, text: str) -> JobRef:
        """Return the job with this id, or the only one whose id begins so; "-" is the newest."""
        return self.newest() if text == NEWEST else super().find(text)

    def newest(self) -> JobRef:
        """Return the most recently submitted job.

        Raises:
            NotFound: there are no jobs.
        """
        ref = next(iter(self.board.refs()), None)
        if ref is None:
            raise NotFound("There are no jobs yet.")
        return ref

    def list_batch(self, text: str) -> list[JobRef]:
        """Return the jobs of the batch with this id, or of the only batch whose id starts with this
        text; [] if the batch has no job yet.

        Raises:
            NotFound: the batch does not exist.
            UsageError: several ids start with the text.
        """
        refs = self.board.refs()
        group_ids = sorted({ref.group_id for ref in refs if ref.group_id})
        matches = [i for i in group_ids if i == text] or [
            i for i in group_ids if text and i.startswith((text, f"{BATCH}{text}"))
        ]
        if len(matches) > 1:
            raise UsageError(
                f"{len(matches)} batch ids start with {text!r}: {', '.join(matches[:5])}. Type "
                "more of the id."
            )
        if not matches:
            with contextlib.suppress(KineticError):  # The id may be no valid key of the store.
                if self.store.has(layout.GroupKeys(text).batch):
                    return []  # The batch has no job yet.
            raise NotFound(
                f"The store {self.store.uri} has no batch {text!r}. `kinetic jobs list --all "
                "--json` shows the batch of each job."
            )
        return [ref for ref in refs if ref.group_id in matches]

    def open_batch(self, text: str) -> BatchHandle[Any]:
        """Return the handle of the batch that `list_batch` finds. Raises the same errors."""
        from kinetic._client.batch.handle import reopen_batch  # Few commands need it.

        refs = self.list_batch(text)
        return reopen_batch(self.store.uri, (refs[0].group_id if refs else None) or text)

    def batch_name(self, group_id: str) -> str:
        """Return a batch's name and id; only the id if the name is missing or unreadable."""
        with contextlib.suppress(KineticError):
            name = record.parse(self.store.get(layout.GroupKeys(group_id).batch)).get("name")
            return f"{name} ({group_id})" if isinstance(name, str) and name else group_id
        return group_id

    def find_to_end(self, text: str) -> JobRef:
        """Return the job that `find` would return. A damaged reference is accepted, so that the job
        can be stopped and removed."""
        return self.newest() if text == NEWEST else stored.find_to_end(self.store, text)

    def find_session(self, name: str) -> SessionHandle:
        """Return the newest session with this name.

        Raises:
            NotFound: no session has this name.
        """
        from kinetic._store import sessions  # Few commands need it.

        if (ref := sessions.find(self.store, name)) is None:
            raise NotFound(
                f"There is no session {name!r} in {self.store.uri}. `kinetic session list` shows "
                "all."
            )
        return self.session_of(ref)

    def session_of(self, ref: JobRef) -> SessionHandle:
        """Return the session whose slices this job holds.

        Raises:
            NotFound: the job's plan was removed.
        """
        from kinetic._client import sessions  # Few commands need it.

        handle = sessions.open_handle(ref, self.store)
        handle.job = self.handle_of(ref)
        return handle

    def handle(self, text: str) -> JobHandle[Any]:
        """Return the handle of the job with this id, or of the only job whose id begins so."""
        return self.handle_of(self.find(text))


def place_options(command: F) -> F:
    """Add --project, --zone, --cluster and --namespace."""
    for name in reversed(PLACES):
        command = click.option(
            f"--{name}", metavar="NAME", help=f"Use this {name} instead of the configured one."
        )(command)
    return command


def pass_app(command: Callable[Concatenate[AppContext, P], R]) -> Callable[P, R]:
    """Pass the `AppContext` to a command, built from settings and from --project, --zone, --cluster
    and --namespace."""

    @functools.wraps(command)
    def call_command(*args: P.args, **kwargs: P.kwargs) -> R:
        place = {name: cast("str | None", kwargs.pop(name, None)) for name in PLACES}
        app: AppContext = click.get_current_context().obj or make_context(place)
        return command(app, *args, **kwargs)

    return place_options(call_command)


def make_context(flags: Mapping[str, str | None]) -> AppContext:
    """Return the context for the settings and flags."""
    access = open_access(flags)

    def remote(
        function: Callable[[], None], options: Mapping[str, Any]
    ) -> RemoteCallable[[], None]:
        from kinetic._client import decorator

        arguments: dict[str, Any] = {**options, **flags}
        return decorator.run(**arguments)(function)

    def hold(accelerator: str, options: Mapping[str, Any]) -> tuple[SessionHandle, bool]:
        from kinetic._client import sessions

        arguments: dict[str, Any] = {**options, **flags}
        return sessions.hold(accelerator, **arguments)

    return AppContext(
        access.store,
        access.backend_of,
        access.handle_of,
        submit=lambda function, options: remote(function, options).run_async(),
        plan=lambda function, options: remote(function, options).plan(),
        hold=hold,
    )
