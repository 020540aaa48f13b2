"""Findings about a job on a cluster: a kind, and a sentence that says what to do."""

from __future__ import annotations

from enum import StrEnum

from kinetic._core.values import dataclass


class JobCause(StrEnum):
    """The kinds of reasons why a job does not run, or ended."""

    NO_NODE_POOL = "no node pool"
    """No node has the accelerator and the topology."""
    NO_ROOM = "no room"
    """Suitable nodes exist, but all are in use."""
    PARTIAL_SLICE = "partial slice"
    """Some hosts have nodes, others do not."""
    PROVISIONING = "provisioning"
    """Nodes are being added."""
    NO_SCALE_UP = "no scale-up"
    """The autoscaler adds no nodes for the job."""
    QUOTA = "quota"
    QUEUED = "queued"
    """Kueue has not admitted the job yet."""
    QUEUE_REFUSED = "queue refused"
    """Kueue will never admit the job as it is."""
    SUSPENDED = "suspended"
    IMAGE_PULL = "image pull"
    SERVICE_ACCOUNT = "service account"
    MISSING_SECRET = "missing secret"
    MISSING_VOLUME = "missing volume"
    REFUSED = "refused"
    """The cluster does not admit the job's pods."""
    BAD_COMMAND = "bad command"
    START_ERROR = "start error"
    PREPARING = "preparing"
    """Nothing is wrong, but the start takes time."""
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    NODE_LOST = "node lost"
    OUT_OF_MEMORY = "out of memory"
    DEADLINE = "deadline"
    HOST_FAILED = "host failed"


@dataclass(frozen=True)
class JobDiagnosis:
    """A finding about a job that does not run.

    Attributes:
        kind: the kind of the reason.
        sentence: what happened and what to do, for people. The text stays the same while the reason
            does, so a caller can print each new text.
        hopeless: true if waiting cannot help.
        hosts: the affected hosts, the one to blame first; empty for all.
    """

    kind: JobCause
    sentence: str
    hopeless: bool = False
    hosts: tuple[int, ...] = ()
