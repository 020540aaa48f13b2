"""Whether a cluster can run jobs: the questions, and what the answers mean.

In: an `Api` (`gather`), then only `Facts`. Out: `Finding`s for the doctor, one sentence for a
preflight, rows of accelerators. Everything but `gather` and the preflight is pure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial

from kinetic._backends.base import PoolRow
from kinetic._backends.kubernetes import addons, controllers
from kinetic._backends.kubernetes import nodes as pools
from kinetic._backends.kubernetes.addons import Asked, MultiTier, Networks
from kinetic._backends.kubernetes.api import Api, Version
from kinetic._backends.kubernetes.controllers import JobSets, Queues
from kinetic._backends.kubernetes.errors import Forbidden, no_namespace, not_installed
from kinetic._backends.kubernetes.nodes import NodePool
from kinetic._backends.kubernetes.observed import Document
from kinetic._backends.kubernetes.resources import JOBSETS, NODES, SERVICE_ACCOUNTS
from kinetic._backends.kubernetes.rights import (
    NOTHING_ASKED,
    Need,
    Right,
    list_needed,
    list_relevant,
)
from kinetic._core.accelerators.catalog import catalog_rows
from kinetic._core.accelerators.topology import Topology
from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.values import dataclass
from kinetic._store.many import at_once
from kinetic.errors import KineticError, NotFound, PreflightError

OLDEST = (1, 27)
"""Since then, Indexed Jobs with a pod failure policy are on by default."""
CALLS_AT_ONCE = 8
_VITAL = (Need.ALL, Need.SEVERAL_HOSTS, Need.NETWORKS)
"""Without these a job is refused."""
_NO_KUEUE = "Ask an administrator for Kueue, or name no queue: queue=, KINETIC_QUEUE, the profile."
COUNTS_S = 60.0
_well: dict[tuple[str, str, bool, str, Asked], float] = {}
"""The time of good answers, by server, namespace, whether jobs have several hosts, account, and
what else they ask for."""


@dataclass(frozen=True)
class Facts:
    """What a cluster answered.

    Attributes:
        server, namespace: of the cluster.
        problem: why it could not be asked; then the rest is unknown.
        version: of the server.
        rights: whether the caller has each of them.
        jobsets, queues: JobSet and Kueue; without the doctor only whether they are installed.
        nodes: None if they may not be listed.
        service_account: the account that pods use, or "".
        has_account: whether it exists; None when unknown.
        multi_tier, networks: what jobs ask of the cluster in addition; None if they do not.
        no_buckets: why pods would get no bucket as a folder, if a job asks for one.
    """

    server: str
    namespace: str
    problem: KineticError | None = None
    version: Version | None = None
    rights: Mapping[Right, bool] = field(default_factory=dict)
    jobsets: JobSets = JobSets()
    queues: Queues = Queues()
    nodes: Sequence[Document] | None = None
    service_account: str = ""
    has_account: bool | None = None
    multi_tier: MultiTier | None = None
    networks: Networks | None = None
    no_buckets: Sequence[Finding] = ()


def gather(api: Api, *, service_account: str = "", asked: Asked = NOTHING_ASKED) -> Facts:
    """Ask a cluster everything, a few calls at a time.

    Args:
        api: the cluster.
        service_account: the account of pods, or "".
        asked: what jobs ask for in addition.
    """
    rights = list_relevant(asked)
    try:
        version = api.version()
        answers = at_once(lambda r: api.may(r.verb, r.resource), rights, CALLS_AT_ONCE)
        jobsets, queues = controllers.jobsets(api), controllers.queues(api, asked.queue)
        has_account = _has_account(api, service_account)
        multi_tier, networks = _examine_addons(api, asked)
        nodes: Sequence[Document] | None = None
        with contextlib.suppress(Forbidden):
            nodes = api.list(NODES).items
    except KineticError as error:
        return Facts(api.server, api.namespace, error, service_account=service_account)
    return Facts(
        server=api.server,
        namespace=api.namespace,
        version=version,
        rights=dict(zip(rights, answers, strict=True)),
        jobsets=jobsets,
        queues=queues,
        nodes=nodes,
        service_account=service_account,
        has_account=has_account,
        multi_tier=multi_tier,
        networks=networks,
    )


def gather_for(
    api: Api, hosts: int, *, service_account: str = "", asked: Asked = NOTHING_ASKED
) -> Facts:
    """Ask a cluster only what decides whether a job can be created, a few calls at a time.

    Args:
        api: the cluster.
        hosts: of the job.
        service_account: the account of pods, or "".
        asked: what the job asks for in addition.
    """
    rights = list_needed(hosts, asked)
    asks: list[Callable[[], bool | None]] = [
        lambda: hosts == 1 or api.knows(JOBSETS),
        lambda: _has_account(api, service_account),
        *(partial(api.may, right.verb, right.resource) for right in rights),
    ]
    try:
        has_jobsets, has_account, *allowed = at_once(lambda ask: ask(), asks, CALLS_AT_ONCE)
        multi_tier, networks = _examine_addons(api, asked)
        no_buckets = addons.check_buckets(api) if asked.buckets else []
        has_queues = bool(asked.queue) and controllers.queue_workloads(api) is not None
    except KineticError as error:
        return Facts(api.server, api.namespace, error, service_account=service_account)
    return Facts(
        server=api.server,
        namespace=api.namespace,
        rights=dict(zip(rights, map(bool, allowed), strict=True)),
        jobsets=JobSets(bool(has_jobsets)),
        queues=Queues(has_queues, queue=asked.queue),
        service_account=service_account,
        has_account=has_account,
        multi_tier=multi_tier,
        networks=networks,
        no_buckets=no_buckets,
    )


def _examine_addons(api: Api, asked: Asked) -> tuple[MultiTier | None, Networks | None]:
    return (
        addons.multi_tier(api) if asked.multi_tier else None,
        addons.networks(api) if asked.networks else None,
    )


def _has_account(api: Api, name: str) -> bool | None:
    if not name:
        return None
    found = _exists(api, name)
    # Each namespace has this account, and an account is all that is looked up in it.
    if found is False and name != "default" and _exists(api, "default") is False:
        raise PreflightError(no_namespace(api.namespace))
    return found


def _exists(api: Api, name: str) -> bool | None:
    try:
        api.get(SERVICE_ACCOUNTS, name)
    except NotFound:
        return False
    except PreflightError:
        return None  # pods may use an account that their creator may not read
    return True


def checks_of(facts: Facts) -> tuple[Finding, ...]:
    """Return the doctor's checks of a cluster."""
    where = f"{facts.server}, namespace {facts.namespace}"
    if facts.problem is not None:
        return (problem("cluster", f"{where}: {facts.problem}"),)
    return (
        _version(facts, where),
        _jobsets(facts),
        *_check_rights(facts),
        _account(facts),
        _pools(facts),
        _queues(facts),
        *_addons(facts),
    )


def _version(facts: Facts, where: str) -> Finding:
    version = facts.version or Version("")
    text = f"{where} answers; Kubernetes {version.text or 'of an unknown version'}"
    if version.major and (version.major, version.minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return warn("cluster", text, f"kinetic is made for {oldest} and later.")
    return ok("cluster", text)


def _jobsets(facts: Facts) -> Finding:
    found = facts.jobsets
    if not found.is_installed:
        return warn("JobSet", "is not installed", not_installed(JOBSETS))
    named = f"{found.version} " if found.version else ""
    if found.fault:
        remedy = "Show this to an administrator: no job of several hosts can be created."
        return problem("JobSet", f"{named}takes no jobs: {found.fault}", remedy)
    if found.is_old:
        text = (
            f"{named}is older than 0.10: when a function raises, its pods are started again as "
            "often as retries= says, only to end"
        )
        return warn("JobSet", text, "Ask an administrator for a newer one.")
    return ok("JobSet", f"{named}is installed, and takes jobs of several hosts")


def _queues(facts: Facts) -> Finding:
    found = facts.queues
    queue = f"the queue {found.queue}"
    named = f"{found.version} is installed" if found.version else "is installed"
    if not found.is_installed and found.queue:
        text = f"is not installed, so {queue} is not there"
        return problem("Kueue", text, _NO_KUEUE)
    if not found.is_installed:
        return ok("Kueue", "is not installed")
    if not found.queue:
        return ok("Kueue", named)
    if found.has_queue is None:
        return ok("Kueue", f"{named}; {queue} may not be looked up")
    if not found.has_queue:
        remedy = f"`kubectl get localqueues -n {facts.namespace}` shows which there are."
        text = f"{named}, and there is no queue {found.queue} in namespace {facts.namespace}"
        return problem("Kueue", text, remedy)
    if found.stopped:
        remedy = "Jobs wait until an administrator has mended it, or name another queue."
        return warn("Kueue", f"{queue} admits no jobs: {found.stopped}", remedy)
    return ok("Kueue", f"{named}; {queue} admits jobs")


def _check_rights(facts: Facts) -> list[Finding]:
    found = []
    for need in Need:
        report = problem if need in _VITAL else warn
        missing = [r for r, allowed in facts.rights.items() if not allowed and r.need is need]
        if missing:
            text = f"missing for {need}: {_name_rights(missing)}"
            found.append(report("rights", text, _advise_role(facts)))
    return found or [ok("rights", f"all {len(facts.rights)} that jobs need")]


def _name_rights(missing: Iterable[Right]) -> str:
    by_kind: dict[str, list[str]] = {}
    for right in missing:
        by_kind.setdefault(right.resource.full_name, []).append(right.verb)
    return "; ".join(f"{', '.join(verbs)} {kind}" for kind, verbs in by_kind.items())


def _advise_role(facts: Facts) -> str:
    return f"Ask an administrator for a role with these verbs in namespace {facts.namespace}."


def _account(facts: Facts) -> Finding:
    name = facts.service_account
    if not name:
        return ok("service account", "pods run as the default one")
    if facts.has_account is None:
        return ok("service account", f"{name}: it may not be looked up")
    if facts.has_account:
        return ok("service account", f"{name} exists")
    return problem("service account", f"{name} does not exist", _create(facts))


def _create(facts: Facts) -> str:
    return (
        f"Create it (kubectl create serviceaccount {facts.service_account} -n {facts.namespace}), "
        "or name another one: service_account=, KINETIC_SERVICE_ACCOUNT."
    )


def _pools(facts: Facts) -> Finding:
    if facts.nodes is None:
        return ok("node pools", "nodes may not be listed")
    offered = [str(p) for p in pools.pools_of(facts.nodes) if p.accelerator]
    if not offered:
        return ok("node pools", "no nodes with accelerators now")
    return ok("node pools", "; ".join(offered))


def _addons(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    if (tiers := facts.multi_tier) is not None:
        well = ok(addons.MEMORY, addons.describe_multi_tier(tiers))
        found += addons.check_memory(tiers, facts.nodes or ()) or [well]
    if (networks := facts.networks) is not None:
        well = ok(addons.NETWORKS, "pods can claim them")
        found += addons.check_networks(networks) or [well]
    return found


def registry(uri: str, fault: str) -> Finding:
    """Return the doctor's check of the registry for built images.

    Args:
        uri: the registry.
        fault: why images cannot be built and found there, or "".
    """
    if not fault:
        return ok("images", f"can be built, and are found in {uri}")
    remedy = (
        'Only container_image="bundled" needs it: without, pods start from a public image and '
        "install what the project requires. KINETIC_IMAGE_BUILDS=off asks for no builds."
    )
    return warn("images", fault, remedy)


def why_not(facts: Facts, *, hosts: int) -> str:
    """Return why a job cannot be created at all, as a sentence; "" if it can.

    Args:
        facts: with at least the permissions that such a job needs.
        hosts: of the job.
    """
    if facts.problem is not None:
        return str(facts.problem)
    if hosts > 1 and not facts.jobsets.is_installed:
        return not_installed(JOBSETS)
    if facts.queues.queue and not facts.queues.is_installed:
        text = f"The cluster has no Kueue, so no queue {facts.queues.queue} can admit the job"
        return f"{text}; without one it would start at once. {_NO_KUEUE}"
    needs = _VITAL if hosts > 1 else (Need.ALL,)
    missing = [r for r, allowed in facts.rights.items() if not allowed and r.need in needs]
    if missing:
        rights = _name_rights(missing)
        return f"You may not {rights} in namespace {facts.namespace}. {_advise_role(facts)}"
    if facts.has_account is False:
        name = facts.service_account
        text = f"The service account {name} does not exist in namespace {facts.namespace}."
        return f"{text} {_create(facts)}"
    troubles = [
        *(addons.missing_memory(facts.multi_tier) if facts.multi_tier else ()),
        *(addons.check_networks(facts.networks) if facts.networks else ()),
        *facts.no_buckets,
    ]
    return next((f"{t.detail[0].upper()}{t.detail[1:]}. {t.remedy}" for t in troubles), "")


def live_accelerators(nodes: Iterable[Document]) -> tuple[PoolRow, ...]:
    """Return what the node pools of a cluster offer: `kinetic accelerators --live`."""
    known = catalog_rows()
    return tuple(_live(pool, known) for pool in pools.pools_of(nodes) if pool.accelerator)


def _live(pool: NodePool, known: Iterable[Topology]) -> PoolRow:
    fitting = [row for row in known if _fits(row, pool)]
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


def check_job(
    api: Api,
    hosts: int,
    service_account: str,
    asked: Asked = NOTHING_ASKED,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask whether the cluster accepts a job of this size, unless it was asked recently: a good
    answer holds for a minute, in the whole process, so that many submissions ask once.

    Raises:
        PreflightError: it does not accept such jobs.
        BackendUnavailable: it does not answer.
    """
    question = (api.server, api.namespace, hosts > 1, service_account, asked)
    if clock() < _well.get(question, float("-inf")) + COUNTS_S:
        return
    facts = gather_for(api, hosts, service_account=service_account, asked=asked)
    if facts.problem is not None:
        raise facts.problem
    if why := why_not(facts, hosts=hosts):
        raise PreflightError(why)
    _well[question] = clock()
