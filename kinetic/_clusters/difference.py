"""The decisions of `kinetic up`, `down` and `pool`: steps from the observed to the wanted state.

In: a `Wanted` and an `Observed`. Out: the steps that turn the one into the other, in order. Pure.
After an interruption the same command is run again: it computes the steps that remain from what
exists then, and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

from kinetic._clusters import bodies, objects, zones
from kinetic._clusters.observed import (
    APPLIED,
    BUSY,
    Document,
    Observed,
    is_own,
    is_own_pool,
    key_of,
    mode_of,
    slices_of,
)
from kinetic._clusters.releases import RELEASES, Release
from kinetic._clusters.wanted import DEFAULT_POOL, LABEL, Mode, Pool, Wanted
from kinetic._core.values import dataclass
from kinetic.errors import PreflightError, UsageError

SERVICES = (
    "container.googleapis.com",
    "compute.googleapis.com",
    "storage.googleapis.com",
    "iam.googleapis.com",
)
DEFAULT_MACHINES = (
    *("e2-standard-4", "n2-standard-4", "n2d-standard-4", "c3-standard-4", "n4-standard-4"),
    *("n1-standard-4", "t2d-standard-4", "c4-standard-4"),
)
"""Machine types for GKE's own pods, cheapest first. Some zones with TPUs do not have the first."""


class Action(StrEnum):
    """The kinds of steps."""

    ENABLE = "enable APIs"
    CREATE_BUCKET = "create bucket"
    GRANT = "grant role"
    CREATE_CLUSTER = "create cluster"
    WAIT = "wait for"
    CREATE_POOL = "create node pool"
    REMOVE_POOL = "remove node pool"
    INSTALL = "install"
    APPLY = "apply"
    REMOVE_CLUSTER = "remove cluster"
    REMOVE_BUCKET = "remove bucket"


@dataclass(frozen=True)
class Step:
    """One change to a cluster or its surroundings.

    Attributes:
        action: the kind of change.
        name: the name of the object that is changed.
        detail: a few words about the change, for people.
        body: the body of the request.
    """

    action: Action
    name: str
    detail: str = ""
    body: Document | None = None

    def __str__(self) -> str:
        return f"{self.action} {self.name}"

    @property
    def changes_view(self) -> bool:
        """True if the later steps depend on the state of the cloud after this step."""
        return self.action in (Action.CREATE_CLUSTER, Action.WAIT, Action.ENABLE)

    @property
    def is_inside(self) -> bool:
        """True if the step changes an object inside the cluster. Such steps come last."""
        return self.action in (Action.APPLY, Action.INSTALL)


def difference(
    wanted: Wanted, observed: Observed, releases: Mapping[str, Release] = RELEASES
) -> list[Step]:
    """Return the steps from the observed state to the wanted one; [] if there is nothing to do.

    Raises:
        PreflightError: something with a wanted name exists that `up` did not make, the zone lacks a
            machine type, the quota is too small, or GKE has failed to create the cluster.
        UsageError: the existing cluster is of another kind.
    """
    if wanted.mode is Mode.KIND:
        return list(_fill(wanted, observed, releases))
    _check(wanted, observed)
    return [
        *_prepare(wanted, observed),
        *_create(wanted, observed),
        *_fill(wanted, observed, releases),
    ]


def _check(wanted: Wanted, observed: Observed) -> None:
    cluster, bucket = observed.cluster, observed.bucket
    if cluster is None and observed.elsewhere:
        raise UsageError(
            f"{wanted.project} has a cluster {wanted.name} in {', '.join(observed.elsewhere)}, and "
            "both would share a bucket. Name its place with --zone, or choose another name with "
            "--cluster."
        )
    if cluster is not None and not is_own(cluster, wanted.name):
        raise PreflightError(
            f"The cluster {wanted.name} in {wanted.location} exists, but kinetic did not create it "
            f"(it lacks the label {LABEL}={wanted.name}). Use it with `kinetic init`, or choose "
            "another name with --cluster."
        )
    if cluster is not None:
        mode = mode_of(cluster)
        if mode is not wanted.mode:
            remedy = "without" if mode is Mode.AUTOPILOT else "with"
            raise UsageError(
                f"The cluster {wanted.name} exists already and is {mode}; it cannot become "
                f"{wanted.mode}. Run the command {remedy} --standard, or choose another name with "
                "--cluster."
            )
        if cluster.get("status") in ("ERROR", "DEGRADED"):
            raise PreflightError(
                f"GKE failed to create the cluster {wanted.name} ({_explain(cluster)}). Remove it "
                f"with `kinetic down --cluster {wanted.name}`, then try again."
            )
    if bucket is not None and not observed.owns_bucket(wanted.name):
        raise PreflightError(
            f"The bucket {wanted.bucket} exists, but kinetic did not create it for this cluster: "
            f"it lacks the label {LABEL}={wanted.name}, or belongs to another project. Choose "
            "another name with --cluster."
        )
    for topology, metric, family in bodies.list_quotas(wanted):
        limit = observed.quotas.get(topology.name, -1)
        if 0 <= limit < topology.chips:
            named = f"{metric}{f' ({family})' if family else ''}"
            raise PreflightError(
                f"Your quota of {named} in {wanted.region} is {limit:g}, and {topology.name} needs "
                f"{topology.chips}. Ask for more at "
                f"https://console.cloud.google.com/iam-admin/quotas?project={wanted.project}."
            )
    for pool in wanted.pools:
        machine = pool.topology.machine_type
        if observed.machines and machine not in observed.machines:
            raise PreflightError(
                f"{wanted.location} has no {machine}, the machine of {pool.topology.name}. Zones "
                f"with it: {zones.SOURCE if pool.topology.kind == 'tpu' else zones.GPU_SOURCE}."
            )


def _explain(document: Document) -> str:
    """Return GKE's own message about the state of a cluster or node pool."""
    conditions = document.get("conditions") or ()
    words = [str(c.get("message") or c.get("code") or "") for c in conditions]
    return "; ".join(filter(None, words)) or str(document.get("statusMessage") or "no reason")


def _prepare(wanted: Wanted, observed: Observed) -> Iterator[Step]:
    missing = [name for name in SERVICES if name not in observed.services]
    if missing:
        names = ", ".join(name.partition(".")[0] for name in missing)
        yield Step(Action.ENABLE, names, body={"serviceIds": missing})
    if observed.bucket is None:
        levels = ", with folders for checkpoints" if wanted.multi_tier else ""
        yield Step(
            Action.CREATE_BUCKET,
            wanted.bucket,
            f"in {wanted.region}, for code, output and results{levels}",
            bodies.make_bucket(wanted),
        )


def _create(wanted: Wanted, observed: Observed) -> Iterator[Step]:
    cluster = observed.cluster
    if cluster is None:
        machine = _choose_machine(wanted, observed)
        detail = f"{wanted.mode} in {wanted.location}"
        detail += f", one {machine} for GKE's own pods" if machine else ""
        yield Step(Action.CREATE_CLUSTER, wanted.name, detail, bodies.make_cluster(wanted, machine))
    elif cluster.get("status") in BUSY and not observed.caller:
        yield Step(Action.WAIT, wanted.name, str(cluster["status"]).lower())
    # The pool of identities comes with the first cluster: until then IAM refuses its members.
    for member in bodies.list_members(wanted, observed.number):
        if member not in observed.members:
            _, _, account = member.partition("/subject/")
            yield Step(
                Action.GRANT,
                bodies.OBJECT_ROLE,
                f"to {account} on {wanted.bucket}",
                {"role": bodies.OBJECT_ROLE, "member": member},
            )
    for pool in wanted.pools:
        yield from _create_pool(wanted, observed, pool)


def _choose_machine(wanted: Wanted, observed: Observed) -> str:
    if wanted.mode is Mode.AUTOPILOT:
        return ""
    if not observed.machines:
        return DEFAULT_MACHINES[0]
    machine = next((name for name in DEFAULT_MACHINES if name in observed.machines), "")
    if not machine:
        raise PreflightError(
            f"{wanted.location} has none of the machines for GKE's own pods "
            f"({', '.join(DEFAULT_MACHINES)}). Choose another zone with --zone."
        )
    return machine


def _create_pool(wanted: Wanted, observed: Observed, pool: Pool) -> Iterator[Step]:
    existing = observed.pools.get(pool.name)
    topology = pool.topology
    nodes = f"{pool.least} to {pool.most}" if pool.least != pool.most else f"{pool.most}"
    how = f"{pool.capacity}{f' {pool.reservation}' if pool.reservation else ''}"
    body = bodies.make_pool(wanted, pool)
    step = Step(
        Action.CREATE_POOL,
        pool.name,
        f"{nodes} x {topology.machine_type}, {topology.name.removesuffix(':spot')}, {how}",
        body,
    )
    if existing is None:
        yield step
        return
    if not is_own_pool(existing, wanted.name):
        raise PreflightError(
            f"The cluster {wanted.name} has a node pool {pool.name} that kinetic did not create "
            f"(it lacks the label {LABEL}={wanted.name}). Remove that pool, then try again."
        )
    status = existing.get("status")
    if status == "ERROR":
        yield Step(Action.REMOVE_POOL, pool.name, f"GKE gave it up: {_explain(existing)}")
        yield step
    elif status in BUSY:
        yield Step(Action.WAIT, f"{wanted.name}/{pool.name}", str(status).lower())
    elif _describe_pool(existing) != _describe_pool(body):
        raise PreflightError(
            f"The node pool {pool.name} exists with {_describe_pool(existing)}, and not with "
            f"{_describe_pool(body)}. Remove it with `kinetic pool remove {pool.name}`, then try "
            "again."
        )


def _describe_pool(pool: Document) -> str:
    config, scaling = pool.get("config") or {}, pool.get("autoscaling") or {}
    names = (config.get("reservationAffinity") or {}).get("values") or ()
    nodes = f"{int(scaling.get('minNodeCount') or 0)} to {int(scaling.get('maxNodeCount') or 0)}"
    return f"{nodes} x {config.get('machineType')}{''.join(f' of {name}' for name in names)}"


def _fill(wanted: Wanted, observed: Observed, releases: Mapping[str, Release]) -> Iterator[Step]:
    wanted = with_pools(wanted, observed)
    yield from _apply(wanted, observed, objects.make_access(wanted, observed.caller))
    for name in wanted.manifests:
        release = releases[name]
        definition = observed.objects.get(release.definition)
        is_foreign = definition is not None and not is_own(definition, wanted.name)
        if not is_foreign and not _is_applied(wanted, observed, release.marker):
            detail = f"{release.version} from {release.source}".removeprefix(" from ")
            yield Step(Action.INSTALL, release.name, detail, {"release": name})
    yield from _apply(wanted, observed, objects.make_queue(wanted))
    yield from _apply(wanted, observed, objects.make_checkpoints(wanted))


def with_pools(wanted: Wanted, observed: Observed) -> Wanted:
    """Return `wanted` with more slices: those of other node pools that `up` or `pool add` made. The
    queue then has room for all of them."""
    names = {pool.name for pool in wanted.pools}
    others = [
        p for n, p in observed.pools.items() if n not in names and is_own_pool(p, wanted.name)
    ]
    more = (topology for pool in others for topology in slices_of(pool))
    return replace(wanted, slices=(*wanted.slices, *more))


def _is_applied(wanted: Wanted, observed: Observed, document: Document) -> bool:
    """True if the object exists in the cluster as it would be applied. An object of this name that
    somebody else made counts too, and is not changed."""
    existing = observed.objects.get(key_of(document))
    if existing is None:
        return False
    applied = objects.mark(document, wanted.name)["metadata"]["annotations"][APPLIED]
    digest = (existing.get("annotations") or {}).get(APPLIED)
    return digest == applied or not is_own(existing, wanted.name)


def _apply(wanted: Wanted, observed: Observed, documents: list[Document]) -> Iterator[Step]:
    for document in documents:
        if not _is_applied(wanted, observed, document):
            body = objects.mark(document, wanted.name)
            yield Step(Action.APPLY, key_of(document), body=body)


def list_pool_removal(wanted: Wanted, observed: Observed, name: str) -> list[Step]:
    """Return the step that removes a node pool.

    Raises:
        PreflightError: there is no such pool, or kinetic may not remove it.
    """
    pool = observed.pools.get(name)
    if pool is None:
        names = ", ".join(sorted(observed.pools)) or "none"
        raise PreflightError(
            f"The cluster {wanted.name} has no node pool {name}; its node pools: {names}."
        )
    if not is_own_pool(pool, wanted.name):
        raise PreflightError(
            f"The node pool {name} was not removed: kinetic did not create it (it lacks the label "
            f"{LABEL}={wanted.name}). Remove it with gcloud if nothing needs it."
        )
    if name == DEFAULT_POOL:
        raise PreflightError(
            f"The node pool {name} was not removed: GKE's own pods, JobSet and Kueue run there. "
            "`kinetic down` removes it with the cluster."
        )
    machine = str((pool.get("config") or {}).get("machineType") or "")
    return [Step(Action.REMOVE_POOL, name, machine)]


def list_removals(wanted: Wanted, observed: Observed, *, with_bucket: bool) -> list[Step]:
    """Return the steps that remove the cluster and its bucket, if they have kinetic's label."""
    steps = []
    if observed.cluster is not None and is_own(observed.cluster, wanted.name):
        pools = ", ".join(sorted(observed.pools))
        detail = f"with its node pools {pools}" if pools else "with all that runs in it"
        steps.append(Step(Action.REMOVE_CLUSTER, wanted.name, detail))
    if with_bucket and observed.owns_bucket(wanted.name) and not observed.elsewhere:
        steps.append(Step(Action.REMOVE_BUCKET, wanted.bucket, "with all records and results"))
    return steps


def list_remains(wanted: Wanted, observed: Observed, *, with_bucket: bool) -> list[str]:
    """Return sentences about what `down` leaves in place, with the reasons."""
    remains = []
    if observed.cluster is not None and not is_own(observed.cluster, wanted.name):
        remains.append(
            f"The cluster {wanted.name} stays: kinetic did not create it (it lacks the label "
            f"{LABEL}={wanted.name})."
        )
    if observed.bucket is not None and not observed.owns_bucket(wanted.name):
        remains.append(f"The bucket {wanted.bucket} stays: kinetic did not create it.")
    elif observed.bucket is not None and observed.elsewhere:
        places = ", ".join(observed.elsewhere)
        remains.append(f"The bucket {wanted.bucket} stays: {wanted.name} in {places} uses it.")
    elif observed.bucket is not None and not with_bucket:
        remains.append(
            f"The bucket {wanted.bucket} stays, with all records. Remove it with --delete-store "
            f"{wanted.bucket}."
        )
    return remains
