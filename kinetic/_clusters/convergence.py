"""Bringing the cloud to what is wanted: ask, take the difference, carry out its steps, ask again.

Nothing is remembered between two rounds. So it does not matter who has made what, or when: this
command, the same one before it was interrupted, or another one that runs at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kinetic._backends.kubernetes.api import CallLimits
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._clusters import access, bodies, objects
from kinetic._clusters.cloud import Cloud, address_of, read_manifest
from kinetic._clusters.control_plane import ControlPlane
from kinetic._clusters.difference import SERVICES, Action, Step, difference, with_pools
from kinetic._clusters.gke import Gke
from kinetic._clusters.observed import BUSY, Document, Observed
from kinetic._clusters.refusals import NameTaken, NotEnabled
from kinetic._clusters.releases import RELEASES, Release
from kinetic._clusters.wanted import Capacity, Mode, Wanted
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, SubmitError

ENABLE_TRIES, ENABLE_PAUSE_S = 30, 10.0
ROUNDS = 12
"""Most rounds: a new cluster takes about four, another command at the same time some more."""
_QUICK = CallLimits(connect_s=10.0, tries=3)


@dataclass(frozen=True)
class Doors:
    """The services that a command asks.

    Attributes:
        cloud: the project.
        gke: the clusters of its location.
        variables: the environment, for logins.
        releases: the manifests to install.
        sleep: waits.
    """

    cloud: Cloud
    gke: Gke
    variables: Mapping[str, str]
    releases: Mapping[str, Release]
    sleep: Callable[[float], None]


def open_doors(
    project: str,
    location: str,
    variables: Mapping[str, str],
    releases: Mapping[str, Release] = RELEASES,
    sleep: Callable[[float], None] = time.sleep,
) -> Doors:
    """Return the services of a project, without calling them."""
    cloud = Cloud(project, variables, sleep=sleep)
    gke = Gke(project, location, address_of("container", variables), sleep=sleep)
    return Doors(cloud, gke, variables, releases, sleep)


def list_documents(wanted: Wanted, caller: str, releases: Mapping[str, Release]) -> list[Document]:
    """List the objects of the cluster that a difference depends on."""
    documents = [
        *objects.make_access(wanted, caller),
        *objects.make_queue(wanted),
        *objects.make_checkpoints(wanted),
    ]
    for name in wanted.manifests:
        kind, _, plural = releases[name].definition.partition(" ")
        definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": kind}
        documents += [releases[name].marker, definition | {"metadata": {"name": plural}}]
    return documents


def observe(wanted: Wanted, doors: Doors, *, whole: bool = True) -> Observed:
    """Ask for the state of a cluster and what belongs to it.

    Args:
        wanted: the cluster.
        doors: the services.
        whole: false to leave out what only creating needs: machine types, quotas, objects.

    Raises:
        KineticError: a service refuses to answer, or does not.
    """
    cloud = doors.cloud
    number, services = cloud.read_services(SERVICES)
    observed = Observed(number=number, services=services)
    if "storage.googleapis.com" in services and wanted.bucket:
        bucket = cloud.read_bucket(wanted.bucket)
        observed = replace(observed, bucket=bucket)
        if bucket is not None and whole:
            members = cloud.read_members(wanted.bucket, bodies.OBJECT_ROLE)
            observed = replace(observed, members=members)
    if "compute.googleapis.com" in services and whole:
        is_new = wanted.mode is Mode.STANDARD
        machines = cloud.list_machines(wanted.location) if is_new else frozenset()
        observed = replace(observed, machines=machines, quotas=_read_quotas(wanted, cloud))
    if "container.googleapis.com" not in services:
        return observed
    named = [c for c in doors.gke.list_clusters("-") if c["name"] == wanted.name]
    cluster = next((c for c in named if c["location"] == wanted.location), None)
    places = tuple(sorted(str(c["location"]) for c in named if c is not cluster))
    observed = replace(observed, cluster=cluster, elsewhere=places)
    if not cluster or cluster.get("status") not in ("RUNNING", "RECONCILING") or not whole:
        return observed
    try:
        with open_control_plane(wanted, cluster, doors) as plane:
            return observe_objects(wanted, observed, plane, doors.releases)
    except BackendUnavailable:
        if cluster.get("status") in BUSY:
            return observed  # An upgrade of the control plane; the next round waits for it.
        raise


def observe_objects(
    wanted: Wanted, observed: Observed, plane: ControlPlane, releases: Mapping[str, Release]
) -> Observed:
    """Return what was observed, with the objects of a cluster that answers."""
    caller = plane.read_caller()
    documents = list_documents(with_pools(wanted, observed), caller, releases)
    digests, foreign = plane.read_objects(documents)
    return replace(observed, caller=caller, objects=digests, foreign=foreign)


@contextlib.contextmanager
def open_control_plane(wanted: Wanted, cluster: Document, doors: Doors) -> Iterator[ControlPlane]:
    """Yield the API server of a cluster."""
    entry = access.make_access(wanted.context, cluster)
    plane = ControlPlane(entry, doors.variables, wanted.name, sleep=doors.sleep, limits=_QUICK)
    with contextlib.closing(plane):
        yield plane


def _read_quotas(wanted: Wanted, cloud: Cloud) -> dict[str, float]:
    capacities = {pool.topology.name: pool.capacity for pool in wanted.pools}
    quotas: dict[str, float] = {}
    for topology in wanted.slices:
        usual = Capacity.SPOT if topology.spot else Capacity.ON_DEMAND
        quota = bodies.quota_of(topology, capacities.get(topology.name, usual))
        if quota is not None and "/".join(quota) not in quotas:
            metric, family = quota
            limit = bodies.limit_of(cloud.read_quota(metric), wanted.region, family)
            quotas |= {} if limit is None else {"/".join(quota): limit}
    return quotas


def converge(
    wanted: Wanted,
    doors: Doors,
    report: Callable[[str], None],
    steps: Sequence[Step] | None = None,
) -> None:
    """Carry out steps until nothing is missing.

    Args:
        wanted: the cluster.
        doors: the services.
        report: told of each step before it begins.
        steps: the first round's steps, as the user has observed them.

    Raises:
        KineticError: a step failed. The same command continues with it.
    """
    for _ in range(ROUNDS):
        if steps is None:
            steps = difference(wanted, observe(wanted, doors), doors.releases)
        if not steps:
            return
        carry_out(wanted, doors, steps, report)
        if steps[0].action is Action.ENABLE:
            _await_services(wanted, doors)
        steps = None
    raise SubmitError(
        f"{wanted.name} is not complete after {ROUNDS} rounds: something removes what is made, or "
        "another command is at work. Run the same command again."
    )


def _await_services(wanted: Wanted, doors: Doors) -> None:
    """Wait until enabled APIs answer, which takes up to some minutes."""
    for _ in range(ENABLE_TRIES):
        try:
            observe(wanted, doors, whole=False)
            return
        except NotEnabled:
            doors.sleep(ENABLE_PAUSE_S)


def carry_out(
    wanted: Wanted, doors: Doors, steps: Sequence[Step], report: Callable[[str], None]
) -> None:
    """Carry out steps, until one after which the rest must be asked again."""
    with contextlib.ExitStack() as closing:
        plane: ControlPlane | None = None
        for step in steps:
            report(str(step))
            if step.action in (Action.APPLY, Action.INSTALL) and plane is None:
                cluster = doors.gke.get_cluster(wanted.name)
                if cluster is None or not cluster.get("endpoint"):
                    return
                plane = closing.enter_context(open_control_plane(wanted, cluster, doors))
            try:
                _carry_out_step(wanted, doors, step, plane)
            except NameTaken:
                # Another command was faster; the next round decides whether it is ours.
                if not _is_there(wanted, doors, step):
                    raise
                return
            if step.changes_view:
                return


def _is_there(wanted: Wanted, doors: Doors, step: Step) -> bool:
    if step.action is Action.CREATE_BUCKET:
        return doors.cloud.read_bucket(wanted.bucket) is not None
    return doors.gke.get_cluster(wanted.name) is not None


def _carry_out_step(wanted: Wanted, doors: Doors, step: Step, plane: ControlPlane | None) -> None:
    cloud, gke, body = doors.cloud, doors.gke, step.body or {}
    match step.action:
        case Action.ENABLE:
            cloud.enable(body)
        case Action.CREATE_BUCKET:
            cloud.create_bucket(body)
        case Action.GRANT:
            cloud.grant(wanted.bucket, body["role"], body["member"])
        case Action.CREATE_CLUSTER:
            gke.create_cluster(body)
        case Action.CREATE_POOL:
            gke.create_pool(wanted.name, body)
        case Action.REMOVE_POOL:
            gke.remove_pool(wanted.name, step.name)
        case Action.WAIT:
            gke.wait(step.name)
        case Action.REMOVE_CLUSTER:
            gke.remove_cluster(wanted.name)
            access.remove(wanted.context, doors.variables)
        case Action.REMOVE_BUCKET:
            cloud.remove_bucket(wanted.bucket)
        case Action.APPLY | Action.INSTALL:
            assert plane is not None
            fill(plane, step, doors.releases)


def fill_cluster(
    wanted: Wanted,
    entry: Access,
    variables: Mapping[str, str],
    releases: Mapping[str, Release],
    report: Callable[[str], None],
) -> None:
    """Carry out the steps inside a cluster that no cloud knows."""
    with contextlib.closing(ControlPlane(entry, variables, wanted.name)) as plane:
        observed = observe_objects(wanted, Observed(), plane, releases)
        for step in difference(wanted, observed, releases):
            report(str(step))
            fill(plane, step, releases)


def list_jobs(wanted: Wanted, observed: Observed, doors: Doors) -> tuple[str, ...]:
    """List the jobs that have not ended in a cluster, be it ours or one that uses the bucket."""
    cluster = observed.cluster
    if cluster is None or cluster.get("status") not in ("RUNNING", "RECONCILING", "DEGRADED"):
        return ()
    with open_control_plane(wanted, cluster, doors) as plane:
        return plane.list_jobs()


def fill(plane: ControlPlane, step: Step, releases: Mapping[str, Release]) -> None:
    """Carry out a step inside a cluster."""
    body = step.body or {}
    if step.action is Action.APPLY:
        plane.apply(body)
    else:
        release = releases[body["release"]]
        plane.install(release, read_manifest(release))
