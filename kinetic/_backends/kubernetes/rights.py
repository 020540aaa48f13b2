"""The permissions that kinetic uses in a cluster: every verb on every kind of object, and its use.

The roles in docs/how-to/kubernetes.md must match this table.
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
    """The features that need permissions."""

    ALL = "all jobs"
    SEVERAL_HOSTS = "jobs of several hosts"
    NETWORKS = "network_devices="
    KILL = "`kinetic jobs kill`"
    DEBUG = "`kinetic jobs debug`"
    QUEUES = "explaining why a job waits in a queue"
    WAITING = "explaining why a job waits"
    CHECKS = "checks before a submission"


@dataclass(frozen=True)
class Right:
    """A verb on a kind of object.

    Attributes:
        verb: the verb's name in RBAC.
        resource: the kind of object.
        need: the feature that needs it.
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
    *_rights(EVENTS, "list", Need.WAITING),
    *_rights(NODES, "list", Need.WAITING),
    *_rights(CLAIM_TEMPLATES, "create", Need.NETWORKS),
    *_rights(QUEUE_WORKLOADS[0], "list", Need.QUEUES),
    *_rights(LOCAL_QUEUES[0], "get", Need.QUEUES),
    *_rights(SERVICE_ACCOUNTS, "get", Need.CHECKS),
    *_rights(CSI_DRIVERS, "get", Need.CHECKS),
    *_rights(DEVICE_CLASSES, "get", Need.CHECKS),
    *_rights(CHECKPOINT_CONFIGURATIONS, "list", Need.CHECKS),
)
"""Every permission that kinetic uses. Jobs need those of the needs in `VITAL`. Without the others
only explanations are missing, and `kinetic doctor` says so."""


VITAL = (Need.ALL, Need.SEVERAL_HOSTS, Need.NETWORKS)
"""The needs without which jobs do not run."""


def list_relevant(*, networks: bool = False, queue: bool = False) -> tuple[Right, ...]:
    """List the permissions that jobs use. Those of `Need.CHECKS` are left out: a check that may not
    read an object reports that itself."""
    excluded = {Need.CHECKS}
    excluded |= set() if networks else {Need.NETWORKS}
    excluded |= set() if queue else {Need.QUEUES}
    return tuple(right for right in RIGHTS if right.need not in excluded)
