"""One look at the cluster, for any number of jobs: each kind of object is listed at most once.

In: an `Api`, references. Out: the workload and pods of each job; what explains why it does not run.
What only some questions need (events, nodes, queues) is listed when the first of them is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kinetic._backends.kubernetes import names
from kinetic._backends.kubernetes.api import Api, Document, Selection
from kinetic._backends.kubernetes.checks import queue_workloads
from kinetic._backends.kubernetes.diagnosis import Observed
from kinetic._backends.kubernetes.observed import QUEUE_LABEL, condition, labels, metadata
from kinetic._backends.kubernetes.resources import EVENTS, JOBS, JOBSETS, NODES, PODS, Resource
from kinetic._core.ref import JobRef
from kinetic.errors import NotFound, PreflightError


class Look:
    """What the cluster holds, at the moment of the look. For one thread."""

    def __init__(self, api: Api, refs: Sequence[JobRef]) -> None:
        """List the workloads, and the pods if there are any.

        Args:
            api: whom to ask.
            refs: the jobs in question.
        """
        self._api = api
        ids = {ref.job_id for ref in refs}
        chosen = Selection(labels=names.selector(ids))
        found: dict[str, Document] = {}
        for resource in {resource_of(ref.hosts) for ref in refs}:
            found |= {names.job_of(each): each for each in api.list(resource, chosen).items}
        self._workloads = {job: each for job, each in found.items() if job in ids}
        self._pods: dict[str, list[Document]] = {}
        for pod in api.list(PODS, chosen).items if self._workloads else ():
            self._pods.setdefault(names.job_of(pod), []).append(pod)

    def workload(self, ref: JobRef) -> Document | None:
        """Return the Job or JobSet, or None where the cluster has none."""
        return self._workloads.get(ref.job_id)

    def pods(self, ref: JobRef) -> list[Document]:
        """Return the pods of a job."""
        return self._pods.get(ref.job_id, [])

    def is_removed(self, ref: JobRef) -> bool:
        """Whether a job without a workload had one: the cluster has events about it for an hour.
        One that was created after the look has them too, so it is asked for once more."""
        name = names.workload_of(ref.job_id)
        if not any(
            about == name or about.startswith(f"{name}-")
            for event in self._events
            if (about := str((event.get("involvedObject") or {}).get("name", "")))
        ):
            return False
        try:
            self._api.get(resource_of(ref.hosts), name)
        except NotFound:
            return True
        except PreflightError:  # It may not be asked for.
            return False
        return False

    def observed(self, ref: JobRef, workload: Document, *, waits: bool) -> Observed:
        """Return what explains a job.

        Args:
            ref: the job.
            workload: of it.
            waits: whether it waits for nodes or a queue, so that these count.
        """
        pods, own = self.pods(ref), names.workload_of(ref.job_id)
        its = {metadata(thing).get("name", "") for thing in (workload, *pods)}
        about = ((event.get("involvedObject") or {}).get("name", "") for event in self._events)
        queued = waits and QUEUE_LABEL in labels(workload)
        of_queue = self._queued(workload) if queued else None
        return Observed(
            workload=workload,
            pods=pods,
            jobs=[job for job in self._jobs if names.job_of(job) == ref.job_id]
            if ref.hosts > 1
            else (),
            events=[
                event
                for event, named in zip(self._events, about, strict=True)
                if named in its or own in named
            ],
            nodes=self._nodes if waits else None,
            queue_workload=of_queue,
            queue_position=None if of_queue is None else _position(of_queue, self._queues or ()),
            own_secret=own,
        )

    def _made_jobs(self, ref: JobRef) -> Sequence[Document]:
        return self._jobs if ref.hosts > 1 else ()

    def _queued(self, workload: Document) -> Document | None:
        """Kueue's Workload of a job; one that says nothing where they may not be listed."""
        if self._queues is None:
            return {}
        uid = metadata(workload).get("uid")
        return next((each for each in self._queues if uid in _owners(each)), None)

    @cached_property
    def _events(self) -> Sequence[Document]:
        return self._if_allowed(EVENTS) or ()

    @cached_property
    def _jobs(self) -> Sequence[Document]:
        """Those that JobSets made."""
        return self._if_allowed(JOBS, Selection(labels=names.selector(set(self._workloads)))) or ()

    @cached_property
    def _nodes(self) -> Sequence[Document] | None:
        return self._if_allowed(NODES)  # Few users may; the finding is less exact then.

    @cached_property
    def _queues(self) -> Sequence[Document] | None:
        kind = queue_workloads(self._api)
        return () if kind is None else self._if_allowed(kind)

    def _if_allowed(
        self, resource: Resource, chosen: Selection | None = None
    ) -> Sequence[Document] | None:
        try:
            return self._api.list(resource, chosen or Selection()).items
        except (PreflightError, NotFound):
            return None


def resource_of(hosts: int) -> Resource:
    """Return as what a job of so many hosts runs."""
    return JOBS if hosts == 1 else JOBSETS


def _owners(thing: Document) -> list[str]:
    return [owner.get("uid", "") for owner in metadata(thing).get("ownerReferences") or ()]


def _position(own: Document, workloads: Sequence[Document]) -> int | None:
    """How many workloads of its queue come before one that waits."""
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
