"""Whether a cluster could ever run a job: asked before anything is sent.

In: a plan, the nodes of a cluster. Out: nothing, or an error that says what the cluster has. Pure.
A cluster that is only busy is no reason to refuse: the job waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kinetic._core.accelerators.topology import Topology
from kinetic._core.plan import Plan
from kinetic._core.quantities import amount_of, bytes_of
from kinetic._ray.jobs_api import RayNode
from kinetic.errors import PreflightError

_SLICE, _TYPE, _SHAPE = (f"ray.io/tpu-{name}" for name in ("slice-name", "pod-type", "topology"))
_MEMORY = "memory"
_UNITS = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


def check(plan: Plan, nodes: Sequence[RayNode], *, grows: bool = False) -> None:
    """Refuse a job that does not fit into the whole cluster, unless that may grow (`grows`).

    Raises:
        PreflightError: with what was asked for, and what is there.
    """
    topology = plan.topology
    least = plan.options.elastic.least if plan.options.elastic else plan.options.most_slices
    alive = [node for node in nodes if node.is_alive]
    needed = _list_needed(plan)
    if grows or _count_slices(topology, needed, alive) >= least:
        return
    raise PreflightError(
        f"The Ray cluster cannot hold this job: {_describe_job(topology, needed, least)}; "
        f"{_describe_cluster(needed, alive)}. Add nodes, or ask for less."
    )


def _list_needed(plan: Plan) -> dict[str, float]:
    """Return what each host takes, by Ray's names; first what the accelerator is made of."""
    topology, cpus, memory = plan.topology, plan.options.cpu, plan.options.memory
    unit = _UNITS[topology.kind]
    needed = {unit: 1.0 if unit == "CPU" else float(topology.chips_per_host)}
    if cpus:
        needed["CPU"] = amount_of(cpus)
    if memory:
        needed[_MEMORY] = bytes_of(memory)
    return needed


def _count_slices(topology: Topology, needed: Mapping[str, float], nodes: Sequence[RayNode]) -> int:
    """How many slices of this shape there are."""
    able = [
        node
        for node in nodes
        if all(node.resources.get(name, 0) >= amount for name, amount in needed.items())
    ]
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


def _describe_job(topology: Topology, needed: Mapping[str, float], slices: int) -> str:
    hosts = slices * topology.hosts
    many = f"{slices} slices of " if slices > 1 else ""
    noun = "host" if hosts == 1 else "hosts"
    each = " and ".join(_describe_amount(name, amount) for name, amount in needed.items())
    return f"{many}{topology.name} has {hosts} {noun} with {each} each"


def _describe_amount(name: str, amount: float) -> str:
    return f"{amount / 2**30:.3g} GiB" if name == _MEMORY else f"{amount:g} {name}"


def _describe_cluster(needed: Mapping[str, float], nodes: Sequence[RayNode]) -> str:
    unit, *others = needed
    found = Counter(
        f"{_name_node(node, unit)} ({_describe_node(node, unit, others)} on each)"
        for node in nodes
        if node.resources.get(unit)
    )
    if not found:
        return f"none of its nodes ({len(nodes)}) has {unit}"
    told = ", ".join(f"{count} of {what}" for what, count in sorted(found.items()))
    return f"its {len(nodes)} nodes are {told}"


def _describe_node(node: RayNode, unit: str, others: Sequence[str]) -> str:
    more = [_describe_amount(name, node.resources.get(name, 0)) for name in others]
    return ", ".join([f"{node.resources[unit]:g}", *more])


def _name_node(node: RayNode, unit: str) -> str:
    labels = node.labels
    return f"{labels[_TYPE]} {labels.get(_SHAPE, '')}".strip() if _TYPE in labels else unit
