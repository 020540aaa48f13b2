"""The diagnosis of lost hosts: which host failed first, judged by how the pods of the gang ended.

In: the pods of a gang, conditions and events of its Jobs. Out: a `JobDiagnosis`, the host to blame
first. Pure.

Timestamps do not tell which host ended first: they are whole seconds, and if one host's death ends
another host, the cluster often reports the second host first. So hosts are ranked by how they
ended, and only then by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import (
    Document,
    Pod,
    Stage,
    condition,
    metadata,
    name_pods,
    shape_of,
)
from kinetic._core.exits import ProgramCode

_ECHOES = (
    "distributed service detected fatal errors",
    "coordination service",
    "heartbeat",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "peer",
)
"""Substrings in the output of a host that died because a peer died."""
_SIGNALS = {
    129: "SIGHUP",
    130: "SIGINT",
    132: "SIGILL",
    134: "SIGABRT",
    135: "SIGBUS",
    136: "SIGFPE",
    137: "SIGKILL",
    139: "SIGSEGV",
    143: "SIGTERM",
}
_KILLED = 137
_SHUT_DOWN = ("Terminated", "NodeShutdown", "Preempting")
_NO_PROGRAM = ("executable file not found", "no such file or directory", "permission denied")
_DISRUPTIONS = {
    "PreemptionByScheduler": (
        JobCause.PREEMPTED,
        "a pod with a higher priority got its node. Raise priority=, or wait for free nodes",
    ),
    "EvictionByEvictionAPI": (
        JobCause.EVICTED,
        "its node was drained: by an upgrade, by the autoscaler, or by kubectl drain",
    ),
    "DeletionByTaintManager": (
        JobCause.NODE_LOST,
        "its node {node} stopped answering, so the cluster gave the host up",
    ),
    "DeletionByPodGC": (JobCause.NODE_LOST, "its node {node} no longer exists"),
}
_NODE_LOST = ("DeletionByTaintManager", "DeletionByPodGC")
_POD_DISRUPTED = re.compile(r"od \S+?/(\S+) has condition DisruptionTarget")
_POD_OF_JOB = re.compile(r"(Created|Deleted) pod: (\S+)$")
_POD_IN_MESSAGE = re.compile(r"for pod \S+?/(\S+) failed with exit code (\d+)")


def why_lost(pods: Sequence[Pod]) -> JobDiagnosis | None:
    """Return which hosts were lost and why; None if no host was lost.

    Args:
        pods: one pod for each host; for a deleted pod, its last known version.
    """
    lost = sorted(
        (p for p in pods if _is_lost(p)), key=lambda p: (_rank(p), p.finished_at or "9", p.host)
    )
    if not lost:
        return None
    first = lost[0]
    kind, text, hopeless = _cause(first)
    hosts = tuple(pod.host for pod in lost)
    verb = (
        "failed"
        if kind in (JobCause.HOST_FAILED, JobCause.BAD_COMMAND, JobCause.START_ERROR)
        else "was lost"
    )
    others = f" {name_pods(lost[1:]).capitalize()} ended after it." if lost[1:] else ""
    sentence = f"{first.called.capitalize()} {verb}: {text}.{others}"
    return JobDiagnosis(kind, sentence, hopeless, hosts)


def why_stopped(jobs: Iterable[Document]) -> JobDiagnosis | None:
    """Return the finding that the cluster stopped the job because of its deadline, or None."""
    for job in jobs:
        for kind in ("FailureTarget", "Failed"):
            if (condition(job, kind) or {}).get("reason") == "DeadlineExceeded":
                text = "The job ran longer than its deadline allows, so the cluster stopped it."
                return JobDiagnosis(JobCause.DEADLINE, f"{text} Raise timeout=.", hopeless=True)
    return None


def why_gone(
    jobs: Sequence[Document], events: Iterable[Document], pods: Iterable[Pod] = ()
) -> JobDiagnosis | None:
    """Return why a Job whose failed pods are gone has failed, from its condition or its events.

    Args:
        jobs: the workload, and the Jobs that a JobSet created.
        events: the events of the workload and these Jobs.
        pods: the pods that still exist, listed before the events.
    """
    shape = shape_of(jobs[0])
    sources = [
        c for job in jobs for kind in ("FailureTarget", "Failed") if (c := condition(job, kind))
    ]
    sources += [event for event in events if event.get("type") == "Warning"]
    for source in sources:
        named = _POD_IN_MESSAGE.search(source.get("message") or "")
        if named and source.get("reason") == "PodFailurePolicy":
            host, code = shape.host_named(named[1]), int(named[2])
            called = shape.name_pod(host).capitalize()
            return JobDiagnosis(
                JobCause.HOST_FAILED, f"{called} failed: {_code(code)}.", True, (host,)
            )
        ended = _POD_DISRUPTED.search(source.get("message") or "")
        if ended:
            host = shape.host_named(ended[1])
            called = shape.name_pod(host).capitalize()
            text = f"{called} was lost: the cluster ended its pod. It was evicted or preempted"
            return JobDiagnosis(JobCause.EVICTED, f"{text}, or its node was lost.", True, (host,))
    return _find_first_gone(jobs, events, {pod.name for pod in pods})


def _find_first_gone(
    jobs: Sequence[Document], events: Iterable[Document], existing: set[str]
) -> JobDiagnosis | None:
    """Return the finding about the hosts that ended first, for an unknown reason; None if there are
    none. A failed Job deletes its remaining pods and writes an event for each deletion. A pod that
    is missing without such an event ended earlier."""
    shape = shape_of(jobs[0])
    failed = [j for j in jobs if condition(j, "FailureTarget") or condition(j, "Failed")]
    uids = {metadata(job).get("uid") for job in failed}
    created: set[str] = set()
    deleted: set[str] = set()
    for event in events:
        if (event.get("involvedObject") or {}).get("uid") in uids:
            match = _POD_OF_JOB.match(event.get("message") or "")
            if match:
                (created if match[1] == "Created" else deleted).add(match[2])
    ended = created - deleted - existing
    if not deleted | existing or not ended:
        return None
    hosts = tuple(sorted(shape.host_named(pod) for pod in ended))
    names = ", ".join(map(shape.name_pod, hosts))
    whose = f"pod of {names} was" if len(hosts) == 1 else f"pods of {names} were"
    text = f"The {whose} deleted, or ended without a recorded reason."
    return JobDiagnosis(JobCause.HOST_FAILED, text, True, hosts)


def why_leaderless(workload: Document, pods: Iterable[Pod]) -> JobDiagnosis | None:
    """Return why a gang has lost its leader; None if it has not. The cluster reports this failure
    late: after all other pods have ended, or after a lost node has returned or was removed."""
    pods = list(pods)
    leader = next((pod for pod in pods if pod.leads), None)
    if leader is not None and leader.is_deleting and not leader.is_ready:
        return why_lost([leader] if leader.disruption in _NODE_LOST else [])
    if not pods or "deletionTimestamp" in metadata(workload):
        return None
    if leader is None:
        shape = shape_of(workload)
        host, called = shape.leader, shape.name_pod(shape.leader).capitalize()
        text = f"{called} was lost: its pod was deleted, or its node was removed."
        return JobDiagnosis(JobCause.HOST_FAILED, text, hosts=(host,))
    return why_lost([leader]) if leader.stage is Stage.FAILED else None


def _is_lost(pod: Pod) -> bool:
    if pod.wants_restart and not pod.disruption:
        return False
    silent = pod.stage is Stage.RUNNING and pod.has_run and not pod.is_ready and not pod.is_deleting
    # Do not blame a pod that was stopped: another pod or the user is the cause.
    was_stopped = pod.is_deleting and pod.exit_code not in range(1, 128)
    return (pod.stage is Stage.FAILED and not was_stopped) or bool(pod.disruption) or silent


def _rank(pod: Pod) -> int:
    """Return a sort key for how a host ended. The host with the lowest key is blamed."""
    if pod.disruption or pod.exit_reason in ("OOMKilled", "Evicted", "StartError", *_SHUT_DOWN):
        return 0
    if pod.is_deleting:  # stopped on purpose
        return 5
    if pod.exit_code is None:  # silent
        return 1
    echoes = pod.has_lost_leader or any(w in pod.exit_message.lower() for w in _ECHOES)
    if pod.exit_code < 128:
        return 3 if echoes else 1
    return 4 if echoes or pod.exit_code == 143 else 2


def _cause(pod: Pod) -> tuple[JobCause, str, bool]:
    if pod.disruption:
        kind, text = _explain_disruption(pod)
        return kind, text, False
    if pod.exit_reason in _SHUT_DOWN:
        return JobCause.PREEMPTED, _describe_shutdown(pod, pod.exit_message), False
    if pod.exit_reason in ("OOMKilled", "Evicted"):
        return (*_memory(pod), False)
    if pod.exit_reason in ("StartError", "ContainerCannotRun"):
        missing = any(words in pod.exit_message for words in _NO_PROGRAM)
        kind = JobCause.BAD_COMMAND if missing else JobCause.START_ERROR
        advice = f"Check that the image {pod.image} has the program" if missing else ""
        text = f'its program could not be started: "{_last_line(pod.exit_message)}"'
        return kind, ". ".join(t for t in (text, advice) if t), missing
    if pod.stage is Stage.RUNNING:
        text = f"its node {pod.node} does not answer. If the node does not come back, the cluster"
        return JobCause.NODE_LOST, f"{text} gives the host up after some minutes", False
    if pod.exit_code is None:
        return (
            JobCause.NODE_LOST,
            pod.exit_message or pod.exit_reason or "its pod failed",
            False,
        )
    text = "its leader was lost" if pod.has_lost_leader else _code(pod.exit_code)
    if pod.exit_code in (126, 127):
        return JobCause.BAD_COMMAND, f"{text}, so a command was not found{_tail(pod)}", True
    return JobCause.HOST_FAILED, f"{text}{_tail(pod)}", False


def _explain_disruption(pod: Pod) -> tuple[JobCause, str]:
    if pod.disruption in _DISRUPTIONS:
        kind, text = _DISRUPTIONS[pod.disruption]
        return kind, text.format(node=pod.node)
    message = (pod.disruption_message or pod.disruption).rstrip(".")
    if "shutdown" in f"{message} {pod.exit_message}".lower():
        return JobCause.PREEMPTED, _describe_shutdown(pod, message)
    return JobCause.EVICTED, f"the cluster ended its pod: {message}"


def _describe_shutdown(pod: Pod, message: str) -> str:
    text = f"its node {pod.node} was shut down, as spot nodes and nodes under maintenance are"
    return f"{text}: {message.rstrip('.')}" if message else text


def _memory(pod: Pod) -> tuple[JobCause, str]:
    if pod.exit_reason == "Evicted":
        message = pod.exit_message.rstrip(".") or "its node ran out of resources"
        kind = JobCause.OUT_OF_MEMORY if "memory" in message else JobCause.EVICTED
        return kind, f"its node {pod.node} evicted it: {message}"
    limit = f"its limit of {pod.memory_limit}" if pod.memory_limit else "the memory of its node"
    advice = "Use less memory on the host, or machines with more"
    return JobCause.OUT_OF_MEMORY, f"it used more memory than {limit}. {advice}"


def _code(code: int) -> str:
    if code == ProgramCode.CODE_FAILED:
        return "its function raised an exception"
    if code in _SIGNALS:
        return f"it was killed by {_SIGNALS[code]} (exit code {code})"
    return f"it ended with exit code {code}"


def _tail(pod: Pod) -> str:
    # The last output before a SIGKILL does not explain the kill: the program could not foresee it.
    last = _last_line(pod.exit_message) if pod.exit_code != _KILLED else ""
    return f": {last}" if last else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else ""
