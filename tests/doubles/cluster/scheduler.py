"""The scheduler: assigns a node to each pod, or reports the reason why no node fits.

Events use the words of kube-scheduler. Each pod is scheduled on its own, without gangs.
"""

from __future__ import annotations

import random
from collections import Counter
from fnmatch import fnmatchcase as fnmatch

from doubles.cluster.collector import TERMINAL
from doubles.cluster.engine import Engine
from doubles.cluster.kinds import NODES, PODS
from doubles.cluster.objects import Object, dig, is_true, quantity, set_condition, stamp
from doubles.cluster.recorder import Recorder
from doubles.cluster.store import Change, Store

ACTOR = "default-scheduler"
SELECTOR = "node(s) didn't match Pod's node affinity/selector"
AFFINITY = "node(s) didn't match pod affinity rules"
ANTI_AFFINITY = "node(s) didn't match pod anti-affinity rules"


class Scheduler:
    def __init__(self, store: Store, engine: Engine, recorder: Recorder) -> None:
        self._store, self._engine, self._recorder = store, engine, recorder
        self.held: set[str] = set()
        """Patterns: pods with matching names are not scheduled, and no reason is reported."""
        self._waiting: set[tuple[str, str]] = set()
        engine.handle("schedule", self._sync)
        store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        if change.resource is NODES:
            self.look_again()
            return
        if change.resource is not PODS:
            return
        obj, key = change.object, _key(change.object)
        if change.type != "DELETED" and not obj["spec"].get("nodeName"):
            if change.type == "ADDED":
                self._waiting.add(key)
                self._engine.add("schedule", key)
            return
        self._waiting.discard(key)
        if change.type == "DELETED" or obj["status"].get("phase") in TERMINAL:
            self.look_again()

    def look_again(self) -> None:
        for key in sorted(self._waiting):
            self._engine.add("schedule", key)

    def _sync(self, key: tuple[str, str]) -> None:
        pod = self._store.get(PODS, *key)
        if pod is None or pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            self._waiting.discard(key)
            return
        if any(fnmatch(key[1], f"{prefix}*") for prefix in self.held):
            return
        nodes = self._store.all(NODES)
        pods = [
            p
            for p in self._store.all(PODS)
            if p["spec"].get("nodeName") and p["status"].get("phase") not in TERMINAL
        ]
        fitting, against, helpless = [], Counter[str](), 0
        for node in nodes:
            reasons, unresolvable = _obstacles(pod, node, nodes, pods)
            against.update(reasons)
            helpless += unresolvable
            if not reasons:
                fitting.append(node)
        if fitting:
            self._bind(pod, key, fitting, pods)
        else:
            self._refuse(pod, key, len(nodes), against, helpless)

    def _bind(
        self, pod: Object, key: tuple[str, str], fitting: list[Object], pods: list[Object]
    ) -> None:
        load = Counter(p["spec"]["nodeName"] for p in pods)
        least = min(load[n["metadata"]["name"]] for n in fitting)
        names = [n["metadata"]["name"] for n in fitting if load[n["metadata"]["name"]] == least]
        node = random.choice(names)

        def change(obj: Object) -> None:
            obj["spec"]["nodeName"] = node
            set_condition(
                obj["status"],
                {
                    "type": "PodScheduled",
                    "status": "True",
                    "lastProbeTime": None,
                    "lastTransitionTime": stamp(),
                },
            )

        new = self._store.update(PODS, *key, change, uid=pod["metadata"]["uid"])
        namespace, name = key
        message = f"Successfully assigned {namespace}/{name} to {node}"
        self._recorder.say(ACTOR, new, "Scheduled", message)

    def _refuse(
        self, pod: Object, key: tuple[str, str], total: int, against: Counter[str], helpless: int
    ) -> None:
        if total == 0:
            message = "no nodes available to schedule pods"
        else:
            reasons = ", ".join(sorted(f"{n} {why}" for why, n in against.items()))
            preemption = [
                f"{n} {why}"
                for why, n in (
                    ("Preemption is not helpful for scheduling", helpless),
                    ("No preemption victims found for incoming pod", total - helpless),
                )
                if n
            ]
            message = (
                f"0/{total} nodes are available: {reasons}. no new claims to deallocate,"
                f" preemption: 0/{total} nodes are available: {', '.join(sorted(preemption))}."
            )
        held = next((c for c in dig(pod, "status", "conditions", default=[])), None)
        if held is not None and held.get("message") == message:
            return
        self._recorder.say(ACTOR, pod, "FailedScheduling", message, warning=True)

        def change(obj: Object) -> None:
            set_condition(
                obj["status"],
                {
                    "type": "PodScheduled",
                    "observedGeneration": obj["metadata"].get("generation", 1),
                    "status": "False",
                    "lastProbeTime": None,
                    "lastTransitionTime": stamp(),
                    "reason": "Unschedulable",
                    "message": message,
                },
            )

        self._store.update(PODS, *key, change, uid=pod["metadata"]["uid"])


def _key(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _obstacles(
    pod: Object, node: Object, nodes: list[Object], pods: list[Object]
) -> tuple[list[str], bool]:
    """Return the reasons why a pod does not fit on a node, and True if an eviction cannot help."""
    spec = pod["spec"]
    taints = [t for t in node["spec"].get("taints") or () if t["effect"] != "PreferNoSchedule"]
    if node["spec"].get("unschedulable"):
        return ["node(s) were unschedulable"], True
    for taint in taints:
        if not any(tolerates(t, taint) for t in spec.get("tolerations") or ()):
            return ["node(s) had untolerated taint(s)"], True
    if not is_true(node, "Ready"):
        return ["node(s) were not ready"], True
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(k) != v for k, v in (spec.get("nodeSelector") or {}).items()):
        return [SELECTOR], True
    terms = dig(
        spec,
        "affinity",
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
    )
    if terms and not any(_expressions(t.get("matchExpressions"), labels) for t in terms):
        return [SELECTOR], True
    short = _shortages(pod, node, pods)
    if short:
        return short, False
    if (why := _affinity(pod, node, nodes, pods)) is not None:
        return [why], why == AFFINITY
    return [], False


def tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("value", "") == taint.get("value", ""))


def requests(pod: Object) -> Counter[str]:
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        for name, amount in dig(container, "resources", "requests", default={}).items():
            total[name] += quantity(amount)  # type: ignore[assignment]
    return total


def _shortages(pod: Object, node: Object, pods: list[Object]) -> list[str]:
    on_node = [p for p in pods if p["spec"]["nodeName"] == node["metadata"]["name"]]
    allocatable = node["status"]["allocatable"]
    if len(on_node) >= quantity(allocatable.get("pods", "110")):
        return ["Too many pods"]
    wanted = requests(pod)
    used: Counter[str] = Counter()
    for other in on_node if wanted else ():
        used.update(requests(other))
    return [
        f"Insufficient {name}"
        for name, amount in wanted.items()
        if amount and used[name] + amount > quantity(allocatable.get(name, "0"))
    ]


def _expressions(expressions: list[Object] | None, labels: Object) -> bool:
    for expression in expressions or ():
        key, values = expression["key"], expression.get("values") or []
        match expression["operator"]:
            case "In":
                fits = labels.get(key) in values
            case "NotIn":
                fits = labels.get(key) not in values
            case "Exists":
                fits = key in labels
            case "DoesNotExist":
                fits = key not in labels
            case operator:
                raise ValueError(operator)
        if not fits:
            return False
    return True


def _selects(selector: Object | None, pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    selector = selector or {}
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(k) == v for k, v in wanted.items()) and _expressions(
        selector.get("matchExpressions"), labels
    )


def _affinity(pod: Object, node: Object, nodes: list[Object], pods: list[Object]) -> str | None:
    places = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in nodes}
    labels = places[node["metadata"]["name"]]

    def is_near(other: Object, key: str) -> bool:
        domain = places.get(other["spec"]["nodeName"], {}).get(key)
        return domain is not None and domain == labels.get(key)

    required = "requiredDuringSchedulingIgnoredDuringExecution"
    for term in dig(pod, "spec", "affinity", "podAffinity", required, default=[]):
        matching = [p for p in pods if _selects(term.get("labelSelector"), p)]
        if not matching and _selects(term.get("labelSelector"), pod):
            continue
        if not any(is_near(p, term["topologyKey"]) for p in matching):
            return AFFINITY
    for term in dig(pod, "spec", "affinity", "podAntiAffinity", required, default=[]):
        matching = [p for p in pods if _selects(term.get("labelSelector"), p)]
        if any(is_near(p, term["topologyKey"]) for p in matching):
            return ANTI_AFFINITY
    return None
