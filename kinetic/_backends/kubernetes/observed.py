"""Workloads and pods of the API server as values: the shape of a gang, and its pods.

In: workloads (Job, JobSet) and pods as plain documents. Out: `GangShape`, `Pod`. Pure.

This module alone handles some traps: a container ends about a second before its pod's phase says
so; conditions stay in the list with status False; a pod on a dead node stays "running"; names of
pods are random and are reused after a restart, so labels tell a pod's host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

from kinetic._core.exits import ProgramCode
from kinetic._core.values import dataclass

Document = dict[str, Any]
EventsOf = Callable[[str], Sequence[Document]]
"""Returns the events about the object with this name."""

JOBSET = "JobSet"
HOSTS, HEAD = "host", "head"
"""The names of replicated Jobs: the Job of the hosts, and the Job of an elastic job's head."""
PATHWAYS_HEAD, PATHWAYS_WORKERS = "pathways-head", "pathways-worker"
"""The names of Pathways' replicated Jobs: for the function's pod, and for the pods with chips."""
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
JOB_LABEL = "kinetic.dev/job-id"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
CONTROLLER_UID_LABEL = "batch.kubernetes.io/controller-uid"
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
SIDECARS = frozenset({"gke-gcsfuse-sidecar"})
IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})


def condition(thing: Document, kind: str) -> Document | None:
    """Return the condition of this type if it holds now, or None. Conditions that no longer hold
    stay in the list with status False."""
    for candidate in (thing.get("status") or {}).get("conditions") or ():
        if candidate.get("type") == kind and candidate.get("status") == "True":
            return dict(candidate)
    return None


def metadata(thing: Document) -> Document:
    """Return the metadata of an object."""
    return thing.get("metadata") or {}


def labels(thing: Document) -> Mapping[str, str]:
    """Return the labels of an object."""
    return metadata(thing).get("labels") or {}


def is_suspended(workload: Document) -> bool:
    """True if a workload waits until it is resumed, for example by a queue."""
    return bool((workload.get("spec") or {}).get("suspend"))


@dataclass(frozen=True)
class PodSet:
    """The pods that share a template.

    Attributes:
        name: the name of the replicated job; "" in a Job.
        replicas: the number of Jobs, one for each slice.
        pods_each: the number of pods of each Job.
        first_host: the host index of its first pod.
        template: the pods' template.
        noun: what users call a pod. Messages number heads and Pathways' workers separately, since
            they run no function; in this module all pods have host indices.
    """

    name: str
    replicas: int
    pods_each: int
    first_host: int
    template: Document = field(default_factory=dict)
    noun: str = "host"

    @property
    def pods(self) -> int:
        """The number of pods of a complete set."""
        return self.replicas * self.pods_each


@dataclass(frozen=True)
class GangShape:
    """The pods of a complete workload. Each pod has a host index: pods are numbered in the order of
    the replicated Jobs, then of the slices, then of the pods of a slice."""

    sets: tuple[PodSet, ...]

    @property
    def hosts(self) -> int:
        """The number of pods of a complete workload."""
        return sum(s.pods for s in self.sets)

    @property
    def leader(self) -> int:
        """The host index of the leader's pod: that of the head, or 0 if there is no head."""
        return next((s.first_host for s in self.sets if s.name == HEAD), 0)

    def set_of(self, pod: Document) -> PodSet:
        """Return the set that a pod belongs to."""
        name = labels(pod).get(REPLICATED_JOB_LABEL, "")
        return next((s for s in self.sets if s.name == name), self.sets[0])

    @property
    def is_elastic(self) -> bool:
        """True if the job has a head, so that it can continue with fewer slices."""
        return any(s.name in (HEAD, PATHWAYS_HEAD) for s in self.sets)

    def set_of_event(self, event: Document) -> PodSet:
        """Return the set whose Job an event is about. The Job is named <workload>-<set>-<job>."""
        job = str((event.get("involvedObject") or {}).get("name", ""))
        return next((s for s in self.sets if s.name and f"-{s.name}-" in job), self.sets[0])

    def host_of(self, pod: Document) -> int:
        """Return the index of a pod's host."""
        pod_labels, of = labels(pod), self.set_of(pod)
        index = pod_labels.get(INDEX_LABEL) or (metadata(pod).get("annotations") or {}).get(
            INDEX_LABEL
        )
        slice_index = _number(pod_labels.get(JOB_INDEX_LABEL))
        return of.first_host + slice_index * of.pods_each + _number(index)

    def set_at(self, host: int) -> PodSet:
        """Return the set that contains the pod with this host index."""
        return next(s for s in reversed(self.sets) if s.first_host <= host)

    def name_pod(self, host: int) -> str:
        """Return the name of a pod for users: "host 2", "head 0", "worker 1"."""
        of = self.set_at(host)
        return f"{of.noun} {host - of.first_host}"

    def host_named(self, pod: str) -> int:
        """Return the host index of a pod from its name: <workload>-<set>-<job>-<pod>-<letters>, or
        <workload>-<pod>-<letters> in a Job."""
        numbers = [int(part) for part in pod.split("-")[-3:-1] if part.isdigit()]
        of = next((s for s in self.sets if f"-{s.name}-" in pod), self.sets[0])
        if not of.name or len(numbers) < 2:
            return numbers[-1] if numbers else 0
        return of.first_host + numbers[0] * of.pods_each + numbers[1]


def shape_of(workload: Document) -> GangShape:
    """Return the shape of the gang of a Job or JobSet."""
    spec = workload.get("spec") or {}
    if not _is_jobset(workload):
        return GangShape((_make_set("", 1, spec, 0),))
    sets: list[PodSet] = []
    for replicated in spec.get("replicatedJobs") or ():
        job = (replicated.get("template") or {}).get("spec") or {}
        first = sum(s.pods for s in sets)
        sets.append(
            _make_set(replicated.get("name", ""), replicated.get("replicas", 1), job, first)
        )
    return GangShape(tuple(sets) or (PodSet("", 1, 1, 0),))


def _is_jobset(workload: Document) -> bool:
    # The items of a list have no kind.
    return workload.get("kind") == JOBSET or "replicatedJobs" in (workload.get("spec") or {})


def _make_set(name: str, replicas: int, job: Document, first_host: int) -> PodSet:
    parallelism = job.get("parallelism", 1)
    pods_each = min(parallelism, job.get("completions") or parallelism)
    noun = {PATHWAYS_WORKERS: "worker", HEAD: "head"}.get(name, "host")
    return PodSet(name, replicas, pods_each, first_host, job.get("template") or {}, noun)


class Stage(StrEnum):
    """The stage of a pod."""

    UNSCHEDULED = "unscheduled"
    """The pod has no node yet."""
    STARTING = "starting"
    """The pod has a node, but its container does not run yet, or waits for a restart."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class Pod:
    """The state of a pod.

    Attributes:
        name, uid: the name and the uid of the object.
        host: the pod's host index.
        restart: the number of JobSet restarts before this pod was created.
        created_at: the time of its creation, as text.
        node: the node on which the pod runs, or "".
        stage: the pod's stage.
        has_run: True if the pod's program was ever started.
        is_ready: True if the cluster has contact to the pod.
        is_deleting: True if the pod is being deleted.
        waiting_reason, waiting_message: why the container does not run, such as ImagePullBackOff.
        unschedulable: the scheduler's sentence on why the pod has no node, or "".
        unschedulable_since: when the scheduler first wrote that, as text.
        disruption, disruption_message: why the cluster ended the pod, such as
            EvictionByEvictionAPI, or "".
        exit_code: the exit code of the ended container; None also if the code was lost.
        exit_reason: a reason such as OOMKilled, StartError, or Evicted.
        exit_message: the last lines of the pod's output, or the runtime's message.
        finished_at: when the container ended, in whole seconds, as text.
        image: the image of the container.
        memory_limit: the memory limit of the container, as written, or "".
        noun, number: the pod's name for users: "host 2", "head 0", or "worker 0" with Pathways.
        leads: True if the pod leads the gang.
        code: the exit code of kinetic's program, a `ProgramCode` if it chose its code itself; None
            while it runs, and for pods that are not kinetic's.
    """

    name: str
    uid: str
    host: int
    restart: int
    created_at: str
    node: str
    stage: Stage
    has_run: bool
    is_ready: bool
    is_deleting: bool
    waiting_reason: str
    waiting_message: str
    unschedulable: str
    unschedulable_since: str
    disruption: str
    disruption_message: str
    exit_code: int | None
    exit_reason: str
    exit_message: str
    finished_at: str
    image: str
    memory_limit: str
    noun: str
    number: int
    leads: bool = False
    code: int | None = None

    @property
    def called(self) -> str:
        """The pod's name for users."""
        return f"{self.noun} {self.number}"

    @property
    def wants_restart(self) -> bool:
        """True if the pod led the gang, and its exit code makes the cluster restart all hosts."""
        return self.leads and self.code in (ProgramCode.START_AGAIN, ProgramCode.TAKEN_AWAY)

    @property
    def has_lost_leader(self) -> bool:
        """True if the pod's exit code says that the leader did not answer."""
        return self.code == ProgramCode.UNDELIVERED and not self.leads

    @property
    def is_up(self) -> bool:
        """True if the pod's program was started. A worker of Pathways must also be running now,
        because restarting it in the same pod may take long."""
        stopped = self.stage in (Stage.UNSCHEDULED, Stage.STARTING)
        return self.has_run and not (stopped and self.noun == "worker")

    @property
    def has_ended(self) -> bool:
        """True if the pod's program has ended."""
        return self.stage in (Stage.SUCCEEDED, Stage.FAILED)


def pod_of(document: Document, shape: GangShape) -> Pod:
    """Parse a pod's document."""
    meta, spec = metadata(document), document.get("spec") or {}
    status = document.get("status") or {}
    container = main_container(document)
    state, before = _read_states(status, container.get("name", ""))
    terminated = state.get("terminated") or before.get("terminated") or {}
    ran = any(
        end and end.get("reason") not in NEVER_STARTED
        for end in (state.get("terminated"), before.get("terminated"))
    )
    waiting = _find_waiting(status, state)
    conditions = {c.get("type"): c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    refused = scheduled if scheduled.get("status") == "False" else {}
    disruption = condition(document, "DisruptionTarget") or {}
    stage = _stage(document, state)
    of, host, pod_labels = shape.set_of(document), shape.host_of(document), labels(document)
    # The kubelet's reason, such as Evicted or NodeShutdown, is more precise than the container's.
    ended = status if stage is Stage.FAILED else {}
    return Pod(
        name=meta.get("name", ""),
        uid=meta.get("uid", ""),
        host=host,
        restart=_number(pod_labels.get(RESTART_LABEL)),
        created_at=meta.get("creationTimestamp") or "",
        node=spec.get("nodeName") or "",
        stage=stage,
        has_run=ran or "running" in state,
        is_ready=condition(document, "Ready") is not None,
        is_deleting="deletionTimestamp" in meta,
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        unschedulable=refused.get("message") or "",
        unschedulable_since=refused.get("lastTransitionTime") or "",
        disruption=disruption.get("reason") or "",
        disruption_message=disruption.get("message") or "",
        exit_code=terminated.get("exitCode"),
        exit_reason=ended.get("reason") or terminated.get("reason") or "",
        exit_message=ended.get("message") or terminated.get("message") or "",
        finished_at=terminated.get("finishedAt") or "",
        image=container.get("image") or "",
        memory_limit=((container.get("resources") or {}).get("limits") or {}).get("memory") or "",
        noun=of.noun,
        number=host - of.first_host,
        leads=host == shape.leader,
        code=terminated.get("exitCode") if JOB_LABEL in pod_labels else None,
    )


def name_pods(pods: Iterable[Pod]) -> str:
    """Return the names of pods for users: "host 2", "hosts 1, 2", "host 0 and workers 1, 3"."""
    numbers: dict[str, list[int]] = {}
    for pod in pods:
        numbers.setdefault(pod.noun, []).append(pod.number)
    return " and ".join(
        f"{noun}{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"
        for noun, indices in sorted(numbers.items())
    )


def main_container(pod: Document) -> Document:
    """Return the container that runs the job: the annotated default, or the first non-sidecar."""
    containers: list[Document] = (pod.get("spec") or {}).get("containers") or [{}]
    wanted = (metadata(pod).get("annotations") or {}).get(DEFAULT_CONTAINER)
    named = [c for c in containers if c.get("name") == wanted]
    own = [c for c in containers if c.get("name") not in SIDECARS]
    return (named or own or containers)[0]


def current_pods(workload: Document, pods: Iterable[Document]) -> tuple[Pod, ...]:
    """Return the newest pod of each host, by host, without pods from before the last restart."""
    shape = shape_of(workload)
    uid = metadata(workload).get("uid")
    owner = JOBSET_UID_LABEL if _is_jobset(workload) else CONTROLLER_UID_LABEL
    restarts = (workload.get("status") or {}).get("restarts") or 0
    newest: dict[int, Pod] = {}
    for document in pods:
        if labels(document).get(owner, uid) != uid:
            continue  # a pod of an earlier workload with the same name
        pod = pod_of(document, shape)
        if pod.restart < restarts:
            continue
        other = newest.get(pod.host)
        if other is None or _age(pod) > _age(other):
            newest[pod.host] = pod
    return tuple(newest[host] for host in sorted(newest))


def _age(pod: Pod) -> tuple[int, str, bool]:
    # If two pods of a host were created in the same second, the pod that has not ended is newer.
    return pod.restart, pod.created_at, not (pod.has_ended or pod.is_deleting)


def _stage(document: Document, state: Document) -> Stage:
    phase = (document.get("status") or {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        return Stage(phase.lower())
    spec = document.get("spec") or {}
    terminated = state.get("terminated")
    if terminated and spec.get("restartPolicy") == "Never":
        return Stage.SUCCEEDED if terminated.get("exitCode") == 0 else Stage.FAILED
    if "running" in state:
        return Stage.RUNNING
    return Stage.STARTING if spec.get("nodeName") else Stage.UNSCHEDULED


def _read_states(status: Document, container: str) -> tuple[Document, Document]:
    """Return the current and the previous state of the container with this name."""
    statuses: Sequence[Document] = status.get("containerStatuses") or ()
    own = next((c for c in statuses if c.get("name") == container), {})
    return own.get("state") or {}, own.get("lastState") or {}


def _find_waiting(status: Document, state: Document) -> Document:
    """Return why the pod's container waits. Init containers are checked first, because all other
    containers wait for them."""
    for other in status.get("initContainerStatuses") or ():
        waiting = (other.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
            return dict(waiting)
    return state.get("waiting") or {}


def _number(text: Any) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        return 0
