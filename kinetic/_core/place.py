"""Where a job runs: everything needed to reach it from any process.

In: options and settings. Out: `Place`, a frozen value. It is part of the plan and of the job's
reference; a backend is made from it and a store.
"""

from __future__ import annotations

from typing import Any

from kinetic._core import documents
from kinetic._core.values import dataclass

JOB, JOBSET = "gke", "pathways"
"""What older scripts call a Job of one host, and a JobSet of several. Nothing of Pathways runs for
the second, unless with `controller="single"`."""
BACKENDS = (JOB, JOBSET, "local", "ray")

MULTI_TIER = "multi-tier"
"""Local storage that GKE's multi-tier checkpointing keeps on the node."""
ALL_DEVICES = "all"

MADE_IMAGES = ("bundled", "prebuilt")
"""Images that kinetic makes; any other is a URI."""


@dataclass(frozen=True)
class Place(documents.Record, called="The place of the job"):
    """Where a job runs. Fields that do not apply, or were not given, are "".

    Attributes:
        backend: what runs the job, one of `BACKENDS`.
        stands_in_for: the requested backend, if the local one simulates it.
        cluster: the cluster's name, or its address if it has no name.
        address: of the Jobs API of a Ray cluster.
        context: the current one of the kubeconfig at submission, if no cluster was named.
        project, zone: the cloud project and zone of the cluster.
        namespace: the namespace in the cluster.
        image: what the hosts run.
        image_repo: the repository of prebuilt images.
        queue: the queue that admits the job.
        service_account: of the pods, if somebody named it: then they have its token.
    """

    backend: str
    stands_in_for: str = ""
    cluster: str = ""
    address: str = ""
    context: str = ""
    project: str = ""
    zone: str = ""
    namespace: str = ""
    image: str = ""
    image_repo: str = ""
    queue: str = ""
    service_account: str = ""

    @property
    def requested(self) -> str:
        """The backend that was requested, even if another one stands in for it."""
        return self.stands_in_for or self.backend

    @property
    def has_pods(self) -> bool:
        """Whether hosts are pods of a Kubernetes cluster."""
        return self.backend in (JOB, JOBSET)

    @property
    def is_cluster(self) -> bool:
        """Whether hosts are on machines of a cluster, which have only what they fetch."""
        return self.has_pods or bool(self.address)

    @property
    def has_complete_image(self) -> bool:
        """Whether the caller chose an image that has what the function needs."""
        return self.image not in ("", *MADE_IMAGES)

    @property
    def is_supervised(self) -> bool:
        """Whether a process on this machine leads the gang, which sees its hosts die; otherwise
        host 0 does, or a head."""
        return self.backend == "local"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without the empty fields."""
        return documents.drop_defaults(self)
