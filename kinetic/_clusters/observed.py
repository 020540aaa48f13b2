"""The present state of the cloud, as its APIs have just reported it. It is stored nowhere.

In: documents of Google's REST interfaces and of Kubernetes. Out: an `Observed`, to compare with a
`Wanted`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from kinetic._clusters.wanted import LABEL, Mode
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.values import dataclass

Document = dict[str, Any]
APPLIED = "kinetic.dev/applied"
"""The annotation with the digest of an object as `up` applied it."""
BUSY = ("PROVISIONING", "RECONCILING", "STOPPING")
"""The states of clusters and node pools while GKE is changing them."""


@dataclass(frozen=True)
class Observed:
    """The state of a cluster, and of everything that belongs to it.

    Attributes:
        number: the project's number.
        services: the names of the enabled APIs.
        machines: the machine types that the cluster's zone has; empty if not asked.
        quotas: the chips or GPUs that the quota of the region allows, by accelerator; an
            accelerator with an unknown quota is missing.
        cluster: GKE's document of the cluster; None if there is none.
        elsewhere: the other locations that have a cluster of this name; it uses the same bucket.
        bucket: the bucket's document; None if there is none.
        members: the members that have the role for objects on the bucket.
        objects: the metadata of those objects inside the cluster that `up` makes and that exist, by
            kind and name.
        caller: the name by which the cluster knows the user; "" while no API server answers.
    """

    number: str = ""
    services: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()
    quotas: Mapping[str, float] = field(default_factory=dict)
    cluster: Document | None = None
    elsewhere: tuple[str, ...] = ()
    bucket: Document | None = None
    members: frozenset[str] = frozenset()
    objects: Mapping[str, Document] = field(default_factory=dict)
    caller: str = ""

    def owns_bucket(self, name: str) -> bool:
        """True if the bucket has the label and belongs to this project. Names of buckets are
        global, so another project may have a bucket of this name."""
        bucket = self.bucket or {}
        return is_own(bucket, name) and str(bucket.get("projectNumber")) == self.number

    @property
    def pools(self) -> dict[str, Document]:
        """The cluster's node pools by name."""
        return {pool["name"]: pool for pool in (self.cluster or {}).get("nodePools") or ()}


def mode_of(cluster: Document) -> Mode:
    """Return the mode of a cluster on Google Cloud."""
    is_autopilot = (cluster.get("autopilot") or {}).get("enabled")
    return Mode.AUTOPILOT if is_autopilot else Mode.STANDARD


def is_own(document: Document, name: str) -> bool:
    """True if `up` made this for the cluster `name`. `document` is that of a cluster or bucket, or
    the metadata of an object."""
    labels = document.get("resourceLabels") or document.get("labels") or {}
    return bool(labels.get(LABEL) == name)


def is_own_pool(pool: Document, name: str) -> bool:
    """True if `up` or `pool add` made this node pool for the cluster `name`."""
    labels = (pool.get("config") or {}).get("resourceLabels") or {}
    return bool(labels.get(LABEL) == name)


def slices_of(pool: Document) -> list[Topology]:
    """Return the slices for which a node pool has room; [] for machines without chips."""
    config, scaling = pool.get("config") or {}, pool.get("autoscaling") or {}
    shape = (pool.get("placementPolicy") or {}).get("tpuTopology")
    gpus = [
        (gpu.get("acceleratorType"), int(gpu.get("acceleratorCount") or 0))
        for gpu in config.get("accelerators") or ()
    ]
    nodes = int(scaling.get("maxNodeCount") or pool.get("initialNodeCount") or 0)
    for row in catalog_rows():
        has_chips = row.kind == "tpu" or (row.gke_accelerator, row.chips) in gpus
        has_shape = row.shape_text == shape if shape else not row.multi_host
        if row.machine_type == config.get("machineType") and has_chips and has_shape:
            return [resolve(row.name, spot=bool(config.get("spot")))] * (nodes // row.hosts)
    return []


def key_of(document: Document) -> str:
    """Return the kind and name of an object: "Role ml/kinetic"."""
    meta = document["metadata"]
    space = f"{meta['namespace']}/" if meta.get("namespace") else ""
    return f"{document['kind']} {space}{meta['name']}"
