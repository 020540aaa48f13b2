"""Snapshots of the objects of jobs in a cluster, and of the objects that explain their state.

Callers poll the cluster instead of watching it: the store already reports output and ends of jobs.
A process has one `SnapshotReader` per connection. One list of workloads and one of pods serve all
callers for some seconds, so any number of followed jobs costs the same. Events, nodes and queues
are listed on first use only, and each request delays the next list by `REQUEST_S`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from kinetic._backends.kubernetes import names
from kinetic._backends.kubernetes.api import Api, Document, Selector
from kinetic._backends.kubernetes.diagnosis import Observed
from kinetic._backends.kubernetes.errors import NotInstalled
from kinetic._backends.kubernetes.observed import (
    HOSTS,
    PATHWAYS_HEAD,
    QUEUE_LABEL,
    condition,
    is_suspended,
    labels,
    metadata,
)
from kinetic._backends.kubernetes.resources import (
    EVENTS,
    JOBS,
    JOBSETS,
    NODES,
    PODS,
    QUEUE_WORKLOADS,
    Resource,
)
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic.errors import KineticError, NotFound, PreflightError

FRESH_S = 2.0
"""A snapshot is reused for at least this many seconds."""
REQUEST_S = 1.0
"""A snapshot is reused for this many seconds per request that it took. So a process sends at most
60 requests a minute, however many jobs it follows."""
PATIENCE = 5
"""While no job runs yet, a snapshot is reused for 2, then 4, then this many times as long: at most
20 requests a minute. Nodes, queues and Jobs take up to three requests per snapshot."""
BUSY_SHARE = 0.25
"""Largest share of its time that a slow server may spend on these lists."""
FOLLOWED_S = 15.0
"""A snapshot covers all jobs that callers have read in this many seconds."""


class ClusterContext:
    """The objects that explain jobs' states; each kind is listed at most once. Thread-safe."""

    def __init__(self, api: Api, jobs: Collection[str] = ()) -> None:
        """Create the context of the given jobs without calling the cluster."""
        self._api = api
        self.covered = set(jobs)
        """The ids of the jobs that callers read, including jobs created after the list."""
        self.selection = Selector(labels=names.selector(jobs))
        self._lock = threading.RLock()
        self._listed: dict[str, Sequence[Document] | None] = {}
        self.requests = 0
        self.waiting: set[str] = set()
        """The ids of jobs that do not run yet."""

    def events_of(self, name: str) -> Sequence[Document]:
        """Return the events about an object. For several jobs, all events are listed at once."""
        if len(self.covered) == 1:
            about = Selector(fields=f"involvedObject.name={name}")
            listed = self._list_once(f"events {name}", lambda: self._list_if_allowed(EVENTS, about))
            return listed or ()
        listed = self._list_once("events", lambda: self._list_if_allowed(EVENTS)) or ()
        return [e for e in listed if (e.get("involvedObject") or {}).get("name") == name]

    @property
    def jobs(self) -> Sequence[Document]:
        """The Jobs that JobSets created."""
        return self._list_once("jobs", lambda: self._list_if_allowed(JOBS, self.selection)) or ()

    @property
    def nodes(self) -> Sequence[Document] | None:
        """The cluster's nodes; None if the caller may not list them, as most users may not."""
        return self._list_once("nodes", lambda: self._list_if_allowed(NODES))

    @property
    def queues(self) -> Sequence[Document] | None:
        """Kueue's Workload objects; None if the caller may not list them."""
        return self._list_once("queues", self._list_queues)

    def has(self, resource: Resource, name: str) -> bool:
        """True if an object exists now, or if the caller may not read it."""
        try:
            self._api.get(resource, name)
        except NotFound:
            return False
        except PreflightError:
            pass
        return True

    def _list_once(
        self, kind: str, ask: Callable[[], Sequence[Document] | None]
    ) -> Sequence[Document] | None:
        with self._lock:
            if kind not in self._listed:
                self._listed[kind] = ask()
            return self._listed[kind]

    def _list_queues(self) -> Sequence[Document] | None:
        for kind in QUEUE_WORKLOADS:
            try:
                return self.list(kind, Selector())
            except NotInstalled:
                continue
            except (PreflightError, NotFound):
                return None
        return ()

    def _list_if_allowed(
        self, resource: Resource, selection: Selector | None = None
    ) -> Sequence[Document] | None:
        try:
            return self.list(resource, selection or Selector())
        except (PreflightError, NotFound):
            return None

    def list(self, resource: Resource, selection: Selector) -> Sequence[Document]:
        """List objects of a kind. Each request is added to `requests`."""
        self.requests += 1
        listed = self._api.list(resource, selection)
        self.requests += listed.pages - 1
        return listed.items


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster's objects of some jobs.

    Attributes:
        context: further objects, which explain the jobs' states.
        workloads, pods: the objects, by job.
        kinds: the kinds of workloads that were listed.
        jobs: the listed jobs; None for all jobs in the namespace.
        is_fresh: whether the snapshot was taken for this call.
    """

    context: ClusterContext
    workloads: Mapping[str, Document]
    pods: Mapping[str, Sequence[Document]]
    kinds: frozenset[Resource]
    jobs: frozenset[str] | None = None
    is_fresh: bool = True

    def covers(self, ref: JobRef) -> bool:
        """True if the snapshot listed the job's kind of workload, and the job itself."""
        return resource_of(ref) in self.kinds and (self.jobs is None or ref.job_id in self.jobs)

    def workload(self, ref: JobRef) -> Document | None:
        """Return the Job or JobSet of a job, or None if it has none."""
        return self.workloads.get(ref.job_id)

    def pods_of(self, ref: JobRef) -> Sequence[Document]:
        """Return the pods of a job."""
        return self.pods.get(ref.job_id, ())

    def is_removed(self, ref: JobRef) -> bool:
        """True if a job's workload was removed: there are events about the workload, which a
        cluster keeps for an hour, but the workload does not exist. This reads the workload again,
        because a job created after the snapshot has events, too."""
        self.context.covered.add(ref.job_id)
        name = names.workload_of(ref.job_id)
        kind = PATHWAYS_HEAD if ref.has_single_controller else HOSTS
        if not any(self.context.events_of(about) for about in (name, f"{name}-{kind}-0")):
            return False
        return not self.context.has(resource_of(ref), name)

    def observe_job(self, ref: JobRef, workload: Document, *, waits: bool) -> Observed:
        """Return the objects that explain a job's state.

        Args:
            ref: the job.
            workload: its workload.
            waits: True if the job waits, so that the state of nodes and queues matters.
        """
        context, pods = self.context, self.pods_of(ref)
        context.covered.add(ref.job_id)
        if waits:
            context.waiting.add(ref.job_id)
        lacks_nodes = not all((pod.get("spec") or {}).get("nodeName") for pod in pods)
        was_restarted = (workload.get("status") or {}).get("restarts")
        needs_jobs = not waits or was_restarted or condition(workload, "Failed")
        queued = QUEUE_LABEL in labels(workload) and (waits or is_suspended(workload))
        queue_workload = self._find_queued(workload) if queued else None
        return Observed(
            workload=workload,
            pods=pods,
            jobs=[job for job in context.jobs if names.job_of(job) == ref.job_id]
            if needs_jobs and resource_of(ref) is JOBSETS
            else (),
            events=context.events_of,
            nodes=context.nodes if waits and lacks_nodes else None,
            queue_workload=queue_workload,
            earlier_jobs=_list_earlier(queue_workload, context.queues or ())
            if waits and queue_workload
            else None,
            own_secret=names.workload_of(ref.job_id),
        )

    def _find_queued(self, workload: Document) -> Document | None:
        """Return the Workload object that Kueue made for a Job or JobSet; None if there is none, an
        empty one if the user has no permission to list them."""
        queues = self.context.queues
        if queues is None:
            return {}
        uid = metadata(workload).get("uid")
        return next((queued for queued in queues if uid in _owners(queued)), None)


class SnapshotReader:
    """The snapshots of all callers of one connection. Threads may share an instance."""

    def __init__(self, api: Api, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the reader without calling the cluster.

        Args:
            api: the cluster.
            clock: seconds; for tests.
        """
        self.api = api
        self._clock = clock
        self._followed: dict[str, tuple[JobRef, float]] = {}
        self._created: dict[str, Document] = {}
        """The workloads that this process has created since the last list."""
        self.forget()

    def forget(self) -> None:
        """Drop the last snapshot and the lock in a fork: a thread of the parent may hold it."""
        self._lock = threading.Lock()
        self._last: ClusterSnapshot | None = None
        self._begun_at = self._failed_at = -1.0
        self._rounds = 0
        self._duration_s = 0.0
        self._error: KineticError | None = None

    def note_created(self, ref: JobRef, workload: Document) -> None:
        """Add the workload of a new job to the snapshots."""
        with self._lock:
            self._followed[ref.job_id] = ref, self._clock()
            self._created[ref.job_id] = workload

    def read(self, refs: Sequence[JobRef], *, fresh: bool = False) -> ClusterSnapshot:
        """Return the objects of jobs, at most a few seconds old.

        Args:
            refs: the jobs.
            fresh: list the objects now. Threads that ask at the same time share the result.

        Raises:
            BackendUnavailable: the server does not answer.
            PreflightError: the server refuses to answer.
        """
        asked_at = self._clock()
        with self._lock:
            self._followed |= {ref.job_id: (ref, asked_at) for ref in refs}
            if self._error is not None and self._failed_at > asked_at:
                raise self._error
            last = self._last
            if last is not None:
                if self._begun_at > asked_at and all(last.covers(ref) for ref in refs):
                    return last
                busy_s = self._duration_s / BUSY_SHARE
                lasts_s = max(FRESH_S, last.context.requests * REQUEST_S, busy_s)
                if self._all_wait(last):
                    lasts_s *= min(2**self._rounds, PATIENCE)
                may_serve = not fresh and asked_at - self._begun_at < lasts_s
                if may_serve and all(r.job_id in self._created or last.covers(r) for r in refs):
                    workloads = {**self._created, **last.workloads}
                    return replace(last, workloads=workloads, is_fresh=False)
            return self._take()

    def _all_wait(self, last: ClusterSnapshot) -> bool:
        return self._followed.keys() <= last.context.waiting

    def _take(self) -> ClusterSnapshot:
        begun_at, last = self._clock(), self._last
        self._rounds = self._rounds + 1 if last and self._all_wait(last) else 0
        self._followed = {
            job: (ref, at)
            for job, (ref, at) in self._followed.items()
            if begun_at - at < FOLLOWED_S
        }
        self._error = None
        try:
            self._last = snapshot = take_snapshot(
                self.api, [ref for ref, _ in self._followed.values()]
            )
        except KineticError as error:
            self._error, self._failed_at = error, begun_at
            raise
        self._created = {}
        self._begun_at, self._duration_s = begun_at, self._clock() - begun_at
        return snapshot


def share_reader(api: Api) -> SnapshotReader:
    """Return the `SnapshotReader` that all callers of a connection share."""
    with _lock:
        reader = _readers.get(id(api))
        if reader is None:
            _readers[id(api)] = reader = SnapshotReader(api)
        return reader


_readers: WeakValueDictionary[int, SnapshotReader] = WeakValueDictionary()
"""Readers by the `id()` of their connection, which each keeps alive: the id is not reused."""
_lock = threading.Lock()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    for reader in list(_readers.values()):
        reader.forget()


os.register_at_fork(after_in_child=_forget_all)


def take_snapshot(api: Api, refs: Sequence[JobRef]) -> ClusterSnapshot:
    """List the jobs' objects: one call for each kind of workload, one for pods if a job may run."""
    wanted = {ref.job_id for ref in refs}
    context = ClusterContext(api, wanted)
    kinds = dict.fromkeys(resource_of(ref) for ref in refs)
    workloads: dict[str, Document] = {}
    for resource in kinds:
        for workload in context.list(resource, context.selection):
            # The Jobs of a JobSet have the job's labels, too.
            if resource is JOBSETS or not _owners(workload):
                workloads[names.job_of(workload)] = workload
    pods: dict[str, list[Document]] = {}
    may_run = any(not is_suspended(workload) for workload in workloads.values())
    for pod in context.list(PODS, context.selection) if may_run else ():
        pods.setdefault(names.job_of(pod), []).append(pod)
    jobs = frozenset(wanted) if len(wanted) == 1 else None
    return ClusterSnapshot(context, workloads, pods, frozenset(kinds), jobs)


def resource_of(ref: JobRef) -> Resource:
    """Return the kind of the job's workload."""
    has_several = ref.hosts > 1 or ref.has_head or ref.has_single_controller
    return JOBSETS if has_several else JOBS


def _owners(thing: Document, field: str = "uid") -> list[str]:
    return [owner.get(field, "") for owner in metadata(thing).get("ownerReferences") or ()]


def _list_earlier(own: Document, workloads: Sequence[Document]) -> list[str] | None:
    """Return the names of the jobs before the Workload `own` in its queue; None without a queue."""
    if not _waits(own):
        return None
    queue = (own.get("spec") or {}).get("queueName")
    rivals = [w for w in workloads if (w.get("spec") or {}).get("queueName") == queue and _waits(w)]
    earlier = sorted((rival for rival in rivals if _rank(rival) < _rank(own)), key=_rank)
    return [(_owners(rival, "name") or [metadata(rival).get("name", "")])[0] for rival in earlier]


def _waits(queue_workload: Document) -> bool:
    is_active = (queue_workload.get("spec") or {}).get("active", True)
    if not queue_workload or not is_active or condition(queue_workload, "Finished"):
        return False
    return condition(queue_workload, "QuotaReserved") is None


def _rank(queue_workload: Document) -> tuple[int, str, str]:
    """Return a sort key: higher priorities come first, then older workloads."""
    meta = metadata(queue_workload)
    priority = (queue_workload.get("spec") or {}).get("priority") or 0
    return -priority, str(meta.get("creationTimestamp", "")), str(meta.get("name", ""))
