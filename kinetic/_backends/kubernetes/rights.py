"""What kinetic does in a cluster: every verb on every kind of object, and what it is for.

The roles in docs/how-to/kubernetes.md are this table.
"""

from __future__ import annotations

from enum import StrEnum

from kinetic._backends.kubernetes.resources import (
    CHECKPOINT_CONFIGURATIONS,
    CLAIM_TEMPLATES,
    CSI_DRIVERS,
    DEVICE_CLASSES,
    EVENTS,
    JOBS,
    JOBSETS,
    LOCAL_QUEUES,
    NODES,
    PODS,
    PORT_FORWARDS,
    QUEUE_WORKLOADS,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource,
)
from kinetic._core.values import dataclass


class Need(StrEnum):
    """What a permission is for."""

    ALL = "all jobs"
    SEVERAL_HOSTS = "jobs of several hosts"
    NETWORKS = "network_devices="
    KILL = "`kinetic jobs kill`"
    DEBUG = "`kinetic jobs debug`"
    QUEUES = "what explains why a job waits in a queue"
    NOT_ALL = "what explains why a job waits"
    CHECKS = "what is checked before it can go wrong"


@dataclass(frozen=True)
class Right:
    """A verb on a kind of object.

    Attributes:
        verb: as RBAC names it.
        resource: the kind.
        need: what it is for.
    """

    verb: str
    resource: Resource
    need: Need = Need.ALL

    def __str__(self) -> str:
        return f"{self.verb} {self.resource.full_name}"


def _rights(resource: Resource, verbs: str, need: Need = Need.ALL) -> tuple[Right, ...]:
    return tuple(Right(verb, resource, need) for verb in verbs.split())


RIGHTS = (
    *_rights(JOBS, "create get list delete"),
    *_rights(JOBSETS, "create get list delete", Need.SEVERAL_HOSTS),
    *_rights(SECRETS, "create"),
    *_rights(PODS, "list"),
    *_rights(PODS, "delete", Need.KILL),
    *_rights(PORT_FORWARDS, "create get", Need.DEBUG),
    *_rights(EVENTS, "list", Need.NOT_ALL),
    *_rights(NODES, "list", Need.NOT_ALL),
    *_rights(CLAIM_TEMPLATES, "create", Need.NETWORKS),
    *_rights(QUEUE_WORKLOADS[0], "list", Need.QUEUES),
    *_rights(LOCAL_QUEUES[0], "get", Need.QUEUES),
    *_rights(SERVICE_ACCOUNTS, "get", Need.CHECKS),
    *_rights(CSI_DRIVERS, "get", Need.CHECKS),
    *_rights(DEVICE_CLASSES, "get", Need.CHECKS),
    *_rights(CHECKPOINT_CONFIGURATIONS, "list", Need.CHECKS),
)
"""Every permission that kinetic uses. Jobs run with those of the first needs; without the others
less is known, and the doctor says so."""


VITAL = (Need.ALL, Need.SEVERAL_HOSTS, Need.NETWORKS)
"""Without these, jobs do not run."""


def list_relevant(*, networks: bool = False, queue: bool = False) -> tuple[Right, ...]:
    """Return the permissions that jobs use; not those of checks, whose result says what they could
    not look up."""
    left_out = {Need.CHECKS}
    left_out |= set() if networks else {Need.NETWORKS}
    left_out |= set() if queue else {Need.QUEUES}
    return tuple(right for right in RIGHTS if right.need not in left_out)
