"""Kueue: a workload in a queue is suspended until all of its resources fit in the quota.

A Workload object has the reason why its job waits. When it is admitted, the job is resumed. Queues
have a quota of each resource, without borrowing or preemption.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from doubles.cluster.engine import Engine
from doubles.cluster.kinds import CLUSTER_QUEUES, JOB_SETS, JOBS, LOCAL_QUEUES, WORKLOADS, Resource
from doubles.cluster.objects import (
    Object,
    clone,
    dig,
    is_true,
    owner_reference,
    plain_number,
    quantity,
    set_condition,
    stamp,
)
from doubles.cluster.recorder import Recorder
from doubles.cluster.store import Change, Store

LABEL = "kueue.x-k8s.io/queue-name"
ADMITS, RECONCILES = "kueue-admission", "jobset-controller"
FLAVOR = "default-flavor"


class Kueue:
    """Admission by quota. `quotas` has the quota of each local queue, by resource."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        recorder: Recorder,
        namespace: str,
        quotas: dict[str, dict[str, str]],
    ) -> None:
        self._store, self._engine, self._recorder = store, engine, recorder
        self.paused = False
        """Admit no new workload while this is true."""
        for name, quota in quotas.items():
            self._add_queue(namespace, name, quota)
        engine.handle("queues", self._sync)
        store.listeners.append(self._heard)

    def _add_queue(self, namespace: str, name: str, quota: dict[str, str]) -> None:
        resources = [{"name": k, "nominalQuota": v} for k, v in quota.items()]
        group = {
            "coveredResources": list(quota),
            "flavors": [{"name": FLAVOR, "resources": resources}],
        }
        spec = {"resourceGroups": [group]}
        self._store.create(CLUSTER_QUEUES, {"metadata": {"name": name}, "spec": spec})
        meta = {"name": name, "namespace": namespace}
        self._store.create(LOCAL_QUEUES, {"metadata": meta, "spec": {"clusterQueue": name}})

    @staticmethod
    def suspend(resource: Resource, obj: Object) -> None:
        """Suspend a new object that has a queue, like Kueue's webhook."""
        if resource in (JOBS, JOB_SETS) and LABEL in (obj["metadata"].get("labels") or {}):
            obj["spec"]["suspend"] = True

    def look_again(self) -> None:
        self._engine.add("queues", "all")

    def _heard(self, change: Change) -> None:
        if change.resource in (JOBS, JOB_SETS, LOCAL_QUEUES, CLUSTER_QUEUES):
            self.look_again()

    def _sync(self, _: str) -> None:
        owners = [
            (resource, obj)
            for resource in (JOB_SETS, JOBS)
            for obj in self._store.all(resource)
            if LABEL in (obj["metadata"].get("labels") or {})
            and not obj["metadata"].get("ownerReferences")
            and "deletionTimestamp" not in obj["metadata"]
        ]
        owners.sort(key=lambda pair: (pair[1]["metadata"]["creationTimestamp"], _age(pair[1])))
        used: dict[str, Counter[str]] = {}
        waiting = []
        for resource, owner in owners:
            workload = self._workload(resource, owner)
            if any(is_true(owner, kind) for kind in ("Complete", "Completed", "Failed")):
                reason = "Failed" if is_true(owner, "Failed") else "Succeeded"
                self._say(workload, [("Finished", "True", reason, f"{owner['kind']} finished")])
            elif is_true(workload, "Admitted"):
                used.setdefault(_queue(owner), Counter()).update(_request(owner))
            else:
                waiting.append((resource, owner, workload))
        for resource, owner, workload in waiting:
            self._consider(resource, owner, workload, used)

    def _workload(self, resource: Resource, owner: Object) -> Object:
        for (kind, _, _), held in self._store.owned(owner["metadata"]["uid"]):
            if kind is WORKLOADS:
                return held
        meta = owner["metadata"]
        digest = hashlib.sha1(meta["uid"].encode()).hexdigest()[:5]
        name = f"{resource.kind.lower()}-{meta['name']}-{digest}"
        created = self._store.create(
            WORKLOADS,
            {
                "metadata": {
                    "name": name,
                    "namespace": meta["namespace"],
                    "labels": {"kueue.x-k8s.io/job-uid": meta["uid"]},
                    "ownerReferences": [owner_reference(owner)],
                },
                "spec": {"active": True, "priority": 0, "queueName": _queue(owner)},
            },
        )
        text = f"Created Workload: {meta['namespace']}/{name}"
        self._recorder.say(RECONCILES, owner, "CreatedWorkload", text)
        return created

    def _consider(
        self,
        resource: Resource,
        owner: Object,
        workload: Object,
        used: dict[str, Counter[str]],
    ) -> None:
        queue, request = _queue(owner), _request(owner)
        namespace = owner["metadata"]["namespace"]
        if self._store.get(LOCAL_QUEUES, namespace, queue) is None:
            self._refuse(workload, "Misconfigured", f"LocalQueue {queue} doesn't exist")
            return
        quota = self._quota(queue)
        in_use = used.setdefault(queue, Counter())
        for name, amount in request.items():
            if name not in quota:
                continue
            before = "couldn't assign flavors to pod set host: insufficient"
            if amount > quota[name]:
                self._refuse(
                    workload,
                    "ExceedsMaxQuota",
                    f"{before} quota for {name} in flavor {FLAVOR}, previously considered podsets"
                    f" requests (0) + current podset request ({plain_number(amount)}) > maximum"
                    f" capacity ({plain_number(quota[name])})",
                )
                return
            more = in_use[name] + amount - quota[name]
            if more > 0 or self.paused:
                text = (
                    f"{before} unused quota for {name} in flavor {FLAVOR},"
                    f" {plain_number(max(more, amount) if self.paused else more)} more needed"
                )
                self._refuse(workload, "WaitingForQuota", text)
                return
        in_use.update(request)
        reserved = f"Quota reserved in ClusterQueue {queue}"
        admitted = [("QuotaReserved", "True", "QuotaReserved", reserved)]
        admitted += [("Admitted", "True", "Admitted", "The workload is admitted")]
        workload = self._say(workload, admitted)
        notice = f"{reserved}, wait time since queued was 0s"
        self._recorder.say(ADMITS, workload, "QuotaReserved", notice)
        notice = f"Admitted by ClusterQueue {queue}, wait time since reservation was 0s"
        self._recorder.say(ADMITS, workload, "Admitted", notice)

        def resume(obj: Object) -> None:
            obj["spec"]["suspend"] = False

        new = self._store.update(resource, namespace, owner["metadata"]["name"], resume)
        self._recorder.say(RECONCILES, new, "Started", f"Admitted by clusterQueue {queue}")

    def _quota(self, queue: str) -> dict[str, float]:
        held = self._store.get(CLUSTER_QUEUES, "", queue)
        rows = dig(held, "spec", "resourceGroups", 0, "flavors", 0, "resources", default=[])
        return {row["name"]: quantity(row["nominalQuota"]) for row in rows}

    def _refuse(self, workload: Object, reason: str, message: str) -> None:
        new = self._say(
            workload,
            [
                ("QuotaReserved", "False", reason, message),
                ("Admitted", "False", "NoReservation", "The workload has no reservation"),
            ],
        )
        if new is not workload:
            self._recorder.say(ADMITS, new, reason, message, warning=True)

    def _say(self, workload: Object, rows: list[tuple[str, str, str, str]]) -> Object:
        meta = workload["metadata"]

        def change(obj: Object) -> None:
            status = clone(obj.get("status") or {})
            for kind, value, reason, message in rows:
                new = {"lastTransitionTime": stamp(), "message": message, "observedGeneration": 1}
                set_condition(status, new | {"reason": reason, "status": value, "type": kind})
            obj["status"] = status

        return self._store.update(WORKLOADS, meta["namespace"], meta["name"], change)


def _age(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])


def _queue(owner: Object) -> str:
    return str(owner["metadata"]["labels"][LABEL])


def _request(owner: Object) -> Counter[str]:
    """Return the resources that all pods of a workload request together."""
    total: Counter[str] = Counter()
    groups = [(1, owner)]
    if owner["kind"] == "JobSet":
        groups = [(r["replicas"], r["template"]) for r in owner["spec"]["replicatedJobs"]]
    for copies, holder in groups:
        pods = copies * holder["spec"].get("parallelism", 1)
        for container in holder["spec"]["template"]["spec"]["containers"]:
            resources = container.get("resources") or {}
            for name, amount in (resources.get("limits") or {}).items():
                total[name] += pods * quantity(amount)  # type: ignore[assignment]
    return total
