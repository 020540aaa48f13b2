"""The diagnosis of pods without nodes, from the nodes and messages of scheduler and autoscaler.

In: the workload, its pods, events, nodes, the time. Out: a `JobDiagnosis`, or None if all pods have
nodes. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from kinetic._backends.kubernetes import nodes as pools
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import (
    PATHWAYS_HEAD,
    Document,
    EventsOf,
    Pod,
    PodSet,
    Stage,
    labels,
    name_pods,
    shape_of,
)
from kinetic._core.quantities import amount_of

SCALE_UP_S = 30.0
"""An autoscaler writes within this many seconds an event that says whether it adds nodes. If there
is no such event, the cluster has no autoscaler."""
_SCALED = ("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp", "ScaleUpTimedOut")
_PASSING = (
    "max node group size",
    "max cluster",
    "max total nodes",
    "in backoff after",
    "not ready for scale-up",
)
"""Substrings of an autoscaler's message that it cannot add nodes now, but perhaps later."""
_GROUPS = re.compile(r"([\w-]+) (\d+)->(\d+) \(max: \d+\)")
_REQUEST = ("AcceptedProvisioningRequest", "ProvisioningRequestPending")
_ASK_FOR_LESS = "Ask for less with cpu=, memory= or local_storage=."


def why_unscheduled(
    workload: Document,
    pods: Sequence[Pod],
    events: EventsOf,
    nodes: Sequence[Document] | None,
    *,
    now: float | None,
    scale_up_s: float = SCALE_UP_S,
) -> JobDiagnosis | None:
    """Return why some pods have no nodes.

    Args:
        workload: the Job or JobSet.
        pods: one pod for each host.
        events: returns the events of a pod.
        nodes: the nodes of the cluster; None if the caller may not list them.
        now: seconds since the epoch, or None.
        scale_up_s: how long to wait for an autoscaler's event, in seconds.
    """
    stuck = [pod for pod in pods if pod.stage is Stage.UNSCHEDULED and pod.unschedulable]
    if not stuck:
        return None
    hosts = tuple(pod.host for pod in stuck)
    reason, message = _read_autoscaler(stuck[0], events)
    if reason in ("TriggeredScaleUp", *_REQUEST):
        return JobDiagnosis(JobCause.PROVISIONING, _describe_added_nodes(message), hosts=hosts)
    of = shape_of(workload).set_at(hosts[0])
    waited = _is_over(stuck, now, scale_up_s)
    siblings = [pod for pod in pods if pod.noun == of.noun]
    placed = sum(pod.stage is not Stage.UNSCHEDULED for pod in siblings)
    finding = _from_nodes(of, stuck, nodes, placed=placed)
    if reason in ("FailedScaleUp", "ScaleUpTimedOut"):
        why = _strip_notes(message)
        text = f'{finding.sentence} The cluster tried to add nodes and failed: "{why}".'
        return JobDiagnosis(JobCause.NO_SCALE_UP, text, hosts=hosts)
    if reason == "NotTriggerScaleUp":
        passes = any(words in message for words in _PASSING)
        impossible = finding.kind is JobCause.NO_NODE_POOL and not passes
        kind = finding.kind if impossible else JobCause.NO_SCALE_UP
        text = f'{finding.sentence} The cluster adds no nodes: "{_strip_notes(message)}".'
        return JobDiagnosis(kind, text, impossible, hosts)
    if finding.kind is JobCause.NO_NODE_POOL and waited:
        return JobDiagnosis(finding.kind, finding.sentence, True, hosts)
    return finding


def _read_autoscaler(pod: Pod, events: EventsOf) -> tuple[str, str]:
    """Return the reason and the message of the newest event that an autoscaler wrote about a pod;
    two empty strings if there is none."""
    relevant = [event for event in events(pod.name) if event.get("reason") in _SCALED + _REQUEST]
    if not relevant:
        return "", ""
    last = max(relevant, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))
    return str(last.get("reason")), str(last.get("message") or "")


def _is_over(stuck: Sequence[Pod], now: float | None, scale_up_s: float) -> bool:
    if now is None:
        return False
    try:
        since = min(datetime.fromisoformat(pod.unschedulable_since) for pod in stuck)
    except (ValueError, TypeError):
        return False
    return now - since.timestamp() > scale_up_s


def _describe_added_nodes(message: str) -> str:
    groups = [f"{name} from {old} to {new} nodes" for name, old, new in _GROUPS.findall(message)]
    if groups:
        return f"Nodes are being added for the job: {', '.join(groups)}."
    return "Nodes are being added for the job."


def _from_nodes(
    of: PodSet,
    stuck: Sequence[Pod],
    nodes: Sequence[Document] | None,
    *,
    placed: int,
) -> JobDiagnosis:
    hosts = tuple(pod.host for pod in stuck)
    spec = of.template.get("spec") or {}
    kind = _kind_of(spec.get("nodeSelector") or {})
    fitting = None if nodes is None else pools.select_open_nodes(nodes, spec)
    scheduler = _strip_notes(stuck[0].unschedulable)
    if placed:
        verb = "waits" if len(stuck) == 1 else "wait"
        some = f"{placed} of {of.pods} {of.noun}s have nodes; {name_pods(stuck)} {verb} for a node"
        text = f"{some}{kind and f' with {kind}'}. {_sizes(of, fitting)}"
        advice = f"The job starts when all {of.noun}s have nodes."
        return JobDiagnosis(
            JobCause.PARTIAL_SLICE, f"{text}{advice} {_quote_scheduler(scheduler)}", hosts=hosts
        )
    if fitting == [] or (fitting is None and not _is_short(scheduler)):
        text = f"No node of the cluster has {kind or 'what the pods request'}. {_offers(nodes)}"
        return JobDiagnosis(
            JobCause.NO_NODE_POOL, f"{text}{_quote_scheduler(scheduler)}", hosts=hosts
        )
    if fitting and (text := why_too_large(of, nodes or ())):
        return JobDiagnosis(
            JobCause.NO_NODE_POOL, f"{text} {_quote_scheduler(scheduler)}", hosts=hosts
        )
    if fitting and (largest := _largest_pool(fitting)) < of.pods_each:
        text = f"A slice with {kind} needs {of.pods_each} nodes, but no pool has over {largest}."
        return JobDiagnosis(
            JobCause.PARTIAL_SLICE, f"{text} {_quote_scheduler(scheduler)}", hosts=hosts
        )
    many = len(fitting or ())
    count = "The only node" if many == 1 else f"The {many} nodes" if many else "The nodes"
    be, them = ("is", "it") if many == 1 else ("are", "them")
    text = f"{count}{kind and f' with {kind}'} {be} in use or not ready. The job waits for {them}."
    return JobDiagnosis(
        JobCause.NO_ROOM, f"{text} {_describe_head(of)}{_quote_scheduler(scheduler)}", hosts=hosts
    )


def why_too_large(of: PodSet, nodes: Sequence[Document]) -> str:
    """Return a sentence if even the largest suitable node is too small for a pod of this set; "" if
    a node is large enough, or its size is unknown."""
    spec = of.template.get("spec") or {}
    fitting = pools.select_open_nodes(nodes, spec)
    for name, amounts in requests_of(of).items():
        offered = [pools.amount_on(node, name) for node in fitting]
        most = max(offered, key=amount_of, default="")
        if most and all(offered) and sum(map(amount_of, amounts)) > amount_of(most):
            kind, amount = _kind_of(spec.get("nodeSelector") or {}), " + ".join(amounts)
            requested = f"{amount} CPUs" if name == "cpu" else f"{amount} of {name}"
            text = f"No node{kind and f' with {kind}'} has the {requested} that a pod requests"
            return f"{text}; the largest has {most}. {_ASK_FOR_LESS}"
    return ""


def requests_of(of: PodSet) -> dict[str, list[str]]:
    """Return the amounts that the containers and sidecars of a pod request, by resource."""
    spec = of.template.get("spec") or {}
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    requests: dict[str, list[str]] = {}
    for container in (*sidecars, *(spec.get("containers") or ())):
        resources = container.get("resources") or {}
        merged = (resources.get("limits") or {}) | (resources.get("requests") or {})
        for name, amount in merged.items():
            requests.setdefault(name, []).append(str(amount))
    return requests


def _describe_head(of: PodSet) -> str:
    """Return a sentence about the head pod of a single controller, whose large requests most
    machines without chips cannot satisfy; "" for other pods."""
    if of.name != PATHWAYS_HEAD:
        return ""
    requests = sorted(requests_of(of).items())
    text = ", ".join(f"{name} {' + '.join(amounts)}" for name, amounts in requests)
    return f"The pod of the controller requests {text}. " if text else ""


def _is_short(scheduler: str) -> bool:
    """True if the scheduler says that suitable nodes exist, but are full or unavailable."""
    return "Insufficient" in scheduler or "unschedulable" in scheduler or "taint" in scheduler


def _kind_of(selector: Document) -> str:
    accelerator = selector.get(pools.TPU_LABEL) or selector.get(pools.GPU_LABEL) or ""
    topology = selector.get(pools.TOPOLOGY_LABEL, "")
    named = " ".join(part for part in (accelerator, topology) if part)
    node_selector = (pools.TPU_LABEL, pools.GPU_LABEL, pools.TOPOLOGY_LABEL)
    rest = ", ".join(f"{k}={v}" for k, v in sorted(selector.items()) if k not in node_selector)
    return " and ".join(part for part in (named, rest) if part)


def _largest_pool(fitting: Sequence[Document]) -> int:
    """Return the number of nodes in the largest pool: all nodes of a slice must be in one pool."""
    sizes = Counter(labels(node).get(pools.POOL_LABEL, "") for node in fitting)
    return max(sizes.values())


def _sizes(of: PodSet, fitting: Sequence[Document] | None) -> str:
    if not fitting or _largest_pool(fitting) >= of.pods_each:
        return ""
    return (
        f"The cluster has {_largest_pool(fitting)} such nodes, and a slice needs {of.pods_each}. "
    )


def _offers(nodes: Sequence[Document] | None) -> str:
    if nodes is None:
        return ""
    offered = [str(pool) for pool in pools.pools_of(nodes) if pool.accelerator]
    if not offered:
        return "It has no nodes with accelerators now. "
    return f"Its node pools: {'; '.join(offered)}. "


def _quote_scheduler(scheduler: str) -> str:
    return f'The scheduler says: "{scheduler}".'


def _strip_notes(message: str) -> str:
    """Drop the scheduler's notes on preemption and claims: they are long and do not help."""
    text = re.split(r"\.? (?:no new claims|preemption:)", message)[0]
    return " ".join(text.removeprefix("pod ").split()).rstrip(". ")
