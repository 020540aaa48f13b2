"""The place of a job: everything needed to reach the job from any process.

A `Place` is part of the plan and of the job's reference. A backend is built from it and a store.
"""

from __future__ import annotations

from typing import Any

from kinetic._core import documents
from kinetic._core.values import dataclass

JOB, JOBSET = "gke", "pathways"
"""Names of the Kubernetes backends, for a Job of one host and for a JobSet of several hosts. Older
scripts use these names; Pathways itself runs only with `controller="single"`."""
BACKENDS = (JOB, JOBSET, "local", "ray")

MULTI_TIER = "multi-tier"
"""Local storage that GKE's multi-tier checkpointing keeps on the node."""
ALL_DEVICES = "all"

MADE_IMAGES = ("bundled", "prebuilt")
"""Images that kinetic makes; any other is a URI."""


@dataclass(frozen=True)
class Place(documents.Record, called="The place of the job"):
    """The place of a job. Fields that do not apply, or were not set, are "".

    Attributes:
        backend: the backend that runs the job, one of `BACKENDS`.
        stands_in_for: the requested backend, if the local backend simulates it.
        cluster: the cluster's name, or its address if it has no name.
        address: address of the Jobs API of a Ray cluster.
        context: the kubeconfig's current context at submission, if no cluster was named.
        project, zone: the cloud project and zone of the cluster.
        namespace: the namespace in the cluster.
        image: the image that hosts run.
        image_repo: the repository of prebuilt images.
        queue: the queue that admits the job.
        service_account: the service account of the pods; they get a token only if it is named.
        session: id of the session whose slices run the job.
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
    session: str = ""

    @property
    def requested(self) -> str:
        """The backend that was requested, even if the local one stands in for it."""
        return self.stands_in_for or self.backend

    @property
    def has_pods(self) -> bool:
        """True if hosts are pods of a Kubernetes cluster."""
        return self.backend in (JOB, JOBSET)

    @property
    def is_cluster(self) -> bool:
        """True if hosts run on machines of a cluster, which have only the files that they fetch."""
        return self.has_pods or bool(self.address)

    @property
    def has_complete_image(self) -> bool:
        """True if the caller chose an image of their own, which has all that the function needs."""
        return self.image not in ("", *MADE_IMAGES)

    @property
    def is_supervised(self) -> bool:
        """True if a process on this machine, which sees its hosts die, leads the gang. Otherwise
        host 0 or a head leads it."""
        return self.backend == "local"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without the empty fields."""
        return documents.drop_defaults(self)
