"""The cluster that the user wants, according to the options of a command.

In: options. Out: a `Wanted`, or an error that names the option to change. Pure: no service is
called, so that mistakes are reported before any login.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from kinetic._clusters import zones
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.values import dataclass
from kinetic.errors import PreflightError, UsageError

LABEL = "kinetic-cluster"
"""The label of everything that `up` makes. Its value is the cluster's name."""
ACCOUNT = "kinetic"
"""The service account of pods."""
QUEUE = "kinetic"
DEFAULT_POOL = "default-pool"
GPU_EXTRA_NODES = 10
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?")
_PROJECT = re.compile(r"[-a-z0-9.:]+")
_LOCATION = re.compile(r"[a-z]+-[a-z]+\d+(?:-[a-z0-9]+)?")
LONGEST_BUCKET = 63


class Mode(StrEnum):
    """The kinds of clusters."""

    AUTOPILOT = "Autopilot"
    STANDARD = "Standard"
    KIND = "kind"


class Capacity(StrEnum):
    """The ways to obtain machines."""

    ON_DEMAND = "on demand"
    SPOT = "spot"
    RESERVATION = "reservation"
    FLEX_START = "flex-start"
    QUEUED = "queued provisioning"


@dataclass(frozen=True)
class Pool:
    """A node pool of a Standard cluster: one TPU slice of several hosts, or machines of one kind.

    Attributes:
        name: the name of the pool.
        topology: the slice, or the machine.
        least, most: the smallest and the largest number of nodes for the autoscaler.
        capacity: how the machines are obtained.
        reservation: the name of the reservation, or "".
        networks: true for several network devices (DRANET).
    """

    name: str
    topology: Topology
    least: int
    most: int
    capacity: Capacity = Capacity.ON_DEMAND
    reservation: str = ""
    networks: bool = False


@dataclass(frozen=True)
class Wanted:
    """A cluster and what belongs to it.

    Attributes:
        name, project: the cluster's name and its project.
        location: a zone, or for Autopilot a region.
        mode: the kind of cluster.
        slices: the slices that jobs can use, for the queue's quota and for prices.
        pools: the node pools to create.
        namespace: the namespace of jobs.
        bucket: the name of the store's bucket.
        manifests: the names of released manifests to apply, in their order.
        has_queue: true for a queue with room for the slices.
        multi_tier: true for GKE's multi-tier checkpoints.
        networks: true for several network devices (DRANET).
    """

    name: str
    project: str
    location: str
    mode: Mode = Mode.AUTOPILOT
    slices: tuple[Topology, ...] = ()
    pools: tuple[Pool, ...] = ()
    namespace: str = "default"
    bucket: str = ""
    manifests: tuple[str, ...] = ()
    has_queue: bool = False
    multi_tier: bool = False
    networks: bool = False

    @property
    def region(self) -> str:
        """The region of the cluster and of its bucket."""
        return zones.region_of(self.location)

    @property
    def parent(self) -> str:
        """The path of the location in GKE's interface."""
        return f"projects/{self.project}/locations/{self.location}"

    @property
    def path(self) -> str:
        """The path of the cluster in GKE's interface."""
        return f"{self.parent}/clusters/{self.name}"

    @property
    def context(self) -> str:
        """The name of the cluster's context in a kubeconfig, as gcloud writes it."""
        if self.mode is Mode.KIND:
            return f"kind-{self.name}"
        return f"gke_{self.project}_{self.location}_{self.name}"


def check_name(name: str) -> str:
    """Check that GKE accepts this name for a cluster, and return it.

    Raises:
        UsageError: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"GKE does not accept the name {name!r}: up to 40 lower-case letters, digits and '-', "
            "beginning with a letter."
        )
    return name


def check_project(project: str) -> str:
    """Check that this may be the id of a Google Cloud project, and return it.

    Raises:
        UsageError: the id is not valid.
    """
    if not _PROJECT.fullmatch(project):
        raise UsageError(
            f"{project!r} is not the id of a project: lower-case letters, digits and '-'. `gcloud "
            "projects list` shows the ids of yours."
        )
    return project


def name_bucket(project: str, cluster: str) -> str:
    """Return the name of a cluster's bucket."""
    name = f"{project.replace(':', '-').replace('.', '-')}-kn-{cluster}-store"
    if len(name) > LONGEST_BUCKET:
        raise UsageError(
            f"The bucket's name {name} would have {len(name)} letters, and {LONGEST_BUCKET} is the "
            "most. Choose a shorter name with --cluster."
        )
    return name


def choose_location(location: str, slices: Sequence[Topology], *, standard: bool) -> str:
    """Return a cluster's location: `location` if given, else the first zone with the accelerators.

    Args:
        location: a zone or region, or "".
        slices: the accelerators.
        standard: true for a zone, false for a region.

    Raises:
        UsageError: the location is malformed, or a Standard cluster has no zone.
        PreflightError: the location lacks an accelerator.
    """
    if location and not _LOCATION.fullmatch(location):
        raise UsageError(f"{location!r} is not a zone such as us-central1-a, nor a region.")
    if location and standard and location == zones.region_of(location):
        raise UsageError(
            f"A Standard cluster needs a zone, such as {location}-a, because the machines of a "
            f"slice stand in one zone; got {location}."
        )
    families = [topology.family for topology in slices if zones.zones_of(topology.family)]
    if not location:
        common = [
            zone
            for zone in zones.zones_of(families[0] if families else "") or (zones.USUAL,)
            if all(zone in zones.zones_of(family) for family in families)
        ]
        if not common:
            raise PreflightError(
                f"No zone has all of {', '.join(families)} (Google's list of {zones.DATE}, "
                f"{zones.SOURCE}). Make one cluster for each."
            )
        location = common[0]
    for family in families:
        if not any(zones.fits_location(location, zone) for zone in zones.zones_of(family)):
            raise PreflightError(
                f"{location} has no {family}. Zones with {family}: "
                f"{', '.join(zones.zones_of(family))} (Google's list of {zones.DATE}, "
                f"{zones.SOURCE}). Choose one with --zone."
            )
    return location if standard else zones.region_of(location)


def plan_pools(options: Mapping[str, Any]) -> tuple[tuple[Topology, ...], tuple[Pool, ...]]:
    """Return the slices that the options name, and the node pools of a Standard cluster for them.

    Raises:
        UnknownAccelerator: there is no such accelerator.
        UsageError: two options exclude each other, an accelerator is named twice, or the least
            number of nodes does not fit the slice.
    """
    slices: list[Topology] = []
    pools: list[Pool] = []
    for name in options["accelerators"]:
        topology = resolve(name, spot=options["spot"])
        slices += [topology] * options["slices"]
        if topology.kind != "cpu":
            pools += _make_pools(topology, _choose_capacity(topology, options), options)
    if len({pool.name for pool in pools}) < len(pools):
        raise UsageError("An accelerator is named twice. Use --slices for several slices of it.")
    return tuple(slices), tuple(pools)


def _choose_capacity(topology: Topology, options: Mapping[str, Any]) -> Capacity:
    named = {
        Capacity.SPOT: topology.spot,
        Capacity.RESERVATION: options["reservation"],
        Capacity.FLEX_START: options["flex_start"],
        Capacity.QUEUED: options["queued"],
    }
    chosen = [capacity for capacity, is_named in named.items() if is_named]
    if len(chosen) > 1:
        raise UsageError(f"Machines cannot be both {chosen[0]} and {chosen[1]}. Choose one.")
    return chosen[0] if chosen else Capacity.ON_DEMAND


def _make_pools(
    topology: Topology, capacity: Capacity, options: Mapping[str, Any]
) -> tuple[Pool, ...]:
    """Return the node pools for an accelerator. Each TPU slice of several hosts gets a pool of its
    own, which GKE starts and stops as a whole; all other machines share one pool."""
    count, least = options["slices"], options["min_nodes"]
    stem = topology.name.removesuffix(":spot")
    if capacity not in (Capacity.ON_DEMAND, Capacity.RESERVATION):
        stem += f"-{capacity.name.lower().replace('_', '-')}"
    names, most = [stem], max(count, least)
    if topology.kind == "tpu" and topology.multi_host:
        if least not in (0, topology.hosts):
            raise UsageError(
                f"--min-nodes must be 0 or {topology.hosts} for {topology.name}: the "
                f"{topology.hosts} machines of a slice start and stop together. Got {least}."
            )
        names, most = [f"{stem}-{number}" for number in range(count)], topology.hosts
    elif topology.kind == "gpu":
        most += GPU_EXTRA_NODES
    reservation = options["reservation"] or ""
    networks = options["network_devices"] and topology.kind == "tpu"
    return tuple(
        Pool(name, topology, least, most, capacity, reservation, networks) for name in names
    )


def check_mode(pools: Sequence[Pool], options: Mapping[str, Any]) -> None:
    """Refuse options that an Autopilot cluster does not have.

    Raises:
        UsageError: an option needs --standard, or TPUs.
    """
    for name in ("multi_tier", "reservation", "min_nodes", "flex_start", "queued"):
        if options[name] and not options["standard"]:
            raise UsageError(
                f"--{name.replace('_', '-')} is for node pools, which an Autopilot cluster does "
                "not have. Add --standard."
            )
    if options["standard"] and any(p.topology.family == "tpu7x" for p in pools):
        raise UsageError(
            "Node pools of tpu7x need a workload policy, which kinetic cannot create. Remove "
            "--standard: on an Autopilot cluster, GKE creates the policy."
        )
    if options["multi_tier"] and not any(pool.topology.kind == "tpu" for pool in pools):
        raise UsageError("--multi-tier is for TPUs. Name one with --accelerator.")
