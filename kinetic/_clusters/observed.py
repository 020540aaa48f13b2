"""The state of the cloud, as its APIs have just answered. Nothing else remembers it.

In: documents of Google's REST interfaces and of Kubernetes. Out: a value to compare. Pure.
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
"""The states of clusters and node pools in which GKE works on them."""


@dataclass(frozen=True)
class Observed:
    """Answers of the APIs.

    Attributes:
        number: the project's number.
        services: the names of the enabled APIs.
        machines: the machine types that the cluster's zone has; empty if not asked.
        quotas: the chips or GPUs that the region allows, by accelerator; missing if unknown.
        cluster: GKE's document of the cluster; None if there is none.
        elsewhere: the other places that have a cluster of this name; they share the bucket.
        bucket: the bucket's document; None if there is none.
        members: the members of the bucket's role for objects.
        objects: the metadata of each object of the cluster that `up` asked for, by kind and name;
            missing if there is none.
        caller: the cluster's name for the user; "" while no API server answers.
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
        """True if the bucket has the label, and is of this project: names of buckets are global,
        and anybody may have taken this one."""
        bucket = self.bucket or {}
        return is_own(bucket, name) and str(bucket.get("projectNumber")) == self.number

    @property
    def pools(self) -> dict[str, Document]:
        """The cluster's node pools by name."""
        return {pool["name"]: pool for pool in (self.cluster or {}).get("nodePools") or ()}


def mode_of(cluster: Document) -> Mode:
    """Return the kind of a cluster on Google Cloud."""
    is_autopilot = (cluster.get("autopilot") or {}).get("enabled")
    return Mode.AUTOPILOT if is_autopilot else Mode.STANDARD


def is_own(document: Document, name: str) -> bool:
    """True if `up` made a cluster, a bucket, or the object with this metadata, for this cluster's
    name."""
    labels = document.get("resourceLabels") or document.get("labels") or {}
    return bool(labels.get(LABEL) == name)


def is_own_pool(pool: Document, name: str) -> bool:
    """True if `up` or `pool add` made a node pool for this cluster's name."""
    labels = (pool.get("config") or {}).get("resourceLabels") or {}
    return bool(labels.get(LABEL) == name)


def slices_of(pool: Document) -> list[Topology]:
    """Return the slices for which a node pool has room: [] for machines without chips."""
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
