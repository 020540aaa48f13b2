"""The context of commands: the configured store, and the backend of each job.

In: settings, ids as users write them. Out: references, states, handles.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import click

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._core.values import dataclass
from kinetic._store import index as stored
from kinetic._store.many import get_many
from kinetic.cli.options import NEWEST
from kinetic.errors import CorruptRecord, KineticError, NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._backends.base import Backend, LogRequest, Status
    from kinetic._client.handle import JobHandle
    from kinetic._client.plan_view import PlanView
    from kinetic._client.remote import RemoteCallable
    from kinetic._core.gang.picture import GangPicture
    from kinetic._core.log_format import LogChunk
    from kinetic._core.outcome import Outcome
    from kinetic._core.place import Place
    from kinetic._store.base import Store

UNKNOWN = "UNKNOWN"
SUBMITTING = "it is being submitted"
_PLACES = ("project", "zone", "cluster", "namespace")

P = ParamSpec("P")
R = TypeVar("R")


class Ending(NamedTuple):
    """How a job ended.

    Attributes:
        state: the final state.
        at: when it ended, in seconds since the epoch.
        started_at: when its function started; None when it never did.
        reason: why it failed, in one line; "" where it did not, or where it is not known.
    """

    state: JobStatus
    at: float
    started_at: float | None = None
    reason: str = ""


class JobStanding(NamedTuple):
    """Where a job stands.

    Attributes:
        state: a `JobStatus`; UNKNOWN when its backend cannot be asked.
        reason: the backend's reason for the state, or why it cannot be asked, or "".
        ending: how it ended, if the store has the verdict.
    """

    state: str
    reason: str = ""
    ending: Ending | None = None


def _refuse_plan(function: Callable[[], None], options: Mapping[str, Any]) -> PlanView:
    raise UsageError("Jobs cannot be planned here.")


@dataclass(frozen=True)
class AppContext:
    """What every command needs: the store of jobs, and access to their backends.

    Attributes:
        store: holds references and records.
        backend_of: the backend that took a job.
        handle_of: the `JobHandle` of a job, the same that Python code uses.
        submit: takes a function and the arguments of `kinetic.run`, and starts the job.
        plan: takes the same, and returns what would be submitted.
        now: seconds since the epoch.
    """

    store: Store
    backend_of: Callable[[JobRef], Backend]
    handle_of: Callable[[JobRef], JobHandle[Any]]
    submit: Callable[[Callable[[], None], Mapping[str, Any]], JobHandle[Any]]
    now: Callable[[], float] = time.time
    plan: Callable[[Callable[[], None], Mapping[str, Any]], PlanView] = _refuse_plan
    _endings: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def refs(self) -> list[JobRef]:
        """Return all jobs, newest first."""
        listed = stored.list_jobs(self.store)
        self._endings.update(listed.endings)
        return listed.refs

    def ids(self) -> list[str]:
        """Return the ids of all jobs."""
        return stored.ids(self.store)

    def find(self, text: str) -> JobRef:
        """Return the job with this id, or the only one whose id starts with it; "-" is
        the newest job."""
        return self.newest() if text == NEWEST else stored.find(self.store, text)

    def newest(self) -> JobRef:
        """Return the most recently submitted job.

        Raises:
            NotFound: there are no jobs.
        """
        ref = next(iter(self.refs()), None)
        if ref is None:
            raise NotFound("There are no jobs yet.")
        return ref

    def has_batch(self, group_id: str) -> bool:
        """Whether there is a batch with this id; it may have no job yet."""
        try:
            return self.store.has(layout.batch(group_id))
        except KineticError:  # not a valid key in any store
            return False

    def batch_name(self, group_id: str) -> str:
        """Return a batch's name and id; only the id if the name is missing or unreadable."""
        with contextlib.suppress(KineticError):
            name = record.parse(self.store.get(layout.batch(group_id))).get("name")
            return f"{name} ({group_id})" if isinstance(name, str) and name else group_id
        return group_id

    def find_to_end(self, text: str) -> JobRef:
        """Like `find`, but also return a job whose reference is damaged: enough to stop and remove
        it."""
        return self.newest() if text == NEWEST else stored.find_to_end(self.store, text)

    def handle(self, text: str) -> JobHandle[Any]:
        """Return the handle of the job with this id, or of the only one whose id starts with it."""
        return self.handle_of(self.find(text))

    def output_of(
        self, ref: JobRef, request: LogRequest, tell: Callable[[str], object] | None = None
    ) -> Iterator[LogChunk | None]:
        """Yield the output so far, or with `follow` until the job has ended; None when there is
        nothing new. `tell` gets why a job that is followed does not run yet."""
        return self.handle_of(ref).chunks(request, tell)

    def read_ending(self, ref: JobRef) -> Ending | None:
        """Return how the job ended, or None while the store has no verdict."""
        if ref.job_id in self._endings:
            return _ending_of(self._endings[ref.job_id], ref)
        with contextlib.suppress(NotFound):
            return _parse_ending(self.store.get(layout.outcome(ref.job_id)), ref)
        return None

    def started_at(self, ref: JobRef) -> float | None:
        """Return when the function of a running job started in this attempt, or None."""
        return self.gang(ref).current.ready_at

    def gang(self, ref: JobRef, outcome: Outcome | None = None) -> GangPicture:
        """Return the picture of the job's gang: all its attempts and their hosts."""
        # imported late: a list of ended jobs does not need it
        from kinetic._core import events
        from kinetic._core.gang.picture import picture_of

        history = list[events.GangEvent]()
        with contextlib.suppress(KineticError):
            history = events.parse(self.store.get(layout.events(ref.job_id)))
        return picture_of(history, ref.hosts, outcome)

    def read_standing(self, ref: JobRef) -> JobStanding:
        """Return where the job stands."""
        return self.standings([ref])[ref.job_id]

    def standings(self, refs: Sequence[JobRef]) -> dict[str, JobStanding]:
        """Return where the jobs stand, by id. The store and each backend are asked only once."""
        found: dict[str, JobStanding] = {}
        for ref in refs:
            listed = self._endings.get(ref.job_id, {})
            ended = _ending_of(listed, ref)
            # What is listed does not say why.
            if ended is not None and ended.state is not JobStatus.FAILED:
                found[ref.job_id] = JobStanding(ended.state, ending=ended)
        keys = {layout.outcome(ref.job_id): ref for ref in refs if ref.job_id not in found}
        for key, data in get_many(self.store, keys).items():
            ending = _parse_ending(data, keys[key])
            if ending is not None:
                found[keys[key].job_id] = JobStanding(ending.state, ending.reason, ending)
        by_backend: dict[tuple[Place, str], list[JobRef]] = {}
        for ref in refs:
            if ref.job_id not in found:
                by_backend.setdefault((ref.place, ref.store_uri), []).append(ref)
        for group in by_backend.values():
            found |= self._ask_backend(group)
        return found

    def _ask_backend(self, refs: Sequence[JobRef]) -> dict[str, JobStanding]:
        try:
            statuses = self.backend_of(refs[0]).status(refs)
        except KineticError as error:
            # A backend that this version or machine cannot ask must not hide the other jobs.
            return {ref.job_id: JobStanding(UNKNOWN, str(error)) for ref in refs}
        return {ref.job_id: self._standing_from(ref, statuses[ref.job_id]) for ref in refs}

    def _standing_from(self, ref: JobRef, status: Status) -> JobStanding:
        if not status.phase.ended:
            return JobStanding(status.phase, status.reason)
        from kinetic._client import following  # imported late: not needed for running jobs

        try:
            state, _ = following.read_standing(self.store, ref, status, self.now())
        except KineticError as error:
            return JobStanding(UNKNOWN, str(error))
        return JobStanding(
            state, status.reason or (SUBMITTING if state is JobStatus.PENDING else "")
        )


def _parse_ending(data: bytes, ref: JobRef) -> Ending | None:
    """How the job ended by its stored verdict; None for a damaged one: the backend is asked."""
    try:
        return _ending_of(record.parse(data), ref)
    except CorruptRecord:
        return None


def _ending_of(verdict: Mapping[str, Any], ref: JobRef) -> Ending | None:
    try:
        started = [float(report.get("started_at") or 0.0) for report in verdict.get("reports", ())]
        state, lines = status_of_verdict(verdict["verdict"]), verdict.get("reason", "").splitlines()
        return Ending(
            state,
            float(verdict.get("ended_at") or ref.created_at),
            min(filter(None, started), default=None),
            lines[0] if lines and state is JobStatus.FAILED else "",
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def pass_app(command: Callable[Concatenate[AppContext, P], R]) -> Callable[P, R]:
    """Pass the `AppContext` to a command, made from settings and from --project, --zone, --cluster
    and --namespace."""

    @functools.wraps(command)
    def call_command(*args: P.args, **kwargs: P.kwargs) -> R:
        place = {name: cast("str | None", kwargs.pop(name, None)) for name in _PLACES}
        app: AppContext | None = click.get_current_context().obj
        return command(make_context(place) if app is None else app, *args, **kwargs)

    for name in reversed(_PLACES):
        call_command = click.option(
            f"--{name}", metavar="NAME", help=f"Use this {name} instead of the configured one."
        )(call_command)
    return call_command


def make_context(flags: Mapping[str, str | None]) -> AppContext:
    """Return the context that settings and flags describe."""
    from kinetic._config import settings as configuration
    from kinetic._store.open import open_store

    settings = configuration.load(flags=flags)
    store = open_store(settings.store)

    backends: dict[tuple[Place, str], Backend] = {}

    def backend_of(ref: JobRef) -> Backend:
        from kinetic._backends import registry

        key = (ref.place, ref.store_uri)
        if key not in backends:
            backends[key] = registry.backend_of(ref)
        return backends[key]

    def handle_of(ref: JobRef) -> JobHandle[Any]:
        from kinetic._client.handle import JobHandle

        return JobHandle(ref, backend_of(ref), store)

    def remote(
        function: Callable[[], None], options: Mapping[str, Any]
    ) -> RemoteCallable[[], None]:
        from kinetic._client import decorator

        arguments: dict[str, Any] = {**options, **flags}
        return decorator.run(**arguments)(function)

    return AppContext(
        store,
        backend_of,
        handle_of,
        submit=lambda function, options: remote(function, options).run_async(),
        plan=lambda function, options: remote(function, options).plan(),
    )
