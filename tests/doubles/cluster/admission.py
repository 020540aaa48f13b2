"""Admission: the webhooks and quotas that check a new object before it is stored.

The pod webhook implements exclusive topology: the first pod of a Job takes a node pool, and its
other pods must run there too.
"""

from __future__ import annotations

import uuid

from doubles.cluster.collector import TERMINAL
from doubles.cluster.kinds import (
    CONFIG_MAPS,
    INDEX,
    JOB_SETS,
    JOBS,
    NODES,
    PODS,
    QUOTAS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
    with_defaults,
)
from doubles.cluster.objects import Object, dig, plain_number, quantity
from doubles.cluster.problems import forbidden, refusal
from doubles.cluster.store import Store

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
JOB_KEY = "jobset.sigs.k8s.io/job-key"
PRIORITY = "jobset.sigs.k8s.io/priority"
COUNTED = {JOBS: "count/jobs.batch", JOB_SETS: "count/jobsets.jobset.x-k8s.io", PODS: "pods"}
COUNTED |= {SECRETS: "count/secrets", CONFIG_MAPS: "count/configmaps", SERVICES: "count/services"}


class Admission:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.refusals: list[str] = []
        """Messages with which a webhook refuses the next pods; the Job controller tries again."""

    def create_pod(self, pod: Object) -> Object:
        """Create a pod for the Job controller."""
        if self.refusals:
            raise refusal(403, "Forbidden", self.refusals.pop(0))
        pod["metadata"]["uid"] = str(uuid.uuid4())
        with self._store.lock:
            self.name(pod)
            self.place(pod)
            pod = with_defaults(PODS, pod)
            self.check_account(pod)
            self.check_quota(PODS, pod)
            return self._store.create(PODS, pod)

    @staticmethod
    def name(obj: Object) -> None:
        from doubles.cluster.objects import random_suffix

        meta = obj["metadata"]
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + random_suffix()

    def place(self, pod: Object) -> None:
        """Restrict a pod to a node pool that no other Job uses."""
        meta, spec = pod["metadata"], pod["spec"]
        annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
        topology, key = annotations.get(EXCLUSIVE), labels.get(JOB_KEY)
        if not topology or not key:
            return
        labels[PRIORITY] = str(spec.get("priority", 0))
        if annotations.get(INDEX) == "0":
            own = {"key": JOB_KEY, "operator": "In", "values": [key]}
            others = [
                {"key": JOB_KEY, "operator": "Exists"},
                {"key": JOB_KEY, "operator": "NotIn", "values": [key]},
                {"key": PRIORITY, "operator": "In", "values": [labels[PRIORITY]]},
            ]
            spec.setdefault("affinity", {})["podAffinity"] = _required([own], topology)
            spec["affinity"]["podAntiAffinity"] = _required(others, topology)
            return
        leader = self._leader(pod, key)
        node = leader and self._store.get(NODES, "", dig(leader, "spec", "nodeName", default=""))
        domain = node and dig(node, "metadata", "labels", topology)
        if not domain:
            why = (
                'admission webhook "vpod.kb.io" denied the request: follower pod node selector for'
                f" topology domain not found. missing selector: {topology}"
            )
            raise refusal(403, "Forbidden", why)
        spec["nodeSelector"] = (spec.get("nodeSelector") or {}) | {topology: domain}

    def _leader(self, pod: Object, key: str) -> Object | None:
        owner = dig(pod, "metadata", "ownerReferences", 0, "uid")
        for _, other in self._store.owned(owner):
            meta = other["metadata"]
            if (
                other["kind"] == "Pod"
                and dig(meta, "annotations", INDEX) == "0"
                and "deletionTimestamp" not in meta
                and dig(other, "status", "phase") not in TERMINAL
                and meta["labels"].get(JOB_KEY) == key
            ):
                return other
        return None

    def check_account(self, pod: Object) -> None:
        """Refuse a pod whose service account does not exist."""
        namespace, account = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
        if self._store.get(SERVICE_ACCOUNTS, namespace, account) is None:
            why = (
                f"error looking up service account {namespace}/{account}: serviceaccount"
                f' "{account}" not found'
            )
            raise forbidden(PODS, pod["metadata"]["name"], why)

    def check_quota(self, resource: Resource, obj: Object) -> None:
        """Refuse an object that exceeds a ResourceQuota of the namespace."""
        namespace = obj["metadata"].get("namespace", "")
        for quota in self._store.all(QUOTAS, namespace) if namespace else ():
            hard = dig(quota, "spec", "hard", default={})
            requested = {k: v for k, v in _usage(resource, obj).items() if k in hard}
            if not requested:
                continue
            used = self._used(namespace, set(requested))
            over = [k for k in requested if used[k] + requested[k] > quantity(hard[k])]
            if over:
                parts = [
                    f"{word}: " + ",".join(f"{k}={plain_number(v)}" for k, v in what)
                    for word, what in (
                        ("requested", [(k, requested[k]) for k in over]),
                        ("used", [(k, used[k]) for k in over]),
                        ("limited", [(k, quantity(hard[k])) for k in over]),
                    )
                ]
                why = f"exceeded quota: {quota['metadata']['name']}, {', '.join(parts)}"
                raise forbidden(resource, obj["metadata"]["name"], why)

    def _used(self, namespace: str, names: set[str]) -> dict[str, float]:
        total = dict.fromkeys(names, 0.0)
        for resource in COUNTED:
            for obj in self._store.all(resource, namespace):
                if resource is PODS and obj["status"].get("phase") in TERMINAL:
                    continue
                for name, amount in _usage(resource, obj).items():
                    if name in total:
                        total[name] += amount
        return total


def _required(expressions: list[Object], topology: str) -> Object:
    term = {"labelSelector": {"matchExpressions": expressions}, "topologyKey": topology}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term | {"namespaceSelector": {}}]}


def _usage(resource: Resource, obj: Object) -> dict[str, float]:
    """Return the amounts of an object that count against quotas, by resource name."""
    usage = {COUNTED[resource]: 1.0} if resource in COUNTED else {}
    if resource is PODS:
        for container in obj["spec"]["containers"]:
            wanted = dig(container, "resources", "requests", default={})
            for name, amount in wanted.items():
                for full in (f"requests.{name}", name):
                    usage[full] = usage.get(full, 0.0) + quantity(amount)
            for name, amount in dig(container, "resources", "limits", default={}).items():
                full = f"limits.{name}"
                usage[full] = usage.get(full, 0.0) + quantity(amount)
    return usage
