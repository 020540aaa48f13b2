"""The state of a job, from its workload and its pods.

In: a Job or JobSet as the API server sends it (None if there is none), and its pods. Out: a
`Status`. Pure and stateless, so any process says the same.

A workload alone does not tell everything: while a program winds down, a Job's numbers are the same
as while it starts, and a JobSet's `ready` drops as soon as the first host has finished. With the
pods the answer is exact; one list call fetches those of all jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from kinetic._backends.base import HostStatus, Status
from kinetic._backends.kubernetes.observed import (
    IMAGE_REASONS,
    QUEUE_LABEL,
    Document,
    Pod,
    Stage,
    condition,
    current_pods,
    is_suspended,
    labels,
    metadata,
    name_pods,
    shape_of,
)
from kinetic._core.state import JobStatus

STARTING = "its hosts are starting"
WAITING = "its hosts wait for nodes"
RESTARTING = "its hosts are starting again"
ENDING = "its hosts are ending"
REMOVED = "it is being removed from the cluster"
SUSPENDED = "it is suspended"
QUEUED = "it waits in the queue {queue}"

_PHASES = {Stage.SUCCEEDED: JobStatus.SUCCEEDED, Stage.FAILED: JobStatus.FAILED}


def status_of(workload: Document | None, pods: Iterable[Document] | None = None) -> Status:
    """Return the status of a job in the cluster.

    Args:
        workload: the Job or JobSet; None if the cluster has none.
        pods: all pods of the workload, including those of earlier attempts; None if they were not
            listed. A job that is winding down may then be shown as starting.
    """
    if workload is None:
        return Status(JobStatus.NOT_FOUND)
    ended = _find_end(workload)
    if ended is not None:
        return ended
    current = None if pods is None else current_pods(workload, pods)
    if is_suspended(workload):
        queue = labels(workload).get(QUEUE_LABEL)
        reason = QUEUED.format(queue=queue) if queue else SUSPENDED
        return _mark_removed(workload, Status(JobStatus.PENDING, reason))
    if current is None:
        return _mark_removed(workload, _from_numbers(workload))
    return _mark_removed(workload, _from_pods(workload, current))


def _find_end(workload: Document) -> Status | None:
    """Only these conditions are final: others are set up to minutes earlier."""
    for kind in ("Complete", "Completed"):
        if condition(workload, kind):
            return Status(JobStatus.SUCCEEDED)
    failed = condition(workload, "Failed")
    if failed is None:
        return None
    said = ": ".join(s for s in (failed.get("reason"), failed.get("message")) if s)
    return Status(JobStatus.FAILED, said)


def _mark_removed(workload: Document, status: Status) -> Status:
    if "deletionTimestamp" not in metadata(workload):
        return status
    return Status(status.phase, REMOVED, status.hosts)


def _is_ending(workload: Document) -> bool:
    return any(condition(workload, kind) for kind in ("FailureTarget", "SuccessCriteriaMet"))


def _from_pods(workload: Document, pods: tuple[Pod, ...]) -> Status:
    wanted = shape_of(workload).hosts
    begun = [pod for pod in pods if pod.is_up]
    ending = [pod for pod in pods if pod.stage is Stage.FAILED or pod.is_deleting]
    over = _is_ending(workload) or "deletionTimestamp" in metadata(workload)
    # a gang that has begun to end: some of its pods may be gone, but none is still starting
    broken = bool(ending) and len(begun) == len(pods)
    if over or broken or len(begun) == wanted:
        never_ran = bool(pods) and not begun
        phase = JobStatus.PENDING if never_ran else JobStatus.RUNNING
        failed = [pod for pod in ending if pod.stage is Stage.FAILED and not pod.is_deleting]
        over = over or broken or all(pod.has_ended for pod in pods)
        reason = _describe_failed(failed) if failed else ENDING if over else ""
    else:
        phase, reason = JobStatus.PENDING, _waiting_for(workload, pods, wanted)
    return Status(phase, reason, _hosts(pods, phase))


def _waiting_for(workload: Document, pods: tuple[Pod, ...], wanted: int) -> str:
    status = workload.get("status") or {}
    stuck = next((p for p in pods if p.stage is Stage.STARTING and _trouble(p)), None)
    if stuck is not None:
        return f"{stuck.called} does not start: {_trouble_name(stuck)}"
    running = sum(pod.is_up for pod in pods)
    if running:
        several = len(shape_of(workload).sets) > 1
        return f"{running} of {wanted} {'pods' if several else 'hosts'} run"
    if any(pod.unschedulable for pod in pods):
        return WAITING
    again = status.get("restarts") or status.get("failed") or status.get("terminating")
    return RESTARTING if again else STARTING


def _describe_failed(failed: list[Pod]) -> str:
    return f"{name_pods(failed)} {'have' if len(failed) > 1 else 'has'} failed"


def _hosts(pods: tuple[Pod, ...], phase: JobStatus) -> tuple[HostStatus, ...]:
    known = [_host(pod) for pod in pods]
    return tuple(h for h in known if h.reason or h.phase is not phase)


def _host(pod: Pod) -> HostStatus:
    if pod.has_ended:
        return HostStatus(pod.host, _PHASES[pod.stage], _end_of(pod))
    phase = JobStatus.RUNNING if pod.stage is Stage.RUNNING else JobStatus.PENDING
    if pod.disruption:
        return HostStatus(pod.host, phase, f"the cluster ends its pod: {pod.disruption}")
    if pod.is_deleting:
        return HostStatus(pod.host, phase, "its pod is being stopped")
    if pod.stage is Stage.RUNNING:
        return HostStatus(pod.host, phase, "" if pod.is_ready else "its node does not answer")
    if pod.unschedulable:
        return HostStatus(pod.host, phase, f"no node takes it: {pod.unschedulable}")
    return HostStatus(pod.host, phase, _trouble(pod))


def _trouble(pod: Pod) -> str:
    """Why a container does not start, or "" while it is being prepared as usual."""
    if pod.waiting_reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(s for s in (_trouble_name(pod), pod.waiting_message) if s)


def _trouble_name(pod: Pod) -> str:
    # the two reasons alternate while nothing changes
    return "ImagePull" if pod.waiting_reason in IMAGE_REASONS else pod.waiting_reason


def _end_of(pod: Pod) -> str:
    if pod.stage is Stage.SUCCEEDED:
        return ""
    if pod.disruption:
        return f"the cluster ended its pod: {pod.disruption}"
    if pod.exit_code is None:
        return pod.exit_reason or "its pod failed"
    named = f" ({pod.exit_reason})" if pod.exit_reason not in ("", "Error") else ""
    return f"its program ended with exit code {pod.exit_code}{named}"


def _from_numbers(workload: Document) -> Status:
    """Without the pods: missing numbers are zeros, and a JobSet counts Jobs, not pods."""
    status = workload.get("status") or {}
    if _is_ending(workload):
        return Status(JobStatus.RUNNING, ENDING)
    shape = shape_of(workload)
    if "replicatedJobs" in (workload.get("spec") or {}):
        by_name = {r.get("name"): r for r in status.get("replicatedJobsStatus") or ()}
        up = all(_count_up(by_name.get(s.name) or {}) >= s.replicas for s in shape.sets)
    else:
        counted = status.get("uncountedTerminatedPods") or {}
        just_ended = sum(len(counted.get(k) or ()) for k in ("succeeded", "failed"))
        up = _count_up({**status, "failed": 0}) + just_ended >= shape.hosts
    if up:
        return Status(JobStatus.RUNNING)
    again = status.get("restarts") or status.get("failed")
    return Status(JobStatus.PENDING, RESTARTING if again else STARTING)


def _count_up(numbers: Document) -> int:
    return sum(numbers.get(key) or 0 for key in ("ready", "succeeded", "failed"))
