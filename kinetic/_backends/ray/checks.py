"""The checks of a Ray cluster for `kinetic doctor`, and its machines for `kinetic accelerators
--live`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from kinetic._backends.base import PoolRow
from kinetic._backends.ray import backend
from kinetic._config.settings import Settings
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.values import dataclass
from kinetic._ray import store_servers
from kinetic._ray.jobs_api import JobsApi, JobsApiLimits, RayNode
from kinetic.errors import KineticError, PreflightError

_LIMITS = JobsApiLimits(connect_s=5.0, read_s=20.0, tries=2)
_RESOURCES = ("CPU", "GPU", "TPU")
_TYPE, _SHAPE = "ray.io/tpu-pod-type", "ray.io/tpu-topology"


@dataclass(frozen=True)
class RayFacts:
    """The facts about a cluster.

    Attributes:
        address: the address of its dashboard.
        fault: why the dashboard does not answer; "" if it does.
        ray: the version of Ray.
        nodes: the living nodes.
        python: the version of Python; "" if unknown.
        has_server: True if the store server runs now.
    """

    address: str
    fault: str = ""
    ray: str = ""
    nodes: tuple[RayNode, ...] = ()
    python: str = ""
    has_server: bool = False


def gather(api: JobsApi) -> RayFacts:
    """Read the facts about a cluster."""
    try:
        version, python = api.versions()
        nodes = tuple(node for node in api.nodes() if node.is_alive)
        runs = store_servers.is_running(api)
    except KineticError as error:
        return RayFacts(api.address, str(error))
    return RayFacts(api.address, "", version, nodes, python, runs)


def check(settings: Settings) -> tuple[Finding, ...]:
    """Check that the configured cluster can run jobs."""
    try:
        api = backend.open_api(backend.find_address(settings), limits=_LIMITS)
    except KineticError as error:
        return (problem("ray", str(error)),)
    try:
        facts = gather(api)
    finally:
        api.close()
    return judge(facts, settings.store)


def judge(
    facts: RayFacts, store: str, python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"
) -> tuple[Finding, ...]:
    """Return the findings on a cluster. Pure.

    Args:
        facts: the facts about the cluster.
        store: the address of the jobs' store.
        python: the version of Python of this process.
    """
    if facts.fault:
        return (problem("ray", facts.fault),)
    findings = (_check_versions(facts, python), _check_resources(facts))
    return (*findings, *_check_store(facts, store))


def _check_versions(facts: RayFacts, python: str) -> Finding:
    try:
        backend.check_versions(facts.ray, facts.python, python)
    except PreflightError as error:
        return problem("ray", str(error))
    runs = f"Ray {facts.ray}" + (f" with Python {facts.python}" if facts.python else "")
    return ok("ray", f"{runs} answers at {facts.address}.")


def _check_resources(facts: RayFacts) -> Finding:
    total: Counter[str] = Counter()
    for node in facts.nodes:
        total.update({n: int(node.resources[n]) for n in _RESOURCES if node.resources.get(n)})
    amounts = ", ".join(f"{count} {name}" for name, count in sorted(total.items())) or "nothing"
    many = f"{len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''}"
    if not total:
        return problem(
            "ray resources",
            f"None of the cluster's {many} offers processors, GPUs or TPUs.",
            "Start nodes with resources, for example `ray start --num-cpus=4`.",
        )
    return ok("ray resources", f"{many} with {amounts}.")


def _check_store(facts: RayFacts, store: str) -> list[Finding]:
    if not store.startswith("ray+"):
        return []
    if facts.has_server:
        return [ok("store", "The store lies on the cluster's head; its server runs.")]
    text = "The store lies on the cluster's head; its server starts with the first job."
    lasting = "Set KINETIC_STORE to a bucket to keep jobs longer than the cluster's head."
    if len({node.address for node in facts.nodes}) > 1 and "127.0.0.1" in facts.address:
        return [warn("store", f"{text} Its nodes must reach the dashboard.", lasting)]
    return [ok("store", text)]


def list_resources(settings: Settings) -> tuple[PoolRow, ...]:
    """List the machines that the configured cluster has now.

    Raises:
        UsageError, PreflightError: there is no such cluster, or it refuses the login.
        BackendUnavailable: the cluster does not answer.
    """
    api = backend.open_api(backend.find_address(settings), limits=_LIMITS)
    try:
        return collect_resources(api.nodes())
    finally:
        api.close()


def collect_resources(nodes: Iterable[RayNode]) -> tuple[PoolRow, ...]:
    """Return the living nodes by kind. Pure."""
    counts: Counter[tuple[str, str, float]] = Counter()
    for node in nodes:
        if node.is_alive:
            counts[_kind_of(node)] += 1
    return tuple(_name_resource(*kind, count) for kind, count in sorted(counts.items()))


def _kind_of(node: RayNode) -> tuple[str, str, float]:
    for name in ("TPU", "GPU"):
        if node.resources.get(name):
            kind = node.labels.get(_TYPE if name == "TPU" else "ray.io/accelerator-type", "")
            return f"{name} {kind}".strip(), node.labels.get(_SHAPE, ""), node.resources[name]
    return "CPU", "", node.resources.get("CPU", 0.0)


def _name_resource(kind: str, topology: str, amount: float, nodes: int) -> PoolRow:
    generation = kind.removeprefix("TPU ").partition("-")[0]
    if not topology:
        name = "cpu" if kind == "CPU" and amount else ""  # "cpu:8" would be eight devices
        return PoolRow(name, kind, nodes, nodes, amount, nodes)
    row = next(
        (
            row
            for row in catalog_rows()
            if row.kind == "tpu"
            and row.shape_text == topology
            and row.chips_per_host == amount
            and row.family.replace("tpu", "v") == generation
        ),
        None,
    )
    slices = nodes // row.hosts if row else 0
    return PoolRow(row.name if row else "", kind, nodes, nodes, amount, slices, topology=topology)
