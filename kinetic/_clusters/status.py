"""The state of a cluster for `kinetic status` and `kinetic pool list`, with its present cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kinetic._backends.kubernetes.nodes import NodePool, live_accelerators, pools_of
from kinetic._backends.kubernetes.resources import LOCAL_QUEUES
from kinetic._clusters.bodies import limit_of, list_tpu_quotas
from kinetic._clusters.convergence import Doors, open_control_plane
from kinetic._clusters.observed import Document, is_own_pool, mode_of, slices_of
from kinetic._clusters.preview import CONTROL_PLANE, MACHINES
from kinetic._clusters.wanted import Mode, Wanted
from kinetic._core.accelerators.prices import SPOT, in_usd, price_of
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class PoolState:
    """A node pool; on Autopilot, all nodes of one kind.

    Attributes:
        name: the name of the pool.
        accelerator: the name for `accelerator=`, or the machine type.
        capacity: how the machines are obtained.
        nodes: the number of nodes that exist now.
        most: the largest number of nodes that the autoscaler may create; None on Autopilot.
        status: GKE's word for the state.
        own: true if `up` or `pool add` made the pool.
        usd_per_hour: the present cost of the nodes in US dollars per hour; None if unknown.
    """

    name: str
    accelerator: str
    capacity: str
    nodes: int
    most: int | None
    status: str
    own: bool
    usd_per_hour: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the pool's row in a table."""
        nodes = f"{self.nodes}" if self.most is None else f"{self.nodes} of {self.most}"
        price = "?" if self.usd_per_hour is None else in_usd(self.usd_per_hour)
        return self.name, self.accelerator, self.capacity, nodes, self.status, price


@dataclass(frozen=True)
class ClusterState:
    """A cluster, its node pools, queues and quotas."""

    COLUMNS = ("POOL", "ACCELERATOR", "CAPACITY", "NODES", "STATUS", "$ AN HOUR")

    wanted: Wanted
    cluster: Document
    pools: Sequence[PoolState]
    queues: Sequence[Document]
    quotas: Sequence[Document]

    @property
    def usd_per_hour(self) -> float:
        """The present cost in US dollars per hour, without nodes whose price is unknown."""
        return round(CONTROL_PLANE + sum(pool.usd_per_hour or 0.0 for pool in self.pools), 5)

    def to_json(self) -> Document:
        """Return the state as a JSON object."""
        return {
            "name": self.wanted.name,
            "project": self.wanted.project,
            "location": self.wanted.location,
            "mode": self.wanted.mode.value,
            "status": self.cluster.get("status"),
            "version": self.cluster.get("currentMasterVersion"),
            "pools": [dict(vars(pool)) for pool in self.pools],
            "queues": list(self.queues),
            "quotas": list(self.quotas),
            "usd_per_hour": self.usd_per_hour,
        }

    def list_facts(self) -> list[tuple[str, str]]:
        """Return what to print about the cluster, as pairs of a title and a text."""
        wanted, cluster = self.wanted, self.cluster
        queues = (f"{q['name']}: {q['admitted']} run, {q['pending']} wait" for q in self.queues)
        quotas = (f"{q['name']}: {q['used']} of {q['limit']:g}" for q in self.quotas)
        unknown = [pool.name for pool in self.pools if pool.usd_per_hour is None]
        rest = f", and {', '.join(unknown)}, whose price is unknown" if unknown else ""
        return [
            ("Cluster", f"{wanted.name}, {wanted.mode}, {cluster.get('status')}"),
            ("Place", f"{wanted.location} of {wanted.project}"),
            ("Version", str(cluster.get("currentMasterVersion") or "unknown")),
            ("Queues", "; ".join(queues) or "none"),
            ("TPU quotas", "; ".join(quotas) or "none"),
            ("Cost now", f"{in_usd(self.usd_per_hour)} an hour{rest}"),
        ]


def read_state(
    wanted: Wanted, doors: Doors, cluster: Document, own: Mapping[str, float]
) -> ClusterState:
    """Read the state of a cluster; `own` has the user's prices."""
    with open_control_plane(wanted, cluster, doors) as plane:
        nodes = plane.list_nodes()
        queues = [
            {
                "name": queue["metadata"]["name"],
                "pending": int((queue.get("status") or {}).get("pendingWorkloads") or 0),
                "admitted": int((queue.get("status") or {}).get("admittedWorkloads") or 0),
            }
            for queue in plane.read_queues(LOCAL_QUEUES)
        ]
    pools = list_pools(cluster, wanted.name, nodes, own)
    return ClusterState(wanted, cluster, pools, queues, _read_quotas(wanted, doors, pools))


def _read_quotas(wanted: Wanted, doors: Doors, pools: Sequence[PoolState]) -> list[Document]:
    used: dict[str, int] = {}
    for pool in pools:
        if pool.accelerator.startswith("tpu"):
            topology = resolve(pool.accelerator)
            name = topology.family + (SPOT if topology.spot else "")
            used[name] = used.get(name, 0) + topology.chips_per_host * pool.nodes
    buckets: dict[str, list[Document]] = {}
    quotas = []
    for name, metric, family in list_tpu_quotas():
        if metric not in buckets:
            buckets[metric] = doors.cloud.read_quota(metric)
        if limit := limit_of(buckets[metric], wanted.region, family):
            quotas.append({"name": name, "used": used.get(name, 0), "limit": limit})
    return quotas


def list_pools(
    cluster: Document, name: str, nodes: Sequence[Document], own: Mapping[str, float]
) -> list[PoolState]:
    """Return the node pools of a Standard cluster, or the kinds of nodes on Autopilot. Pure."""
    groups = pools_of(nodes)
    if mode_of(cluster) is Mode.AUTOPILOT:
        names = {row.pool: row.name for row in live_accelerators(nodes)}
        return [_describe_nodes(group, names.get(group.name, ""), own) for group in groups]
    rows = []
    for pool in cluster.get("nodePools") or ():
        config, slices = pool.get("config") or {}, slices_of(pool)
        count = sum(group.nodes for group in groups if group.name == pool["name"])
        most = int((pool.get("autoscaling") or {}).get("maxNodeCount") or count)
        machine = str(config.get("machineType") or "")
        topology = slices[0] if slices else None
        price = _price_nodes(topology, machine, count, own)
        accelerator, capacity = topology.name if topology else machine, _name_capacity(pool)
        status, is_own = str(pool.get("status") or ""), is_own_pool(pool, name)
        rows.append(
            PoolState(pool["name"], accelerator, capacity, count, most, status, is_own, price)
        )
    return rows


def _name_capacity(pool: Document) -> str:
    config = pool.get("config") or {}
    if values := (config.get("reservationAffinity") or {}).get("values"):
        return f"reservation {values[0]}"
    if (pool.get("queuedProvisioning") or {}).get("enabled"):
        return "queued provisioning"
    return (
        "flex-start" if config.get("flexStart") else "spot" if config.get("spot") else "on demand"
    )


def _describe_nodes(group: NodePool, name: str, own: Mapping[str, float]) -> PoolState:
    topology = resolve(name, spot=group.spot) if name else None
    status = "RUNNING" if group.ready == group.nodes else "STARTING"
    capacity = "spot" if group.spot else "on demand"
    price = _price_nodes(topology, group.machine, group.nodes, own)
    accelerator = topology.name if topology else group.machine
    return PoolState(group.name, accelerator, capacity, group.nodes, None, status, False, price)


def _price_nodes(
    topology: Topology | None, machine: str, nodes: int, own: Mapping[str, float]
) -> float | None:
    if not nodes:
        return 0.0
    if topology is None:
        return round(MACHINES[machine] * nodes, 5) if machine in MACHINES else None
    listed = price_of(topology, own)
    return None if listed is None else round(listed.usd_per_hour * nodes / topology.hosts, 5)
