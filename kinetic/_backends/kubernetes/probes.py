"""The probes of a cluster for `kinetic doctor`. They create nothing: JobSet is tried with a dry run
of a job of two hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kinetic._backends.kubernetes import manifests, preflight
from kinetic._backends.kubernetes import nodes as pools
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.errors import Forbidden, not_installed
from kinetic._backends.kubernetes.observed import condition, metadata
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._backends.kubernetes.preflight import Needs
from kinetic._backends.kubernetes.resources import JOBSETS, NODES, QUEUE_WORKLOADS
from kinetic._backends.kubernetes.rights import VITAL, Need, Right, list_relevant
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.options import Options
from kinetic._core.place import JOBSET, Place
from kinetic._core.plan import Blob, Plan, Versions
from kinetic._store.many import at_once
from kinetic.errors import KineticError, PreflightError

OLDEST = (1, 27)
"""Oldest supported Kubernetes: from 1.27 on, Jobs may be Indexed and have a pod failure policy."""
CALLS_AT_ONCE = 8
_NO_CONTROLLER = (
    "only the definition of JobSets is installed. Their controller, which would start the hosts, "
    "does not run."
)
"""The fault that is reported if a dry run leaves `spec.successPolicy` empty, which JobSet's
controller would fill in."""


def examine(api: Api, needs: Needs) -> tuple[Finding, ...]:
    """Run all probes, a few of them at a time; return their findings.

    Args:
        api: the cluster.
        needs: the needs of jobs with the user's settings.
    """
    where = f"{api.server}, namespace {api.namespace}"
    try:
        version = api.version()
        findings_of_probes = at_once(lambda probe: list(probe(api, needs)), PROBES, CALLS_AT_ONCE)
    except KineticError as error:
        return (problem("cluster", f"{where}: {error}"),)
    text = f"{where} answers; Kubernetes {version.text or 'of an unknown version'}"
    if version.major and (version.major, version.minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        first = warn("cluster", text, f"kinetic needs {oldest} or later.")
    else:
        first = ok("cluster", text)
    return (first, *(finding for findings in findings_of_probes for finding in findings))


def _probe_jobset(api: Api, _needs: Needs) -> Iterable[Finding]:
    plan = Plan(
        job_id="job-00000000",
        name="kinetic doctor",
        place=Place(JOBSET),
        options=Options(resolve("cpu"), slices=2, retries=1),
        payload=Blob("0" * 64, 0),
        versions=Versions("3.11", "3", "0"),
        created_at=0.0,
    )
    trial = manifests.render(plan, PodSettings(image="none", store_uri="gs://doctor"))[0]
    if not api.knows(JOBSETS):
        yield warn("JobSet", "is not installed", not_installed(JOBSETS))
        return
    fault = ""
    try:
        stored = api.create(JOBSETS, trial, dry_run=True)
        fault = "" if "successPolicy" in stored["spec"] else _NO_CONTROLLER
    except Forbidden:
        pass  # Another probe reports missing permissions.
    except KineticError as error:
        fault = str(error)
    if fault:
        remedy = "Jobs of several hosts cannot run. Show the answer to an administrator."
        yield problem("JobSet", f'the cluster refuses a JobSet. Its answer: "{fault}"', remedy)
    else:
        yield ok("JobSet", "is installed, and takes jobs of several hosts")


def _probe_rights(api: Api, needs: Needs) -> Iterable[Finding]:
    rights = list_relevant(networks=needs.networks, queue=bool(needs.queue))
    allowed = at_once(lambda r: api.may(r.verb, r.resource), rights, CALLS_AT_ONCE)
    missing = [right for right, may in zip(rights, allowed, strict=True) if not may]
    remedy = f"Ask an administrator for a role with these verbs in namespace {api.namespace}."
    for need in Need:
        lacking = [right for right in missing if right.need is need]
        if lacking:
            text = f"missing for {need}: {_name_rights(lacking)}"
            yield (problem if need in VITAL else warn)("rights", text, remedy)
    if not missing:
        yield ok("rights", f"you have all {len(rights)} that jobs need")


def _name_rights(missing: Iterable[Right]) -> str:
    by_kind: dict[str, list[str]] = {}
    for right in missing:
        by_kind.setdefault(right.resource.full_name, []).append(right.verb)
    return "; ".join(f"{', '.join(verbs)} {kind}" for kind, verbs in by_kind.items())


def _probe_account(api: Api, needs: Needs) -> Iterable[Finding]:
    name = needs.account
    if not name:
        yield ok("service account", "pods run as the default one")
        return
    try:
        preflight.check_account(api, name)
    except PreflightError as error:
        yield problem("service account", f"{name} does not exist", str(error))
    else:
        yield ok("service account", f"{name} is used")


def _probe_pools(api: Api, _needs: Needs) -> Iterable[Finding]:
    try:
        nodes = api.list(NODES).items
    except Forbidden:
        yield ok("node pools", "unknown: you may not list nodes")
        return
    offered = [str(pool) for pool in pools.pools_of(nodes) if pool.accelerator]
    yield ok("node pools", "; ".join(offered) or "no nodes with accelerators now")


def _probe_queue(api: Api, needs: Needs) -> Iterable[Finding]:
    if not needs.queue:
        has_kueue = any(api.knows(kind) for kind in QUEUE_WORKLOADS)
        yield ok("Kueue", "is installed" if has_kueue else "is not installed")
        return
    try:
        queue = preflight.check_queue(api, needs.queue)
    except PreflightError as error:
        yield problem("Kueue", str(error))
        return
    conditions = ((queue or {}).get("status") or {}).get("conditions") or ()
    if queue is None:
        yield ok("Kueue", f"the state of queue {needs.queue} is unknown: you may not read queues")
    elif any(c.get("type") == "Active" for c in conditions) and not condition(queue, "Active"):
        message = next(c.get("message") for c in conditions if c.get("type") == "Active")
        remedy = "Ask an administrator to repair it, or name another queue: until then, jobs wait."
        yield warn("Kueue", f"the queue {needs.queue!r} admits no jobs: {message}", remedy)
    else:
        yield ok("Kueue", f"is installed; the queue {needs.queue} admits jobs")


def _probe_memory(api: Api, needs: Needs) -> Iterable[Finding]:
    if not needs.multi_tier:
        return
    try:
        configurations = preflight.check_memory(api)
    except PreflightError as error:
        yield problem("multi-tier", str(error))
        return
    if configurations is None:
        yield ok("multi-tier", "unknown: you may not list CheckpointConfigurations")
        return
    for configuration in configurations:
        name = metadata(configuration).get("name", "")
        if message := (configuration.get("status") or {}).get("error"):
            text = f"the CheckpointConfiguration {name} was not accepted: {message}"
            advice = f"kubectl edit checkpointconfiguration {name}"
            yield problem("multi-tier", text, f"Ask an administrator to correct it: {advice}.")
        else:
            size = (configuration.get("spec") or {}).get("inMemoryVolumeSize")
            yield ok("multi-tier", f"{size} for each node of {name}")


def _probe_networks(api: Api, needs: Needs) -> Iterable[Finding]:
    if not needs.networks:
        return
    try:
        preflight.check_networks(api)
    except PreflightError as error:
        yield problem("network devices", str(error))
    else:
        yield ok("network devices", "pods can claim them")


PROBES: tuple[Callable[[Api, Needs], Iterable[Finding]], ...] = (
    _probe_jobset,
    _probe_rights,
    _probe_account,
    _probe_pools,
    _probe_queue,
    _probe_memory,
    _probe_networks,
)
