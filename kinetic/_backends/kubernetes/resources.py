"""The kinds of objects that kinetic reads and writes in a cluster, and their paths in the API."""

from __future__ import annotations

from datetime import datetime

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Resource:
    """A kind of object.

    Attributes:
        group: its API group; "" for the core group.
        version: the version of the group.
        plural: the name of the kind in paths.
        namespaced: whether its objects are in namespaces.
    """

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The value of `apiVersion` in the kind's objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """The name in kubectl and error messages, such as jobsets.jobset.x-k8s.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of the kind's objects, or of one of them."""
        start = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [start]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        if name:
            parts.append(name)
        return "/".join(parts)


JOBS = Resource("batch", "v1", "jobs")
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
PODS = Resource("", "v1", "pods")
PORT_FORWARDS = Resource("", "v1", "pods/portforward")
EVENTS = Resource("", "v1", "events")
SECRETS = Resource("", "v1", "secrets")
SERVICES = Resource("", "v1", "services")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
NODES = Resource("", "v1", "nodes", namespaced=False)
QUEUE_WORKLOADS = tuple(
    Resource("kueue.x-k8s.io", version, "workloads") for version in ("v1beta2", "v1beta1")
)
"""The versions of Kueue's Workloads, newest first: a cluster is asked for each in turn."""


def seconds_of(timestamp: str) -> float | None:
    """Parse an ISO 8601 timestamp into seconds since the epoch; None if it is malformed."""
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None


LOCAL_QUEUES = tuple(
    Resource("kueue.x-k8s.io", kind.version, "localqueues") for kind in QUEUE_WORKLOADS
)
CLAIM_TEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates")
DEVICE_CLASSES = Resource("resource.k8s.io", "v1", "deviceclasses", namespaced=False)
CSI_DRIVERS = Resource("storage.k8s.io", "v1", "csidrivers", namespaced=False)
CHECKPOINT_CONFIGURATIONS = Resource(
    "checkpointing.gke.io", "v1", "checkpointconfigurations", namespaced=False
)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False
)
BY_KIND = {
    ("batch/v1", "Job"): JOBS,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSETS,
    ("v1", "Secret"): SECRETS,
    ("v1", "Pod"): PODS,
    ("v1", "Service"): SERVICES,
    ("resource.k8s.io/v1", "ResourceClaimTemplate"): CLAIM_TEMPLATES,
}
"""The kinds of documents that kinetic renders, by apiVersion and kind."""
