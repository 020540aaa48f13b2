"""Since when a cluster is supposed to start a job's hosts.

In: the workload, its current pods. Out: a time. Pure and stateless: the pods of each start
are new, and a queue that admits a job leaves a condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kinetic._backends.kubernetes.diagnosis import seconds_of
from kinetic._backends.kubernetes.observed import (
    Document,
    Pod,
    Stage,
    is_suspended,
    metadata,
)


def asked_at(workload: Document, pods: Sequence[Pod]) -> float | None:
    """Return since when the cluster is supposed to start the hosts, in seconds since the epoch by
    its clock; None while the job waits in a queue, which has no limit.

    Args:
        workload: the Job or JobSet.
        pods: one for each host, of the current attempt.
    """
    if is_suspended(workload):
        return None
    resumed = [
        seconds_of(str(found.get("lastTransitionTime")))
        for found in (workload.get("status") or {}).get("conditions") or ()
        if found.get("type") == "Suspended" and found.get("status") == "False"
    ]
    made = [at for pod in select_starting(pods) if (at := seconds_of(pod.created_at)) is not None]
    known = [at for at in resumed if at is not None] + ([min(made)] if made else [])
    return max([created_at(workload), *known])


def created_at(workload: Document) -> float:
    """Return when a workload was created: soon after its job was submitted, which only the
    submitter's clock says. Without a timestamp it has not waited at all."""
    at = seconds_of(str(metadata(workload).get("creationTimestamp")))
    return math.inf if at is None else at


def select_starting(pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods that run or will run: those of an earlier attempt have ended."""
    return [pod for pod in pods if not pod.has_ended and not pod.is_deleting]


def has_leader(pods: Sequence[Pod]) -> bool:
    """Whether the leader runs: it then watches the start of its gang itself."""
    return any(pod.leads and pod.stage is Stage.RUNNING for pod in pods)
