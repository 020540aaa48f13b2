"""Reserves a job's machines from Ray, and starts the actors of its hosts on them. Runs in the job's
driver: when a driver ends, Ray ends everything that the driver has reserved or started.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import field
from typing import Any

import ray
from ray._private import state
from ray._private.accelerators.tpu import infer_tpu_pod_type_from_topology
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, RayError
from ray.util import tpu
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kinetic._core.accelerators.topology import Topology
from kinetic._core.values import dataclass
from kinetic._host.ray.actor import ActorPlace, HostActor
from kinetic._ray.refusals import last_words
from kinetic.errors import SubmitError

_POLL_S = 1.0
_LEAST_CPUS = 1.0
_POD_TYPE, _WORKER_ID = "ray.io/tpu-pod-type", "ray.io/tpu-worker-id"
_SLICE_NAME = "ray.io/tpu-slice-name"


class NoLongerWanted(Exception):
    """The job no longer needs a slice, or the slice could not be reserved in time."""


class MachinesLost(Exception):
    """A machine of a reserved slice was lost before its host has started."""


@dataclass(frozen=True)
class HostPlace:
    """One host of a reserved slice.

    Attributes:
        actor: handle of its actor.
        node: Ray's id of its node.
        address: address at which the other hosts reach it.
        about: machine and interpreter of the actor.
    """

    actor: Any = field(repr=False)
    node: str
    address: str
    about: ActorPlace


@dataclass(frozen=True)
class Needs:
    """The resources that one slice needs.

    Attributes:
        topology: shape of the slice.
        cpus: processors of each host.
        memory_bytes: memory of each host; 0 if none was requested.
    """

    topology: Topology
    cpus: float = _LEAST_CPUS
    memory_bytes: int = 0

    def for_host(self) -> dict[str, float]:
        """Return the resources of one host, by Ray's names."""
        resources: dict[str, float] = {"CPU": self.cpus}
        if self.memory_bytes:
            resources["memory"] = self.memory_bytes
        if self.topology.kind == "gpu":
            resources["GPU"] = self.topology.chips_per_host
        elif self.topology.kind == "tpu":
            resources["TPU"] = self.topology.chips_per_host
        return resources


class Reservation:
    """The machines of one slice, all of them or none.

    Attributes:
        nodes: Ray's ids of the machines' nodes; () until they are reserved.
    """

    def __init__(self, needs: Needs) -> None:
        self.nodes: Sequence[str] = ()
        self._needs = needs
        self._head: PlacementGroup | None = None
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []

    def reserve(self, *, until: float, is_wanted: Callable[[], bool]) -> None:
        """Wait for all machines of a slice.

        Raises:
            NoLongerWanted: the machines were not free until the monotonic time `until`, or
                `is_wanted` returned False.
        """
        try:
            while not self._reserve_once(until, is_wanted):
                self.release()
        except BaseException:
            self.release()
            raise

    def _reserve_once(self, until: float, is_wanted: Callable[[], bool]) -> bool:
        """Try to reserve the machines; return False if the chosen slice has lost a machine."""
        topology, resources = self._needs.topology, self._needs.for_host()
        bundles = [dict(resources) for _ in range(topology.hosts)]
        strategy = "STRICT_SPREAD" if topology.multi_host else "STRICT_PACK"
        labels = self._choose_slice(until, is_wanted) if topology.kind == "tpu" else {}
        chosen, selectors = labels.get(_SLICE_NAME), [labels] * topology.hosts if labels else None
        self._group = placement_group(bundles, strategy=strategy, bundle_label_selector=selectors)
        while not self._group.wait(_POLL_S):
            _check(until, is_wanted)
            if chosen and self._count_machines()[chosen] < topology.hosts:
                return False
        self.nodes = _find_nodes(self._group, topology.hosts)
        return True

    def _choose_slice(self, until: float, is_wanted: Callable[[], bool]) -> dict[str, str]:
        """Choose a free TPU slice, and reserve it by a resource that only its first machine has.
        Return the labels that all machines of the slice have. (Ray's own trainer starts two
        workers to read the slice's name, which takes seconds.)"""
        pod_type = _pod_type_of(self._needs.topology)
        if not self._needs.topology.multi_host:  # This excludes single machines of larger slices.
            return {_POD_TYPE: pod_type}
        first, selector = {_POD_TYPE: pod_type, _WORKER_ID: "0"}, dict[str, str]()
        while self._head is None or not self._head.wait(_POLL_S):
            _check(until, is_wanted)
            counts = self._count_machines()
            broken = [n for n, count in counts.items() if count < self._needs.topology.hosts]
            others = {_SLICE_NAME: f"!in({','.join(sorted(broken))})"} if broken else {}
            if selector != (selector := first | others):
                self.release()
                head = [{f"TPU-{pod_type}-head": 1.0}]
                self._head = placement_group(head, bundle_label_selector=[selector])
        (node,) = _find_nodes(self._head, 1)
        (labels,) = (
            node_about["Labels"] for node_about in ray.nodes() if node_about["NodeID"] == node
        )
        return {_SLICE_NAME: labels[_SLICE_NAME]}

    def _count_machines(self) -> Counter[str]:
        """Count the machines of each slice of this shape that are alive and not draining."""
        draining, counts = find_draining(), Counter[str]()
        for node in ray.nodes():
            labels = node["Labels"]
            if node["Alive"] and labels.get(_POD_TYPE) == _pod_type_of(self._needs.topology):
                counts[labels.get(_SLICE_NAME, "")] += node["NodeID"] not in draining
        return counts

    def start_actors(self, *, until: float, is_wanted: Callable[[], bool]) -> list[HostPlace]:
        """Start the actors of all hosts; return them in the order of their machines in the slice.

        Raises:
            NoLongerWanted: see `reserve`.
            MachinesLost: an actor has died, or its machine is lost.
            RayError: an actor could not be started.
        """
        needed = self._needs.for_host()
        kind = ray.remote(HostActor)
        for index in range(self._needs.topology.hosts):
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            resources = {n: v for n, v in needed.items() if n not in ("CPU", "GPU", "memory")}
            options: dict[str, Any] = {
                "num_cpus": needed["CPU"],
                "num_gpus": needed.get("GPU", 0),
                "memory": needed.get("memory"),
                "resources": resources,
                "scheduling_strategy": strategy,
                "max_restarts": 0,
                "max_concurrency": 2,  # For `take_away` during `run`.
            }
            self._actors.append(kind.options(**options).remote())
        descriptions = [actor.describe.remote() for actor in self._actors]
        while ray.wait(descriptions, num_returns=len(descriptions), timeout=_POLL_S)[1]:
            _check(until, is_wanted)
            self._check_machines()
        try:
            abouts: list[ActorPlace] = ray.get(descriptions)
        except (ActorDiedError, ActorUnavailableError, NodeDiedError) as error:
            raise MachinesLost(describe_death(error)) from error
        places = [
            HostPlace(actor, node, _address_of(node), about)
            for actor, node, about in zip(self._actors, self.nodes, abouts, strict=True)
        ]
        return sorted(places, key=lambda place: place.about.worker)

    def _check_machines(self) -> None:
        """Check that no machine was lost. Ray itself would wait forever for its return.

        Raises:
            MachinesLost: a machine was lost.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        table = ray.util.placement_group_table(self._group)
        if not alive.issuperset(self.nodes) or table["state"] != "CREATED":
            raise MachinesLost("A node was lost.")

    def release(self) -> None:
        """End all actors and everything that they started, and free the machines. Idempotent."""
        self.nodes, actors, self._actors = (), self._actors, []
        for actor in actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        for group in filter(None, (self._group, self._head)):
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(group)
        self._group = self._head = None


def _find_nodes(group: PlacementGroup | None, count: int) -> list[str]:
    table = ray.util.placement_group_table(group)
    return [table["bundles_to_node_id"][index] for index in range(count)]


def find_draining() -> frozenset[str]:
    """Return the ids of draining nodes, on which Ray starts nothing any more."""
    return frozenset(state.state.get_draining_nodes())


def _pod_type_of(topology: Topology) -> str:
    """Return Ray's label for machines of such a slice, if the slice has several machines."""
    generation = tpu.get_tpu_version_from_type(topology.family)
    return str(infer_tpu_pod_type_from_topology(topology.shape_text, f"TPU-{generation.upper()}"))


def connect() -> str:
    """Connect this driver to its cluster; return the address of this node.

    Raises:
        SubmitError: the driver cannot connect.
    """
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False)
    except (RayError, RuntimeError, ConnectionError) as error:
        raise SubmitError(f"The driver cannot connect to its Ray cluster: {error}") from error
    return str(ray.util.get_node_ip_address())


def find_address() -> str:
    """Return the address at which nodes reach the cluster's control store."""
    return str(ray.get_runtime_context().gcs_address)


def locate_store(uri: str) -> str:
    """Return the URI with which nodes reach the store. A store on the cluster's head is reached
    through the dashboard, whose address may differ for clients outside the cluster."""
    from ray._private import worker

    if not uri.startswith("ray+"):
        return uri
    return f"ray+http://{worker.global_worker.node.address_info['webui_url']}"


def take_package(name: str) -> bytes | None:
    """Return and delete a package in Ray's control store (GCS; not Google's Cloud Storage); None if
    it does not exist."""
    from ray.experimental import internal_kv

    key = f"gcs://{name}".encode()
    package = internal_kv._internal_kv_get(key)
    internal_kv._internal_kv_del(key)
    return None if package is None else bytes(package)


def disconnect() -> None:
    """Disconnect this driver from the cluster."""
    ray.shutdown()


def run_program(place: HostPlace, variables: Mapping[str, str]) -> Future[tuple[int, str]]:
    """Have an actor run the program of its host."""
    future: Future[tuple[int, str]] = place.actor.run.remote(dict(variables)).future()
    return future


def kill_program(place: HostPlace) -> None:
    """Kill an actor with the program of its host."""
    ray.kill(place.actor)


def take_away(place: HostPlace) -> None:
    """Tell the program of a host that its node is draining."""
    place.actor.take_away.remote()


def describe_death(error: BaseException) -> str:
    """Return a sentence about the death of an actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "runtime env" in lines[0]:  # Its setup failed: the cause is in the last lines.
        return last_words(str(error))
    cause = next((line for line in lines if "unexpectedly" in line or "killed" in line), "")
    return cause or (lines[0] if lines else type(error).__name__)


def describe_lack(needs: Needs, slices: int) -> str:
    """Return a sentence about the resources that `slices` waiting slices need and the cluster
    has."""
    resources = needs.for_host()
    alive, draining = [node for node in ray.nodes() if node["Alive"]], find_draining()
    fitting = [
        node["Resources"]
        for node in alive
        if _is_of_shape(node, needs.topology) and node["NodeID"] not in draining
    ]
    able = [node for node in fitting if all(node.get(n, 0) >= v for n, v in resources.items())]
    hosts = slices * needs.topology.hosts
    needed = ", ".join(f"{value:g} {name}" for name, value in resources.items())
    wanted = f"{hosts} node{'s' if hosts > 1 else ''} with {needed} each"
    free = ray.available_resources()
    have = _add_up(node["Resources"] for node in alive)
    rest = ", ".join(
        f"{free.get(name, 0):g} of {have[name]:g} {name} free" for name in resources if name in have
    )
    nodes = f"{len(able)} of {len(alive)} nodes could take a host"
    return f"it waits for {wanted}; the cluster has {rest or 'none of that'}, and {nodes}"


def _is_of_shape(node: Mapping[str, Any], topology: Topology) -> bool:
    """True unless a machine belongs to a TPU slice of another shape."""
    own = _pod_type_of(topology) if topology.kind == "tpu" else ""
    return not own or node["Labels"].get(_POD_TYPE, own) == own


def _add_up(nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in nodes:
        for name, value in node.items():
            total[name] = total.get(name, 0) + value
    return total


def _address_of(node_id: str) -> str:
    nodes: Sequence[Mapping[str, Any]] = ray.nodes()
    return next((str(n["NodeManagerAddress"]) for n in nodes if n["NodeID"] == node_id), "")


def _check(until: float, is_wanted: Callable[[], bool]) -> None:
    if not is_wanted() or time.monotonic() > until:
        raise NoLongerWanted
