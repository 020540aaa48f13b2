"""The state of a job, from its workload, its pods and the store.

In: a Job or JobSet as the API server sends it (None without one), its pods, `JobFacts`. Out: a
`Status`. Pure and stateless, so every process computes the same status.

The workload alone is not enough: while a program winds down, a Job's numbers are the same as while
it starts, and a JobSet's `ready` drops as soon as the first host has finished. The pods make the
answer exact; one list call fetches the pods of all jobs. Only the store says whether a job that
lost its leader continues, and whether a job without a workload was cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kinetic._backends.base import HostStatus, Status
from kinetic._backends.kubernetes import pod_failures
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
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
from kinetic._backends.kubernetes.resources import seconds_of
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass

STARTING = "its hosts are starting"
WAITING = "its hosts wait for nodes"
RESTARTING = "its hosts are starting again"
ENDING = "its hosts are ending"
REMOVED = "it is being removed from the cluster"
SUSPENDED = "it is suspended"
QUEUED = "the job waits in the queue {queue!r}"

REMOVED_FROM_CLUSTER = "its workload was removed from the cluster"
CANCELLED = "The job was cancelled."

LEAST_START_TIMEOUT_S = 2.0
"""The start timeout cannot pass in the first seconds of a wait: the plan with it is not read."""
SUBMISSION_S = 15.0
"""If a workload has no Secret after this many seconds, its submission was interrupted."""
_PHASES = {Stage.SUCCEEDED: JobStatus.SUCCEEDED, Stage.FAILED: JobStatus.FAILED}


def status_of(workload: Document | None, pods: Iterable[Document]) -> Status:
    """Return the status of a job in the cluster.

    Args:
        workload: the Job or JobSet; None if the cluster has none.
        pods: all pods of the workload, including those of earlier attempts.
    """
    if workload is None:
        return Status(JobStatus.NOT_FOUND)
    ended = _find_end(workload)
    if ended is not None:
        return ended
    if is_suspended(workload):
        queue = labels(workload).get(QUEUE_LABEL)
        reason = QUEUED.format(queue=queue) if queue else SUSPENDED
        return _mark_removed(workload, Status(JobStatus.PENDING, reason))
    return _mark_removed(workload, _from_pods(workload, current_pods(workload, pods)))


def _find_end(workload: Document) -> Status | None:
    """Return the status of a workload that has ended, or None. Only the conditions read here are
    final; others are set up to minutes before the end."""
    for kind in ("Complete", "Completed"):
        if condition(workload, kind):
            return Status(JobStatus.SUCCEEDED)
    failed = condition(workload, "Failed")
    if failed is None:
        return None
    reason = ": ".join(s for s in (failed.get("reason"), failed.get("message")) if s)
    return Status(JobStatus.FAILED, reason)


def _mark_removed(workload: Document, status: Status) -> Status:
    if "deletionTimestamp" not in metadata(workload):
        return status
    return Status(status.phase, REMOVED, status.hosts)


def _from_pods(workload: Document, pods: tuple[Pod, ...]) -> Status:
    wanted = shape_of(workload).hosts
    begun = [pod for pod in pods if pod.is_up]
    ending = [pod for pod in pods if pod.stage is Stage.FAILED or pod.is_deleting]
    ends = ("FailureTarget", "SuccessCriteriaMet")
    is_removed = "deletionTimestamp" in metadata(workload)
    over = is_removed or any(condition(workload, kind) for kind in ends)
    # A gang that is ending: some of its pods may be deleted, but no pod is still starting.
    broken = bool(ending) and len(begun) == len(pods)
    if over or broken or len(begun) == wanted:
        never_ran = bool(pods) and not begun
        phase = JobStatus.PENDING if never_ran else JobStatus.RUNNING
        failed = [p for p in ending if p.has_ended and not (p.is_deleting or p.wants_restart)]
        over = over or broken or all(pod.has_ended for pod in pods)
        reason = ENDING if over else ""
        if failed:
            reason = f"{name_pods(failed)} {'have' if len(failed) > 1 else 'has'} failed"
        reason = _explain_ends(pods) or reason
    else:
        phase, reason = JobStatus.PENDING, _waiting_for(workload, pods, wanted)
    hosts = [_host(pod) for pod in pods]
    return Status(phase, reason, tuple(h for h in hosts if h.reason or h.phase is not phase))


def _explain_ends(pods: Sequence[Pod]) -> str:
    """Explain why ended pods wait for other pods; "" if they do not. A cluster counts the pods of a
    dead node as running for a while, and it restarts no host before all pods have ended."""
    rest, lost = [p for p in pods if not p.has_ended], [p for p in pods if p.has_lost_leader]
    leader = next((pod for pod in rest if pod.leads), None)
    if lost and leader is not None:
        text = f"{name_pods(lost)} lost the connection to {leader.called}, which leads"
        return f"{text}: its node {leader.node} may be lost"
    if not rest or not any(pod.wants_restart for pod in pods):
        return ""
    nodes = ", ".join(sorted({pod.node for pod in rest}))
    return f"its hosts restart once these have ended: {name_pods(rest)} on {nodes}"


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
    restarts = status.get("restarts") or status.get("failed") or status.get("terminating")
    return RESTARTING if restarts else STARTING


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
        return HostStatus(pod.host, phase, f"it has no node: {pod.unschedulable}")
    return HostStatus(pod.host, phase, _trouble(pod))


def _trouble(pod: Pod) -> str:
    """Return why a container does not start; "" if it is being prepared as usual."""
    if pod.waiting_reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(s for s in (_trouble_name(pod), pod.waiting_message) if s)


def _trouble_name(pod: Pod) -> str:
    # Use one name for both image reasons: they alternate while an image cannot be pulled.
    return "ImagePull" if pod.waiting_reason in IMAGE_REASONS else pod.waiting_reason


def _end_of(pod: Pod) -> str:
    if pod.stage is Stage.SUCCEEDED:
        return ""
    if pod.disruption:
        return f"the cluster ended its pod: {pod.disruption}"
    if pod.wants_restart or pod.has_lost_leader:
        return "it had all hosts restarted" if pod.leads else "it lost its leader"
    if pod.exit_code is None:
        return pod.exit_reason or "its pod failed"
    named = f" ({pod.exit_reason})" if pod.exit_reason not in ("", "Error") else ""
    return f"its program ended with exit code {pod.exit_code}{named}"


# -- the state with the store's records ------------------------------------------------------------


@dataclass(frozen=True)
class JobFacts:
    """The facts from which `judge` derives a job's status. Functions call the store or the cluster,
    so `judge` uses them only if needed.

    Attributes:
        ref, workload: the job.
        pods: the pods of its current attempt.
        cluster: its status by workload and pods alone (`status_of`).
        now: seconds since the epoch by the cluster's clock.
        explain: returns what keeps the job from running or ended it, given whether it waits.
        has: returns whether the store has a record with this key.
        has_begun: returns whether all hosts were ever ready.
        goes_on: returns whether the job may get another attempt after losing its leader.
        existed: returns whether the job had a workload earlier.
        start_timeout_s: returns the limit in its plan, in seconds.
    """

    ref: JobRef
    workload: Document | None
    pods: tuple[Pod, ...]
    cluster: Status
    now: float
    explain: Callable[[bool], JobDiagnosis | None]
    has: Callable[[str], bool]
    has_begun: Callable[[], bool]
    goes_on: Callable[[], bool]
    existed: Callable[[], bool]
    start_timeout_s: Callable[[], float]


def judge(job: JobFacts) -> tuple[Status, JobDiagnosis | None]:
    """Return the status of a job without a verdict, and, if it waits, the reason."""
    workload = job.workload
    if workload is None:
        return _judge_absent(job), None
    # Workers of Pathways are not hosts of the job.
    hosts = tuple(host for host in job.cluster.hosts if host.host < job.ref.hosts)
    status = replace(job.cluster, hosts=hosts)
    if status.phase is JobStatus.SUCCEEDED:
        return status, None
    if status.phase is JobStatus.RUNNING:
        return _judge_running(job, workload, status), None
    if status.phase is JobStatus.FAILED and _is_led(job.pods):
        return Status(JobStatus.RUNNING, _explain_ends(job.pods) or ENDING, hosts), None
    waits = status.phase is JobStatus.PENDING
    if waits and job.ref.has_head and job.has_begun():
        head = next((pod for pod in select_starting(job.pods) if pod.leads), None)
        if head is None or head.stage is Stage.RUNNING:
            # The elastic job continues with fewer slices, or waits for a slice.
            return Status(JobStatus.RUNNING, status.reason, hosts), None
        job = _narrow_to(head, job)
    finding = job.explain(waits)
    if finding is None:
        return _fail_overdue(job, workload, status), None
    waited_s = job.now - created_at(workload)
    if finding.kind is JobCause.MISSING_SECRET and waited_s < SUBMISSION_S:
        return Status(status.phase, STARTING), None  # The submission creates the Secret last.
    explained = _apply_finding(job, finding, status)
    return _fail_overdue(job, workload, explained), finding if waits else None


def _narrow_to(head: Pod, job: JobFacts) -> JobFacts:
    """Return the facts about a job that now waits for its new head only. The job's slices may get
    their nodes later, so a finding about them is not hopeless."""

    def explain(waits: bool) -> JobDiagnosis | None:
        finding = job.explain(waits)
        if finding is None or set(finding.hosts) <= {head.host}:
            return finding
        return replace(finding, hopeless=False)

    return replace(job, pods=(head,), explain=explain)


def select_hosts(ref: JobRef, finding: JobDiagnosis) -> tuple[int, ...]:
    """Return the hosts that a finding is about; all hosts if it is about workers of Pathways."""
    return tuple(h for h in finding.hosts if h < ref.hosts) or tuple(range(ref.hosts))


def _judge_absent(job: JobFacts) -> Status:
    """Return the status of a job without a workload: not created yet, cancelled, or removed."""
    if job.has(layout.JobKeys(job.ref.job_id).cancellation):
        ended = (JobStatus.CANCELLED, CANCELLED, Exit.CANCELLED)
        everywhere = tuple(HostStatus(host, *ended) for host in range(job.ref.hosts))
        return Status(JobStatus.CANCELLED, CANCELLED, everywhere)
    if job.existed():
        return Status(
            JobStatus.FAILED,
            REMOVED_FROM_CLUSTER,
            (HostStatus(0, JobStatus.FAILED, REMOVED_FROM_CLUSTER),),
        )
    return Status(JobStatus.NOT_FOUND)


def _judge_running(job: JobFacts, workload: Document, status: Status) -> Status:
    """Return the status of a running job: failed if the job lost its leader for good. The cluster
    reports that loss late, after the other pods have ended or the leader's node was removed."""
    lost = pod_failures.why_leaderless(workload, job.pods)
    if lost is None or job.ref.has_head:  # The cluster replaces a lost head.
        return status
    if job.goes_on() or job.has(layout.JobKeys(job.ref.job_id).cancellation):
        return Status(JobStatus.RUNNING, lost.sentence, status.hosts)
    leader = {0: HostStatus(0, JobStatus.FAILED, lost.sentence)}
    return Status(JobStatus.FAILED, lost.sentence, _replace_hosts(status, leader))


def _apply_finding(job: JobFacts, finding: JobDiagnosis, status: Status) -> Status:
    """Return the status with the finding as its reason; FAILED if the finding is hopeless."""
    never_ran = status.phase is JobStatus.PENDING and finding.hopeless
    phases = {host.host: host.phase for host in status.hosts}
    concerned = {
        host: HostStatus(
            host,
            phases.get(host, status.phase),
            finding.sentence,
            Exit.SETUP_FAILED if never_ran else None,
        )
        for host in select_hosts(job.ref, finding)
    }
    phase = JobStatus.FAILED if finding.hopeless else status.phase
    return Status(phase, finding.sentence, _replace_hosts(status, concerned))


def _fail_overdue(job: JobFacts, workload: Document, status: Status) -> Status:
    """Return the status of a job whose hosts have waited longer than its start timeout: failed,
    with the reason for their wait. Once host 0 runs, its leader watches the timeout itself."""
    since = waiting_since(workload, job.pods)
    if since is None or status.phase is not JobStatus.PENDING:
        return status
    waited_s = job.now - since
    if waited_s < LEAST_START_TIMEOUT_S:
        return status
    limit_s = job.start_timeout_s()
    between = has_leader(job.pods) or not select_starting(job.pods)
    if waited_s < limit_s or (between and job.has(layout.JobKeys(job.ref.job_id).events)):
        return status
    reason = f"the job did not start within {limit_s:g} s: {status.reason or 'no reason known'}"
    idle = {host: HostStatus(host, JobStatus.PENDING) for host in range(job.ref.hosts)}
    hosts = idle | {host.host: host for host in status.hosts}
    return Status(JobStatus.FAILED, reason, tuple(hosts.values()))


def waiting_since(workload: Document, pods: Sequence[Pod]) -> float | None:
    """Return when the hosts began to wait for their start, in seconds since the epoch by the
    cluster's clock: the latest of the workload's creation, its admission by a queue, and the
    creation of its oldest current pod. None while the job waits in a queue, which has no limit.

    Args:
        workload: the Job or JobSet.
        pods: one for each host, of the current attempt.
    """
    if is_suspended(workload):
        return None
    resumed = [
        seconds_of(str(entry.get("lastTransitionTime")))
        for entry in (workload.get("status") or {}).get("conditions") or ()
        if entry.get("type") == "Suspended" and entry.get("status") == "False"
    ]
    creations = [
        at for pod in select_starting(pods) if (at := seconds_of(pod.created_at)) is not None
    ]
    moments = [at for at in resumed if at is not None] + ([min(creations)] if creations else [])
    return max([created_at(workload), *moments])


def created_at(workload: Document) -> float:
    """Return when a workload was created, in seconds since the epoch by the cluster's clock;
    infinity without a timestamp, so that no wait is overdue."""
    at = seconds_of(str(metadata(workload).get("creationTimestamp")))
    return math.inf if at is None else at


def select_starting(pods: Sequence[Pod]) -> list[Pod]:
    """Return those pods of the current attempt that run or will run."""
    return [pod for pod in pods if not pod.has_ended and not pod.is_deleting]


def has_leader(pods: Sequence[Pod]) -> bool:
    """True if the leader runs; the leader then watches the start of its gang itself."""
    return any(pod.leads and pod.stage is Stage.RUNNING for pod in pods)


def _is_led(pods: Iterable[Pod]) -> bool:
    """True if the leader of a failed JobSet still runs, so that the leader will write the verdict.
    A JobSet fails when the first of its Jobs fails, before it deletes the others."""
    return any(pod.leads and pod.stage is Stage.RUNNING and pod.is_ready for pod in pods)


def _replace_hosts(status: Status, others: dict[int, HostStatus]) -> tuple[HostStatus, ...]:
    return tuple(({host.host: host for host in status.hosts} | others).values())
