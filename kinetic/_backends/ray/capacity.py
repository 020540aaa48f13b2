"""Whether a cluster could ever run a job: asked before anything is sent.

In: a plan, the nodes of a cluster. Out: nothing, or an error that says what the cluster has. Pure.
A cluster that is only busy is no reason to refuse: the job waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kinetic._core.accelerators.topology import Topology
from kinetic._core.plan import Plan
from kinetic._ray.jobs_api import RayNode
from kinetic.errors import PreflightError

_SLICE, _TYPE, _SHAPE = (f"ray.io/tpu-{name}" for name in ("slice-name", "pod-type", "topology"))
_UNITS = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


def check(plan: Plan, nodes: Sequence[RayNode], *, grows: bool = False) -> None:
    """Refuse a job that does not fit into the whole cluster, unless that may grow (`grows`).

    Raises:
        PreflightError: with what was asked for, and what is there.
    """
    topology = plan.topology
    least = plan.options.elastic.least if plan.options.elastic else plan.options.most_slices
    alive = [node for node in nodes if node.is_alive]
    fitting = _count_slices(topology, alive)
    if grows or fitting >= least:
        return
    raise PreflightError(
        f"The Ray cluster cannot hold this job: {_describe_job(topology, least)}; "
        f"{_describe_cluster(topology, alive)}. Add nodes, or choose another accelerator."
    )


def _count_slices(topology: Topology, nodes: Sequence[RayNode]) -> int:
    """How many slices of this shape there are."""
    unit, chips = _UNITS[topology.kind], topology.chips_per_host
    needed = 1 if topology.kind == "cpu" else chips
    able = [node for node in nodes if node.resources.get(unit, 0) >= needed]
    if topology.kind != "tpu":
        return len(able) // topology.hosts
    own = [node for node in able if _is_of_slice(topology, node)]
    if not topology.multi_host:
        return len(own)
    hosts = Counter(node.labels.get(_SLICE, "") for node in own)
    return sum(count >= topology.hosts for name, count in hosts.items() if name)


def _is_of_slice(topology: Topology, node: RayNode) -> bool:
    """Whether a node belongs to a slice of this shape. The number in its type may be one of
    cores."""
    generation = node.labels.get(_TYPE, "").partition("-")[0]
    shape = node.labels.get(_SHAPE, topology.shape_text)
    return generation == topology.family.replace("tpu", "v") and shape == topology.shape_text


def _describe_job(topology: Topology, slices: int) -> str:
    hosts, unit = slices * topology.hosts, _UNITS[topology.kind]
    each = 1 if topology.kind == "cpu" else topology.chips_per_host
    many = f"{slices} slices of " if slices > 1 else ""
    noun = "host" if hosts == 1 else "hosts"
    return f"{many}{topology.name} has {hosts} {noun} with {each} {unit} each"


def _describe_cluster(topology: Topology, nodes: Sequence[RayNode]) -> str:
    unit = _UNITS[topology.kind]
    found = Counter(
        f"{_name_node(node, unit)} ({node.resources[unit]:g} on each)"
        for node in nodes
        if node.resources.get(unit)
    )
    if not found:
        return f"none of its nodes ({len(nodes)}) has {unit}"
    told = ", ".join(f"{count} of {what}" for what, count in sorted(found.items()))
    return f"its {len(nodes)} nodes are {told}"


def _name_node(node: RayNode, unit: str) -> str:
    labels = node.labels
    return f"{labels[_TYPE]} {labels.get(_SHAPE, '')}".strip() if _TYPE in labels else unit
