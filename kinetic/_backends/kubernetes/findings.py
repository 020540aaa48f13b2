"""What can be wrong with a job on a cluster: kinds, and a sentence with what to do.

In: nothing. Out: `JobCause`, `JobDiagnosis`. Pure.
"""

from __future__ import annotations

from enum import StrEnum

from kinetic._core.values import dataclass


class JobCause(StrEnum):
    """Why a job does not run, or ended."""

    NO_NODE_POOL = "no node pool"
    """No node has the accelerator and the topology."""
    NO_ROOM = "no room"
    """There are such nodes, but all are taken."""
    PARTIAL_SLICE = "partial slice"
    """Some hosts have nodes, others do not."""
    PROVISIONING = "provisioning"
    """Nodes are being added."""
    NO_SCALE_UP = "no scale-up"
    """The cluster adds no nodes for it."""
    QUOTA = "quota"
    QUEUED = "queued"
    """Kueue has not admitted it yet."""
    QUEUE_REFUSED = "queue refused"
    """Kueue will never admit it as it is."""
    SUSPENDED = "suspended"
    IMAGE_PULL = "image pull"
    SERVICE_ACCOUNT = "service account"
    MISSING_SECRET = "missing secret"
    MISSING_VOLUME = "missing volume"
    REFUSED = "refused"
    """The cluster does not admit its pods."""
    BAD_COMMAND = "bad command"
    START_ERROR = "start error"
    PREPARING = "preparing"
    """Nothing is wrong: it takes time."""
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    NODE_LOST = "node lost"
    OUT_OF_MEMORY = "out of memory"
    DEADLINE = "deadline"
    HOST_FAILED = "host failed"


@dataclass(frozen=True)
class JobDiagnosis:
    """What is known about a job that does not run.

    Attributes:
        kind: which case it is.
        sentence: for people: what happened, and what to do. Constant while nothing changes, so it
            can be shown when it differs.
        hopeless: whether waiting cannot help.
        hosts: the hosts concerned, the first to blame first; empty for all.
    """

    kind: JobCause
    sentence: str
    hopeless: bool = False
    hosts: tuple[int, ...] = ()
