"""The reader of jobs' states. It reads the store first, then asks each backend once for all jobs
without a verdict, so that a thousand jobs take few calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._core.state import (
    SUBMITTING,
    UNKNOWN,
    JobStanding,
    JobStatus,
    standing_of_verdict,
)
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.many import at_once
from kinetic.errors import CorruptRecord, KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._backends.base import Backend, Status
    from kinetic._core.events import GangEvent
    from kinetic._core.gang.picture import GangPicture
    from kinetic._core.outcome import Outcome
    from kinetic._core.place import Place
    from kinetic._core.plan import Cost, Plan

S = TypeVar("S")
_PAGE_SIZE = 100
_PLANS = 64
"""Size of the cache of plans."""
# Modules for whole verdicts are imported late: a list of a thousand ended jobs needs only an
# excerpt of each verdict.


class JobBoard:
    """Reads the states of the jobs of one store.

    Args:
        store: holds the jobs' references and records.
        backend_of: returns the backend that runs a job.
        now: returns the time, in seconds since the epoch.
    """

    def __init__(
        self, store: Store, backend_of: Callable[[JobRef], Backend], now: Callable[[], float]
    ) -> None:
        self.store = store
        self._backend_of = backend_of
        self._now = now
        self._listed: Mapping[str, Mapping[str, object]] = {}
        self._read_plan = functools.lru_cache(_PLANS)(self._read_plan_of)

    def refs(self) -> list[JobRef]:
        """Return the references of all jobs, newest first."""
        refs, self._listed = index.list_jobs(self.store)
        return refs

    def read_standings(
        self, refs: Sequence[JobRef], *, settles: bool = False
    ) -> dict[str, JobStanding]:
        """Return the states of jobs, by id. An error of one backend affects only its own jobs.

        If a job's leader died, this call decides the verdict. With `settles`, each standing has its
        whole verdict, and the backend's resources of the jobs decided here are freed. A job that
        was never started counts as failed, but gets a verdict only with `settles`, since its
        submission may still be going on.
        """
        standings = {} if settles else dict(self._find_listed(refs))
        unlisted = [ref for ref in refs if ref.job_id not in standings]
        read = at_once(
            lambda ref: _try(lambda: self._read(ref, settles=settles)),
            unlisted,
            self.store.calls_at_once,
        )
        standings |= {ref.job_id: each for ref, each in zip(unlisted, read, strict=True) if each}
        groups: dict[tuple[Place, str], list[JobRef]] = {}
        for ref in refs:
            if ref.job_id not in standings:
                groups.setdefault((ref.place, ref.store_uri), []).append(ref)
        for group in groups.values():
            try:
                statuses = self._backend_of(group[0]).status(group)
            except KineticError as error:
                standings |= dict.fromkeys((ref.job_id for ref in group), _unknown(error))
                continue
            for ref in group:
                conclude = partial(self._conclude, ref, statuses[ref.job_id], settles=settles)
                standings[ref.job_id] = _try(conclude)
        return standings

    def read_standing(self, ref: JobRef) -> JobStanding:
        """Return the state of one job."""
        return self.read_standings([ref])[ref.job_id]

    def select(
        self, refs: Sequence[JobRef], limit: int | None, states: Collection[str] = ()
    ) -> tuple[list[tuple[JobRef, JobStanding]], bool]:
        """Return the first `limit` jobs whose state is in `states` (all jobs if `states` is empty),
        and True if there may be more. Reads page by page, and stops as soon as it can."""
        page = len(refs) or 1 if limit is None else max(limit, _PAGE_SIZE) if states else limit
        selected: list[tuple[JobRef, JobStanding]] = []
        for begin in range(0, len(refs), page):
            standings = self.read_standings(refs[begin : begin + page])
            for number, ref in enumerate(refs[begin : begin + page], begin + 1):
                if not states or standings[ref.job_id].state in states:
                    selected.append((ref, standings[ref.job_id]))
                if limit is not None and len(selected) == limit:
                    return selected, number < len(refs)
        return selected, False

    def settle(self, refs: Sequence[JobRef]) -> dict[str, Outcome | KineticError | None]:
        """Return the verdicts of jobs, by id: None for a running job, an error if the verdict
        cannot be determined or the records were removed."""
        standings = self.read_standings(refs, settles=True)
        return {job_id: each.outcome or each.error for job_id, each in standings.items()}

    def outcome(self, ref: JobRef) -> Outcome | None:
        """Return the verdict on one job; None while the job runs. If a host was lost, the verdict
        has the backend's explanation.

        Raises:
            NotFound: the job's records were removed.
        """
        standing = self.settle([ref])[ref.job_id]
        if isinstance(standing, KineticError):
            raise standing
        return None if standing is None else self.explain(ref, standing)

    def verdict(self, ref: JobRef) -> Outcome | None:
        """Return the verdict in the store, without asking the backend; None if there is none."""
        from kinetic._client.board import verdicts

        return verdicts.read_verdict(self.store, ref, self._now())

    def explain(self, ref: JobRef, outcome: Outcome) -> Outcome:
        """Return the verdict, completed with the backend's explanation of the first lost host."""
        from kinetic._client.board import verdicts

        return verdicts.explain(self._backend_of(ref), self.store, ref, outcome, self._now())

    def events(self, ref: JobRef) -> list[GangEvent]:
        """Return a gang's events, oldest first, without damaged and newer versions' ones."""
        from kinetic._core import events

        try:
            return events.parse(self.store.get(layout.JobKeys(ref.job_id).events))
        except NotFound:
            return []

    def gang(self, ref: JobRef, outcome: Outcome | None = None) -> GangPicture:
        """Return what is known of a job's gang: its attempts and their hosts, from the job's events
        and verdict. Events that cannot be read are left out."""
        from kinetic._core.gang.picture import picture_of

        history: list[GangEvent] = []
        with contextlib.suppress(KineticError):
            history = self.events(ref)
        return picture_of(history, ref.hosts, outcome)

    def plan(self, ref: JobRef) -> Plan | None:
        """Return a job's plan; None if it cannot be read."""
        with contextlib.suppress(KineticError):
            return self.read_plan(ref)
        return None

    def read_plan(self, ref: JobRef) -> Plan:
        """Return a job's plan. Plans never change, so the plans read last are cached.

        Raises:
            KineticError: the plan cannot be read.
        """
        return self._read_plan(ref.job_id)

    def cost(self, ref: JobRef, gang: GangPicture) -> tuple[Cost, float] | None:
        """Return the cost of a job's slices, and the US dollars spent so far; None if the price is
        unknown. Each attempt counts from the start of its function to its end."""
        plan = self.plan(ref)
        if plan is None or plan.cost is None:
            return None
        paid_s = gang.paid_s(plan.options.most_slices, self._now())
        return plan.cost, plan.cost.for_seconds(paid_s)

    def add_starts(
        self, jobs: Sequence[tuple[JobRef, JobStanding]]
    ) -> list[tuple[JobRef, JobStanding]]:
        """Return the jobs with `started_at` set to the function's start in the current attempt."""
        running = [ref for ref, standing in jobs if standing.ended_at is None]
        gangs = at_once(self.gang, running, self.store.calls_at_once)
        starts = (gang.current.ready_at for gang in gangs)
        return [
            (
                ref,
                standing
                if standing.ended_at is not None
                else standing._replace(started_at=next(starts)),
            )
            for ref, standing in jobs
        ]

    # -- inside ------------------------------------------------------------------------------------

    def _read_plan_of(self, job_id: str) -> Plan:
        from kinetic._core.plan import Plan

        return Plan.read(self.store.get(layout.JobKeys(job_id).plan))

    def _find_listed(self, refs: Sequence[JobRef]) -> Iterator[tuple[str, JobStanding]]:
        for ref in refs:
            with contextlib.suppress(CorruptRecord, KeyError):
                standing = standing_of_verdict(self._listed[ref.job_id], ref.created_at)
                if standing.state != JobStatus.FAILED:  # Excerpts lack a failure's reason.
                    yield ref.job_id, standing

    def _read(self, ref: JobRef, *, settles: bool) -> JobStanding | None:
        if not settles:
            try:
                data = self.store.get(layout.JobKeys(ref.job_id).outcome)
                return standing_of_verdict(record.parse(data), ref.created_at)
            except NotFound:
                return None
            except CorruptRecord:
                pass  # `verdict` rebuilds the damaged outcome.
        outcome = self.verdict(ref)
        return None if outcome is None else _standing_of(outcome, ref)

    def _conclude(self, ref: JobRef, status: Status, *, settles: bool) -> JobStanding:
        """Return the state of a job without a verdict, from its backend's status."""
        if not status.phase.ended:
            return JobStanding(status.phase, status.reason)
        from kinetic._backends import stored
        from kinetic._client.board import verdicts

        store, now, phase = self.store, self._now(), status.phase
        if is_unknown := phase is JobStatus.NOT_FOUND:
            phase = stored.status_of_unknown(store, ref, now)
        if phase is JobStatus.PENDING:
            return JobStanding(phase, status.reason or SUBMITTING)
        if phase is not JobStatus.NOT_FOUND:
            outcome = verdicts.read_verdict(store, ref, now)
            if outcome is None and is_unknown and not settles:
                return JobStanding(phase, status.reason)
            if outcome is None:
                outcome = verdicts.judge_orphan(store, ref, self.plan, status, now)
                if outcome is not None and settles:
                    outcome = self.explain(ref, outcome)
                    verdicts.release(self._backend_of(ref), ref)
            if outcome is not None:
                return _standing_of(outcome, ref)
        reason = f"The records of {ref.job_id} were removed, so its result cannot be read."
        return JobStanding(JobStatus.NOT_FOUND, status.reason, error=NotFound(reason))


def _standing_of(outcome: Outcome, ref: JobRef) -> JobStanding:
    return standing_of_verdict(outcome.to_json(), ref.created_at)._replace(outcome=outcome)


def _try(ask: Callable[[], S]) -> S | JobStanding:
    try:
        return ask()
    except KineticError as error:
        return _unknown(error)


def _unknown(error: KineticError) -> JobStanding:
    return JobStanding(UNKNOWN, str(error), error=error)
