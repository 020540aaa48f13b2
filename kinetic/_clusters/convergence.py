"""Bring the cloud to the wanted state in rounds: observe, take the difference, carry out its steps.

Nothing is remembered between two rounds, so it does not matter who created what, or when: this
command, an earlier run of it that was interrupted, or another command at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kinetic._backends.kubernetes.api import CallLimits
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._clusters import access, bodies, objects
from kinetic._clusters.cloud import Cloud, read_manifest
from kinetic._clusters.control_plane import ControlPlane
from kinetic._clusters.difference import SERVICES, Action, Step, difference, with_pools
from kinetic._clusters.gke import Gke
from kinetic._clusters.observed import BUSY, Document, Observed
from kinetic._clusters.refusals import NameTaken
from kinetic._clusters.releases import RELEASES, Release
from kinetic._clusters.wanted import Mode, Wanted, check_project
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, SubmitError

ROUNDS = 12
"""Most rounds of one command. A new cluster takes about four; another command that runs at the same
time causes some more."""
_QUICK = CallLimits(connect_s=10.0, tries=3)


@dataclass(frozen=True)
class Doors:
    """Connections to the services that a command uses.

    Attributes:
        cloud: the services of the project.
        gke: the clusters of the project.
        variables: the environment, for logins.
        releases: the manifests to install.
    """

    cloud: Cloud
    gke: Gke
    variables: Mapping[str, str]
    releases: Mapping[str, Release]


def open_doors(
    project: str, variables: Mapping[str, str], releases: Mapping[str, Release] = RELEASES
) -> Doors:
    """Return the connections for a project, without calling any service.

    Raises:
        UsageError: `project` is not the id of a project.
    """
    cloud = Cloud(check_project(project), variables)
    return Doors(cloud, Gke(cloud), variables, releases)


def observe(wanted: Wanted, doors: Doors, *, whole: bool = True) -> Observed:
    """Read the present state of a cluster, and of everything that belongs to it.

    Args:
        wanted: the cluster.
        doors: the services.
        whole: false to leave out what only `up` needs: machine types, quotas, objects in the
            cluster.

    Raises:
        KineticError: a service refuses the request, or does not answer.
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
        limits = {
            topology.name: bodies.limit_of(cloud.read_quota(metric), wanted.region, family)
            for topology, metric, family in bodies.list_quotas(wanted)
        }
        quotas = {name: limit for name, limit in limits.items() if limit is not None}
        has_pools = wanted.mode is Mode.STANDARD
        machines = cloud.list_machines(wanted.location) if has_pools else frozenset()
        observed = replace(observed, machines=machines, quotas=quotas)
    if "container.googleapis.com" not in services:
        return observed
    named = [c for c in doors.gke.list_clusters() if c["name"] == wanted.name]
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
            return observed  # The control plane is being upgraded; the next round waits.
        raise


def observe_objects(
    wanted: Wanted, observed: Observed, plane: ControlPlane, releases: Mapping[str, Release]
) -> Observed:
    """Return `observed`, completed with the objects in the cluster that the difference needs."""
    caller, wanted = plane.read_caller(), with_pools(wanted, observed)
    documents = [
        *objects.make_access(wanted, caller),
        *objects.make_queue(wanted),
        *objects.make_checkpoints(wanted),
    ]
    for name in wanted.manifests:
        kind, _, plural = releases[name].definition.partition(" ")
        definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": kind}
        documents += [releases[name].marker, definition | {"metadata": {"name": plural}}]
    return replace(observed, caller=caller, objects=plane.read_objects(documents))


@contextlib.contextmanager
def open_control_plane(wanted: Wanted, cluster: Document, doors: Doors) -> Iterator[ControlPlane]:
    """Yield the API server of a cluster."""
    entry = access.make_access(wanted.context, cluster)
    plane = ControlPlane(entry, doors.variables, wanted.name, limits=_QUICK)
    with contextlib.closing(plane):
        yield plane


def converge(
    wanted: Wanted,
    doors: Doors,
    report: Callable[[str], None],
    steps: Sequence[Step] | None = None,
) -> None:
    """Carry out steps until the cluster is as wanted.

    Args:
        wanted: the cluster.
        doors: the services.
        report: called with the text of each step before it begins.
        steps: the steps of the first round, which the user has seen; None to compute them.

    Raises:
        KineticError: a step failed. Running the same command again continues with this step.
    """
    for _ in range(ROUNDS):
        if steps is None:
            steps = difference(wanted, observe(wanted, doors), doors.releases)
        if not steps:
            return
        # If another command was faster, the next round decides what is still missing.
        with contextlib.suppress(NameTaken):
            carry_out(wanted, doors, steps, report)
        steps = None
    raise SubmitError(
        f"The cluster {wanted.name} is not complete after {ROUNDS} attempts: another command may "
        "be changing it, or something removes what kinetic creates. Run the same command again "
        "when nothing else changes it."
    )


def carry_out(
    wanted: Wanted, doors: Doors, steps: Sequence[Step], report: Callable[[str], None]
) -> None:
    """Carry out the steps. Stop after a step that changes what the later ones depend on: the caller
    then computes the remaining steps anew."""
    inside = [step for step in steps if step.is_inside]
    for step in steps[: len(steps) - len(inside)]:
        report(str(step))
        _carry_out_step(wanted, doors, step)
        if step.changes_view:
            return
    cluster = doors.gke.get_cluster(wanted) if inside else None
    if cluster is not None and cluster.get("endpoint"):
        with open_control_plane(wanted, cluster, doors) as plane:
            _fill(plane, inside, doors.releases, report)


def remove(
    wanted: Wanted,
    doors: Doors,
    decide: Callable[[Observed], list[Step]],
    report: Callable[[str], None],
) -> None:
    """Remove what `decide` names in the present state. The state is read again, because the user
    may have taken an hour to answer the question."""
    carry_out(wanted, doors, decide(observe(wanted, doors, whole=False)), report)


def _carry_out_step(wanted: Wanted, doors: Doors, step: Step) -> None:
    cloud, gke, body = doors.cloud, doors.gke, step.body or {}
    match step.action:
        case Action.ENABLE:
            cloud.enable(body)
        case Action.CREATE_BUCKET:
            cloud.create_bucket(body)
        case Action.GRANT:
            cloud.grant(wanted.bucket, body["role"], body["member"])
        case Action.CREATE_CLUSTER:
            gke.create_cluster(wanted, body)
        case Action.CREATE_POOL:
            gke.create_pool(wanted, body)
        case Action.REMOVE_POOL:
            gke.remove_pool(wanted, step.name)
        case Action.WAIT:
            gke.wait(wanted, step.name)
        case Action.REMOVE_CLUSTER:
            gke.remove_cluster(wanted)
            access.remove(wanted.context, doors.variables)
        case Action.REMOVE_BUCKET:
            cloud.remove_bucket(wanted.bucket)


def _fill(
    plane: ControlPlane,
    steps: Sequence[Step],
    releases: Mapping[str, Release],
    report: Callable[[str], None],
) -> None:
    """Carry out the steps that concern objects inside a cluster."""
    for step in steps:
        report(str(step))
        body = step.body or {}
        if step.action is Action.APPLY:
            plane.apply(body)
        else:
            release = releases[body["release"]]
            plane.install(release, read_manifest(release))


def fill_cluster(
    wanted: Wanted,
    entry: Access,
    variables: Mapping[str, str],
    releases: Mapping[str, Release],
    report: Callable[[str], None],
) -> None:
    """Create the objects inside a cluster that is not on Google Cloud, with the access `entry`."""
    with contextlib.closing(ControlPlane(entry, variables, wanted.name)) as plane:
        observed = observe_objects(wanted, Observed(), plane, releases)
        _fill(plane, difference(wanted, observed, releases), releases, report)


def list_jobs(wanted: Wanted, observed: Observed, doors: Doors) -> tuple[str, ...]:
    """Return the ids of the jobs in a cluster that have not ended, whether or not `up` made the
    cluster; () if the cluster does not run."""
    cluster = observed.cluster
    if cluster is None or cluster.get("status") not in ("RUNNING", "RECONCILING", "DEGRADED"):
        return ()
    with open_control_plane(wanted, cluster, doors) as plane:
        return plane.list_jobs()
