"""The objects of a job in a cluster: a workload, its Secret, and the template of its pods' claims.

In: a plan, `PodSettings`. Out: plain documents. Pure, and without the kubernetes package.

A job of one host is a Job; a job of several is a JobSet, with a Job for each slice and DNS names by
which hosts find the leader. All Jobs are Indexed, and their pods have one template. The cluster
restarts a failed gang up to `retries` times, but not if a host's exit code says that the user's
code failed. Restarts after the cluster took a machine away do not count. A restarted host reads the
job's progress from the store, so no function runs more often than `retries` allows.

The JobSet of an elastic job has one more pod, the head, which leads and runs no function; the job
ends with it. A lost pod of a slice is replaced alone, so that the other pods and the head stay.
`pathways` builds the JobSet of a single controller.
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
"""Seconds until the cluster deletes an ended workload; output and verdict are in the store."""
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
"""Rule conditions that match pods which the cluster took away. The leader exits with the code
TAKEN_AWAY if the cluster took another pod of its gang away."""
_HOST_RESTARTS = 1000
"""Most failures of each pod in a slice of an elastic job; evictions do not count. It is high
because a failed Job is not restarted and fails its JobSet. `max_failures=` ends a job sooner."""
_FREE = [{"action": "Ignore"} | condition for condition in _TAKEN_AWAY]
"""Rules for pods that the cluster took away: replace them at once, without counting a failure."""
_GANG_RULES = [_CODE_FAILED, *({"action": "FailJob"} | condition for condition in _TAKEN_AWAY)]


def render(plan: Plan, settings: PodSettings) -> list[Document]:
    """Return the workload of a plan, its Secret with empty values, and its other objects."""
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
    """Return the Secret with its values and its owner.

    Args:
        secret: the rendered Secret.
        owner: the workload, as the API server created it.
        token, certificate, key: the gang's secrets.
        values: the user's secrets, by variable.
    """
    own = {"token": token, "tls.crt": certificate, "tls.key": key}
    theirs = {pods.secret_key(name): value for name, value in values.items()}
    return add_owner(secret, owner) | {"stringData": secret["stringData"] | own | theirs}


def add_owner(document: Document, owner: Document) -> Document:
    """Return the document with an owner: the cluster deletes the object together with its owner.

    Args:
        document: the rendered document.
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
    """Return the labels with which Kueue suspends the workload until all of its pods fit."""
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
    # Annotate the whole JobSet, as Google does for multi-tier checkpointing, unless it has a head.
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
    """Return an elastic job's JobSet: slices, then the head, so that host numbers start at 0."""
    jobset = _jobset(plan, settings)
    spec, elastic = jobset["spec"], plan.options.elastic
    slices = spec["replicatedJobs"][0]["template"]["spec"]
    slices["backoffLimit"] = plan.topology.hosts * _HOST_RESTARTS
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
    """Return the failure policy of a JobSet. Its rules match the message of the failed Job, because
    the Job's reason does not say which rule for pods applied."""
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
    """Return the annotation that gives each slice of several machines its own node pool."""
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
