"""What commands know of jobs: the configured store, and the backend of each job.

In: settings, ids as people write them. Out: references, states, handles. Called by the commands; tests hand in their own.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import click

from kinetic.cli import output
from kinetic.errors import CorruptRecord, NotFound, UsageError
from kinetic.job import paths
from kinetic.job.ref import JobRef

if TYPE_CHECKING:
    from kinetic.backends.base import Backend
    from kinetic.handle import JobHandle
    from kinetic.job.outcome import Outcome
    from kinetic.storage.base import Store

_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_SHOWN = 5
_PLACES = ("project", "zone", "cluster", "namespace")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Desk:
    """A store of jobs and the way to what runs them.

    Attributes:
        store: where references and records are.
        backend_of: the backend that took a job.
        handle_of: the view of a job that Python code has too.
        submit: takes a function and arguments of `kinetic.run`, and starts the job.
        now: seconds since the epoch.
    """

    store: Store
    backend_of: Callable[[JobRef], Backend]
    handle_of: Callable[[JobRef], JobHandle[Any]]
    submit: Callable[[Callable[[], None], Mapping[str, Any]], JobHandle[Any]]
    now: Callable[[], float] = time.time

    def refs(self) -> list[JobRef]:
        """Return all jobs, newest first. A damaged reference is told and passed over: it must not hide the others."""
        return sorted(self._readable(), key=lambda ref: (ref.created_at, ref.job_id), reverse=True)

    def find(self, text: str) -> JobRef:
        """Return the job with this id, or the only one whose id starts so.

        Raises:
            NotFound: no id starts so; `suggestions` has the nearest.
            UsageError: several do.
        """
        known = [key.rsplit("/", 1)[-1].removesuffix(".json") for key in self.store.list(paths.REFS)]
        return self._read(paths.ref(_pick(text.strip().lower(), known)))

    def outcome(self, ref: JobRef) -> Outcome | None:
        """Return the verdict that rests in the store, or None while there is none."""
        from kinetic.job.outcome import Outcome

        try:
            return Outcome.from_json(_object(self.store.get(paths.outcome(ref.job_id)), "outcome"))
        except NotFound:
            return None

    def state(self, ref: JobRef) -> str:
        """Return PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED or NOT_FOUND."""
        try:
            outcome = self.outcome(ref)
        except CorruptRecord:
            outcome = None  # the backend still knows whether it ended; `status` tells about the damage
        return str(self.backend_of(ref).phase(ref)) if outcome is None else outcome.verdict.upper()

    def _readable(self) -> Iterator[JobRef]:
        for key in self.store.list(paths.REFS):
            try:
                yield self._read(key)
            except NotFound:
                continue  # removed since it was listed
            except CorruptRecord as problem:
                output.notice(f"warning: {key} is passed over: {problem}")

    def _read(self, key: str) -> JobRef:
        return JobRef.from_json(_object(self.store.get(key), "reference"))


def with_desk(command: Callable[Concatenate[Desk, P], R]) -> Callable[P, R]:
    """Open the desk for a command, from settings and from --project, --zone, --cluster and --namespace."""

    @functools.wraps(command)
    def opened(*args: P.args, **kwargs: P.kwargs) -> R:
        place = {name: cast("str | None", kwargs.pop(name, None)) for name in _PLACES}
        return command(_open(click.get_current_context().obj, place), *args, **kwargs)

    for name in reversed(_PLACES):
        opened = click.option(f"--{name}", metavar="NAME", help=f"Look in this {name} instead of the configured one.")(opened)
    return opened


def _open(given: Desk | None, flags: Mapping[str, str | None]) -> Desk:
    """Return `given`, or the desk that settings and flags describe."""
    if given is not None:
        return given
    from kinetic.config import settings as configuration
    from kinetic.storage.open import open_store

    settings = configuration.load(flags=flags)
    store = open_store(settings.home)

    def backend_of(ref: JobRef) -> Backend:
        from kinetic.backends import registry

        return registry.backend_of(ref, settings)

    def handle_of(ref: JobRef) -> JobHandle[Any]:
        from kinetic.handle import JobHandle

        return JobHandle(ref, backend_of(ref), store)

    def submit(function: Callable[[], None], options: Mapping[str, Any]) -> JobHandle[Any]:
        from kinetic import remote

        return remote.run(**options, **flags)(function).run_async()

    return Desk(store, backend_of, handle_of, submit)


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(data))  # what is no object is refused by its from_json
    except ValueError as error:
        raise CorruptRecord(f"The {what} of the job is damaged: {error}.") from error


def _pick(text: str, known: list[str]) -> str:
    if text in known:
        return text
    if not text or not set(text) <= _ID_CHARACTERS:
        raise UsageError(
            f"{text!r} is no job id: ids look like job-1a2b3c4d, and their beginning is enough. See `kinetic jobs list --all`."
        )
    found = [i for i in known if i.startswith(text)] or [i for i in known if i.startswith(f"job-{text}")]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{text!r} is the beginning of {len(found)} job ids: {', '.join(found[:_SHOWN])}{more}. Write one more letter."
        )
    raise NotFound(f"There is no job {text!r}. `kinetic jobs list --all` shows all jobs.", suggestions=_near(text, known))


def _near(text: str, known: list[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(text, known, n=3, cutoff=0.75)
