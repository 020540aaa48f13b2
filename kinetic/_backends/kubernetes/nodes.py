"""The node pools of a cluster, from its nodes.

In: nodes as the API server sends them. Out: `NodePool`s, for `kinetic accelerators --live` and to
explain why a job has no nodes. Pure. A pool scaled to zero has no nodes and is not listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kinetic._backends.base import PoolRow
from kinetic._backends.kubernetes.observed import Document, condition, labels
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.accelerators.topology import Topology
from kinetic._core.values import dataclass

POOL_LABEL = "cloud.google.com/gke-nodepool"
TPU_LABEL = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
GPU_LABEL = "cloud.google.com/gke-accelerator"
SPOT_LABEL = "cloud.google.com/gke-spot"
RESERVATION_LABEL = "cloud.google.com/reservation-name"
MACHINE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
TPU, GPU = "google.com/tpu", "nvidia.com/gpu"
_PASSING_TAINTS = re.compile(r"\bnode\.kubernetes|cloudprovider|Autoscaler|karpenter|impending")


@dataclass(frozen=True)
class NodePool:
    """The nodes of one kind.

    Attributes:
        name: the name of the pool; "" for nodes outside a pool.
        accelerator: the label of its nodes, such as tpu-v6e-slice; "" for plain machines.
        topology: the topology of the slice that its nodes form, such as 4x4, or "".
        machine: the machine type.
        zone: the zone of the nodes.
        chips_each: the number of chips or GPUs of one node.
        nodes: the number of nodes that exist now.
        ready: the number of nodes that accept pods.
        spot: true if the cloud may take the nodes away.
        reservation: the name of their reservation, or "".
    """

    name: str
    accelerator: str
    topology: str
    machine: str
    zone: str
    chips_each: int
    nodes: int
    ready: int
    spot: bool
    reservation: str

    def __str__(self) -> str:
        kind = " ".join(part for part in (self.accelerator, self.topology) if part)
        counted = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{self.name or 'without a pool'} ({kind or self.machine or 'cpu'}, {counted})"


def pools_of(nodes: Iterable[Document]) -> tuple[NodePool, ...]:
    """Return the pools of a cluster: those with accelerators first, then by name."""
    members: dict[tuple[str, ...], list[Document]] = {}
    for node in nodes:
        by_name = labels(node)
        accelerator = by_name.get(TPU_LABEL) or by_name.get(GPU_LABEL) or ""
        kind = (by_name.get(TOPOLOGY_LABEL, ""), by_name.get(MACHINE_LABEL, ""))
        key = (by_name.get(POOL_LABEL, ""), accelerator, *kind, by_name.get(ZONE_LABEL, ""))
        members.setdefault(key, []).append(node)
    pools = [_pool(key, pool_nodes) for key, pool_nodes in members.items()]
    return tuple(sorted(pools, key=lambda p: (not p.accelerator, p.name, p.zone)))


def _pool(key: tuple[str, ...], nodes: list[Document]) -> NodePool:
    name, accelerator, topology, machine, zone = key
    node_labels = labels(nodes[0])
    return NodePool(
        name=name,
        accelerator=accelerator,
        topology=topology,
        machine=machine,
        zone=zone,
        chips_each=max(chips_of(node) for node in nodes),
        nodes=len(nodes),
        ready=sum(takes_pods(node) for node in nodes),
        spot=node_labels.get(SPOT_LABEL) == "true",
        reservation=node_labels.get(RESERVATION_LABEL, ""),
    )


def chips_of(node: Document) -> int:
    """Return the number of chips or GPUs that a node offers to pods."""
    offered = (node.get("status") or {}).get("allocatable") or {}
    return int(offered.get(TPU) or offered.get(GPU) or 0)


def amount_on(node: Document, resource: str) -> str:
    """Return the amount of a resource that a node offers to pods, as written; "" if unknown."""
    offered = (node.get("status") or {}).get("allocatable") or {}
    return str(offered.get(resource) or "")


def _tolerates(toleration: Document, taint: Document) -> bool:
    fits = toleration.get("operator") == "Exists" or toleration.get("value") == taint.get("value")
    return fits and all(toleration.get(k) in (None, "", taint.get(k)) for k in ("key", "effect"))


def takes_pods(node: Document) -> bool:
    """True if new pods may be scheduled on a node."""
    return condition(node, "Ready") is not None and not (node.get("spec") or {}).get(
        "unschedulable"
    )


def select_nodes(nodes: Iterable[Document], selector: Mapping[str, str]) -> list[Document]:
    """Return the nodes whose labels include all of `selector`."""
    return [n for n in nodes if all(labels(n).get(k) == v for k, v in selector.items())]


def select_open_nodes(nodes: Iterable[Document], pod: Document) -> list[Document]:
    """Return the nodes that a pod may run on: its spec selects them and tolerates their taints.
    Taints that come and go with a node's health are ignored."""

    def is_open(taint: Document) -> bool:
        passes = taint.get("effect") == "PreferNoSchedule" or _PASSING_TAINTS.search(taint["key"])
        return bool(passes) or any(_tolerates(t, taint) for t in pod.get("tolerations") or ())

    selected = select_nodes(nodes, pod.get("nodeSelector") or {})
    return [n for n in selected if all(map(is_open, (n.get("spec") or {}).get("taints") or ()))]


def live_accelerators(nodes: Iterable[Document]) -> tuple[PoolRow, ...]:
    """Return the node pools with accelerators, for `kinetic accelerators --live`."""
    catalog = catalog_rows()
    return tuple(_make_row(pool, catalog) for pool in pools_of(nodes) if pool.accelerator)


def _make_row(pool: NodePool, catalog: Iterable[Topology]) -> PoolRow:
    fitting = [row for row in catalog if _fits(row, pool)]
    named = next((r for r in fitting if r.machine_type == pool.machine), None)
    row = named or next(iter(fitting), None)
    return PoolRow(
        row.name if row else "",
        pool.accelerator,
        pool.nodes,
        pool.ready,
        pool.chips_each,
        pool.ready // max(1, row.hosts) if row else 0,
        pool.name,
        pool.topology,
        pool.spot,
    )


def _fits(row: Topology, pool: NodePool) -> bool:
    if row.gke_accelerator != pool.accelerator:
        return False
    if row.kind == "tpu":
        return row.shape_text == pool.topology
    return row.chips_per_host == pool.chips_each
