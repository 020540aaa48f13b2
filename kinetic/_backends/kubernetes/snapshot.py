"""The objects of jobs in a cluster at one moment, and what explains their state.

In: an `Api`, references. Out: the workload and pods of each job; what explains why it does not run.
What only some questions need (events, nodes, queues) is listed on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from kinetic._backends.kubernetes import names
from kinetic._backends.kubernetes.api import Api, Document, Selector
from kinetic._backends.kubernetes.controllers import queue_workloads
from kinetic._backends.kubernetes.diagnosis import Observed
from kinetic._backends.kubernetes.observed import QUEUE_LABEL, condition, labels, metadata
from kinetic._backends.kubernetes.resources import EVENTS, JOBS, JOBSETS, NODES, PODS, Resource
from kinetic._core.ref import JobRef
from kinetic.errors import NotFound, PreflightError


class Surroundings:
    """The context of jobs, each kind of object listed at most once. Threads may share it."""

    def __init__(self, api: Api) -> None:
        """Ask nothing yet."""
        self._api = api
        self._lock = threading.RLock()
        self._found: dict[str, Sequence[Document] | None] = {}

    @property
    def events(self) -> Sequence[Document]:
        """Events of the namespace."""
        return self._list_once("events", lambda: self._list_if_allowed(EVENTS)) or ()

    @property
    def jobs(self) -> Sequence[Document]:
        """The Jobs that JobSets made."""
        chosen = Selector(labels=names.selector(()))
        return self._list_once("jobs", lambda: self._list_if_allowed(JOBS, chosen)) or ()

    @property
    def nodes(self) -> Sequence[Document] | None:
        """None if they may not be listed, as by most users; findings are then less exact."""
        return self._list_once("nodes", lambda: self._list_if_allowed(NODES))

    @property
    def queues(self) -> Sequence[Document] | None:
        """Kueue's Workloads; None if they may not be listed."""
        return self._list_once("queues", self._list_queues)

    def has(self, resource: Resource, name: str) -> bool:
        """Whether an object exists now; assumed if it may not be looked up."""
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
            if kind not in self._found:
                self._found[kind] = ask()
            return self._found[kind]

    def _list_queues(self) -> Sequence[Document] | None:
        kind = queue_workloads(self._api)
        return () if kind is None else self._list_if_allowed(kind)

    def _list_if_allowed(
        self, resource: Resource, chosen: Selector | None = None
    ) -> Sequence[Document] | None:
        try:
            return self._api.list(resource, chosen or Selector()).items
        except (PreflightError, NotFound):
            return None


class ClusterSnapshot:
    """The cluster's objects of some jobs."""

    def __init__(
        self,
        around: Surroundings,
        workloads: Mapping[str, Document],
        pods: Mapping[str, Sequence[Document]],
        *,
        is_remembered: bool = False,
    ) -> None:
        """Store what was found.

        Args:
            around: what explains it.
            workloads, pods: by job.
            is_remembered: whether it was found before the question, if only by a moment.
        """
        self._around = around
        self._workloads = workloads
        self._pods = pods
        self.is_remembered = is_remembered

    def mark_remembered(self) -> ClusterSnapshot:
        """Return the same, for later questions."""
        return ClusterSnapshot(self._around, self._workloads, self._pods, is_remembered=True)

    def add_workloads(self, since: Mapping[str, Document]) -> ClusterSnapshot:
        """Return the same with workloads, by job, that were created after it."""
        workloads = {**self._workloads, **since}
        return ClusterSnapshot(self._around, workloads, self._pods, is_remembered=True)

    def workload(self, ref: JobRef) -> Document | None:
        """Return the Job or JobSet, or None if the cluster has none."""
        return self._workloads.get(ref.job_id)

    def pods(self, ref: JobRef) -> Sequence[Document]:
        """Return the pods of a job."""
        return self._pods.get(ref.job_id, ())

    def is_removed(self, ref: JobRef) -> bool:
        """Whether a job without a workload had one: the cluster has events about it for an hour. A
        job that was created after the look has events too, so its workload is looked up again."""
        around, name = self._around, names.workload_of(ref.job_id)
        if not any(
            about == name or about.startswith(f"{name}-")
            for event in around.events
            if (about := str((event.get("involvedObject") or {}).get("name", "")))
        ):
            return False
        return not around.has(resource_of(ref), name)

    def observe_job(self, ref: JobRef, workload: Document, *, waits: bool) -> Observed:
        """Return what explains a job.

        Args:
            ref: the job.
            workload: its workload.
            waits: whether it waits for nodes or a queue, so that these matter.
        """
        around = self._around
        pods, own = self.pods(ref), names.workload_of(ref.job_id)
        its = {metadata(thing).get("name", "") for thing in (workload, *pods)}
        about = ((event.get("involvedObject") or {}).get("name", "") for event in around.events)
        queued = waits and QUEUE_LABEL in labels(workload)
        of_queue = self._find_queued(workload) if queued else None
        return Observed(
            workload=workload,
            pods=pods,
            jobs=[job for job in around.jobs if names.job_of(job) == ref.job_id]
            if resource_of(ref) is JOBSETS
            else (),
            events=[
                event
                for event, named in zip(around.events, about, strict=True)
                if named in its or own in named
            ],
            nodes=around.nodes if waits else None,
            queue_workload=of_queue,
            queue_position=None if of_queue is None else _position(of_queue, around.queues or ()),
            own_secret=own,
        )

    def _find_queued(self, workload: Document) -> Document | None:
        """Kueue's Workload of a job; an empty one if they may not be listed."""
        queues = self._around.queues
        if queues is None:
            return {}
        uid = metadata(workload).get("uid")
        return next((each for each in queues if uid in _owners(each)), None)


def take_snapshot(api: Api, refs: Sequence[JobRef], around: Surroundings) -> ClusterSnapshot:
    """Ask the cluster: one list of workloads, and one of pods if there are any."""
    chosen = Selector(labels=names.selector({ref.job_id for ref in refs}))
    workloads: dict[str, Document] = {}
    for resource in kinds_of(refs):  # A JobSet's Jobs have the job's labels, too.
        found = {names.job_of(each): each for each in api.list(resource, chosen).items}
        own = [ref.job_id for ref in refs if resource_of(ref) == resource]
        workloads |= {job: found[job] for job in own if job in found}
    pods: dict[str, list[Document]] = {}
    for pod in api.list(PODS, chosen).items if workloads else ():
        pods.setdefault(names.job_of(pod), []).append(pod)
    return ClusterSnapshot(around, workloads, pods)


def kinds_of(refs: Sequence[JobRef]) -> list[Resource]:
    """Return the kinds of the jobs' workloads."""
    return list(dict.fromkeys(resource_of(ref) for ref in refs))


def resource_of(ref: JobRef) -> Resource:
    """Return the kind of the job's workload."""
    return JOBS if ref.hosts == 1 and not ref.has_single_controller else JOBSETS


def _owners(thing: Document) -> list[str]:
    return [owner.get("uid", "") for owner in metadata(thing).get("ownerReferences") or ()]


def _position(own: Document, workloads: Sequence[Document]) -> int | None:
    """How many workloads of its queue come before a waiting one."""
    if not _waits(own):
        return None
    queue = (own.get("spec") or {}).get("queueName")
    rivals = [w for w in workloads if (w.get("spec") or {}).get("queueName") == queue and _waits(w)]
    return sum(_turn(rival) < _turn(own) for rival in rivals)


def _waits(queue_workload: Document) -> bool:
    is_active = (queue_workload.get("spec") or {}).get("active", True)
    if not queue_workload or not is_active or condition(queue_workload, "Finished"):
        return False
    return condition(queue_workload, "QuotaReserved") is None


def _turn(queue_workload: Document) -> tuple[int, str, str]:
    """Higher priorities first, then older ones."""
    meta = metadata(queue_workload)
    priority = (queue_workload.get("spec") or {}).get("priority") or 0
    return -priority, str(meta.get("creationTimestamp", "")), str(meta.get("name", ""))
