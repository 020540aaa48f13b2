"""What is created in a cluster for a job: a workload, its Secret, and the template of what its pods
claim.

In: a plan, `PodSettings`. Out: plain documents. Pure, and without the kubernetes package.

One host is a Job; several are a JobSet: a Job for each slice, with DNS names by which hosts find
the leader. Both are Indexed, and their pods have one template. Pods are restarted as often as
`retries` says, not at all if the host's code failed (it has an exit code of its own), and without
counting if the host's machine was taken away: a restarted host sees in the store how far its job
is, and no function runs more often than `retries` allows.

The JobSet of an elastic job has one pod more, the head, which leads and runs no function: with it
the job ends. Pods of slices come and go: a lost one is replaced alone, so that the others, and the
head, stay. The JobSet of a single controller is made by `pathways`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kinetic._backends.base import Document
from kinetic._backends.kubernetes import pathways, pods, volumes
from kinetic._backends.kubernetes.nodes import POOL_LABEL
from kinetic._backends.kubernetes.observed import EXCLUSIVE, HEAD, HOSTS, JOBSET, QUEUE_LABEL
from kinetic._backends.kubernetes.pods import CONTAINER, PodSettings
from kinetic._backends.kubernetes.resources import CLAIM_TEMPLATES
from kinetic._core.exits import ProgramCode
from kinetic._core.plan import Plan

KEPT_S = 600
KEPT_DEBUG_S = 7200
"""How long a finished workload stays; its output and verdict are in the store."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_JOBSETS = "jobset.x-k8s.io/v1alpha2"
_BY_RULE, _AT_NO_COST = "PodFailurePolicy", "RestartJobSetAndIgnoreMaxRestarts"


def _exits_with(code: ProgramCode) -> Document:
    return {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}}


_CODE_FAILED: Document = {"action": "FailJob"} | _exits_with(ProgramCode.CODE_FAILED)
_TAKEN_AWAY = (
    _exits_with(ProgramCode.TAKEN_AWAY),
    {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
)
"""Pods that the cluster took away; the leader's exit code says so for others, too."""
_RESTARTS_OF_A_HOST = 1000
"""How often each pod of an elastic job's slice may fail: a Job that has failed is not started
again, and its JobSet fails with it. `max_failures=` ends the job long before; what is taken away
does not count."""
_FREE = [{"action": "Ignore"} | condition for condition in _TAKEN_AWAY]
"""Pods that the cluster took away are replaced at once, and without counting."""
_GANG_RULES = [_CODE_FAILED, *({"action": "FailJob"} | condition for condition in _TAKEN_AWAY)]


def render(plan: Plan, settings: PodSettings) -> list[Document]:
    """Return the workload of a plan, its Secret, whose values are still empty, and what else it
    owns."""
    if plan.has_single_controller:
        return [_pathways_jobset(plan, settings), _secret(plan)]
    if plan.has_head:
        workload = _elastic_jobset(plan, settings)
    elif plan.hosts > 1:
        workload = _jobset(plan, settings)
    else:
        rules, retries = [_CODE_FAILED, *_FREE], plan.options.retries
        spec = _job_spec(plan, settings, rules, retries, in_jobset=False)
        workload = _workload(plan, "batch/v1", "Job", spec)
    return [workload, _secret(plan), *_claim_templates(plan, settings)]


def with_secrets(
    secret: Document,
    owner: Document,
    *,
    token: str,
    certificate: str,
    key: str,
    values: Mapping[str, str],
) -> Document:
    """Return the Secret as it is created: with its values and its owner.

    Args:
        secret: as rendered.
        owner: the workload, as the API server created it.
        token, certificate, key: of the gang.
        values: the user's secrets, by variable.
    """
    own = {"token": token, "tls.crt": certificate, "tls.key": key}
    theirs = {pods.secret_key(name): value for name, value in values.items()}
    return add_owner(secret, owner) | {"stringData": secret["stringData"] | own | theirs}


def add_owner(document: Document, owner: Document) -> Document:
    """Return a document that the cluster deletes with its owner.

    Args:
        document: as rendered.
        owner: the workload, as the API server created it.
    """
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return document | {"metadata": document["metadata"] | {"ownerReferences": [reference]}}


def _metadata(plan: Plan, more: Mapping[str, str] | None = None) -> Document:
    metadata: Document = {
        "name": pods.workload_name(plan),
        "labels": pods.labels(plan) | dict(more or {}),
        "annotations": pods.remarks(plan),
    }
    if plan.place.namespace:
        metadata["namespace"] = plan.place.namespace
    return metadata


def _admission(plan: Plan) -> dict[str, str]:
    """Labels for Kueue, which holds the workload back until all of its pods fit."""
    queue, priority = plan.place.queue, plan.options.priority
    if not queue:
        return {}
    return {QUEUE_LABEL: queue} | ({PRIORITY_LABEL: priority} if priority else {})


def _workload(plan: Plan, version: str, kind: str, spec: Document) -> Document:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": _metadata(plan, _admission(plan)),
        "spec": spec | {"ttlSecondsAfterFinished": KEPT_DEBUG_S if plan.options.debug else KEPT_S},
    }


def _pathways_jobset(plan: Plan, settings: PodSettings) -> Document:
    spec = pathways.spec(
        plan,
        settings,
        head=pods.template(plan, settings, in_jobset=True),
        worker=pods.with_chips(plan, settings),
        head_rules=_GANG_RULES,
    )
    policy = spec["failurePolicy"] | _failure_policy(plan.options.retries)
    return _workload(plan, _JOBSETS, JOBSET, spec | {"failurePolicy": policy})


def _jobset(plan: Plan, settings: PodSettings) -> Document:
    # Google's own JobSets with multi-tier checkpointing say it as a whole.
    exclusive = _exclusive(plan, settings)
    template: Document = {
        "metadata": {
            "labels": pods.labels(plan),
            "annotations": pods.remarks(plan) | (exclusive if plan.has_head else {}),
        },
        "spec": _job_spec(plan, settings, _GANG_RULES, 0, in_jobset=True),
    }
    spec: Document = {
        "coordinator": {"replicatedJob": HOSTS, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": _failure_policy(plan.options.retries),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {"name": HOSTS, "replicas": plan.options.most_slices, "template": template}
        ],
    }
    jobset = _workload(plan, _JOBSETS, JOBSET, spec)
    jobset["metadata"]["annotations"] |= {} if plan.has_head else exclusive
    return jobset


def _elastic_jobset(plan: Plan, settings: PodSettings) -> Document:
    """Slices come before the head, so that their pods have the numbers of hosts."""
    jobset = _jobset(plan, settings)
    spec, elastic = jobset["spec"], plan.options.elastic
    slices = spec["replicatedJobs"][0]["template"]["spec"]
    slices["backoffLimit"] = plan.topology.hosts * _RESTARTS_OF_A_HOST
    slices["podFailurePolicy"] = {"rules": _FREE}
    head: Document = {
        "metadata": {"labels": pods.labels(plan), "annotations": pods.remarks(plan)},
        "spec": {
            "backoffLimit": 0 if elastic is None else elastic.max_failures,
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "podFailurePolicy": {"rules": [_CODE_FAILED, *_FREE]},
            "template": pods.template(plan, settings, in_jobset=True, is_head=True),
        },
    }
    spec["replicatedJobs"].append({"name": HEAD, "replicas": 1, "template": head})
    spec["coordinator"] = {"replicatedJob": HEAD, "jobIndex": 0, "podIndex": 0}
    spec["failurePolicy"] = {"maxRestarts": 0}
    spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": [HEAD]}
    return jobset


def _job_spec(
    plan: Plan, settings: PodSettings, rules: list[Document], backoff: int, *, in_jobset: bool
) -> Document:
    return {
        "backoffLimit": backoff,
        "completionMode": "Indexed",
        "completions": plan.topology.hosts,
        "parallelism": plan.topology.hosts,
        "podFailurePolicy": {"rules": rules},
        "template": pods.template(plan, settings, in_jobset=in_jobset),
    }


def _failure_policy(retries: int) -> Document:
    """The rule that failed a Job is named in the condition's message, not in its reason."""
    code = f"exit code {int(ProgramCode.CODE_FAILED)} "
    taken_away = f"exit code {int(ProgramCode.TAKEN_AWAY)} "
    return {
        "maxRestarts": retries,
        "rules": [
            _rule("code", "FailJobSet", code),
            _rule("taken_away", _AT_NO_COST, taken_away),
            _rule("disruption", _AT_NO_COST, "DisruptionTarget"),
        ],
    }


def _rule(name: str, action: str, message: str) -> Document:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": [_BY_RULE],
        "onJobFailureMessagePatterns": [message],  # since JobSet 0.10
    }


def _exclusive(plan: Plan, settings: PodSettings) -> dict[str, str]:
    """A slice of several machines has its own node pool; two slices never share one."""
    shares = plan.topology.kind != "tpu" or not plan.topology.multi_host or settings.simulated
    return {} if shares else {EXCLUSIVE: POOL_LABEL}


def _secret(plan: Plan) -> Document:
    keys = [*pods.SECRETS.values(), *pods.KEY.values(), *map(pods.secret_key, plan.secrets)]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(plan),
        "type": "Opaque",
        "stringData": dict.fromkeys(keys, ""),
    }


def _claim_templates(plan: Plan, settings: PodSettings) -> list[Document]:
    if not plan.options.network_devices or settings.simulated:
        return []
    return [
        {
            "apiVersion": CLAIM_TEMPLATES.api_version,
            "kind": "ResourceClaimTemplate",
            "metadata": _metadata(plan),
            "spec": volumes.claim_template(plan),
        }
    ]
