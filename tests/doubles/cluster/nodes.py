"""Nodes, and the consequences of losing one."""

from __future__ import annotations

from dataclasses import dataclass, field

from doubles.cluster.collector import TERMINAL, Collector
from doubles.cluster.engine import Engine
from doubles.cluster.kinds import NODES, PODS
from doubles.cluster.objects import Object, clone, condition, set_condition, stamp
from doubles.cluster.recorder import Recorder
from doubles.cluster.scheduler import tolerates
from doubles.cluster.store import Change, Store
from doubles.cluster.timings import Timings

TPU = "google.com/tpu"
UNREACHABLE = "node.kubernetes.io/unreachable"
KINDS = {
    "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID"),
    "Ready": ("True", "KubeletReady"),
}


@dataclass(frozen=True)
class NodePool:
    """A pool of equal nodes. With `accelerator`, they are TPU hosts with the labels of GKE."""

    name: str
    nodes: int = 1
    accelerator: str = ""
    topology: str = ""
    chips: int = 0
    spot: bool = False
    machine: str = ""
    cpu: str = "180"
    memory: str = "720Gi"
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()
    capacity: dict[str, str] = field(default_factory=dict)

    def objects(self) -> list[Object]:
        return [self._node(index) for index in range(self.nodes)]

    def _node(self, index: int) -> Object:
        name = f"gke-{self.name}-{index}"
        labels = {
            "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux",
            "kubernetes.io/hostname": name,
            "cloud.google.com/gke-nodepool": self.name,
            "topology.kubernetes.io/zone": "us-east5-b",
        }
        taints = list(self.taints)
        resources = {"cpu": self.cpu, "ephemeral-storage": "100Gi", "memory": self.memory}
        resources |= {"pods": "110"} | self.capacity
        if self.accelerator:
            labels["cloud.google.com/gke-tpu-accelerator"] = self.accelerator
            labels["cloud.google.com/gke-tpu-topology"] = self.topology
            labels["cloud.google.com/gke-accelerator-count"] = str(self.chips)
            taints.append({"key": TPU, "value": "present", "effect": "NoSchedule"})
        if self.chips:
            resources[TPU] = str(self.chips)
        if self.machine:
            labels["node.kubernetes.io/instance-type"] = self.machine
        if self.spot:
            labels["cloud.google.com/gke-spot"] = "true"
            taints.append(
                {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}
            )
        now = stamp()
        return {
            "metadata": {"name": name, "labels": labels | self.labels},
            "spec": {"taints": taints} if taints else {},
            "status": {
                "capacity": resources,
                "allocatable": dict(resources),
                "conditions": [
                    {
                        "type": kind,
                        "status": value,
                        "lastHeartbeatTime": now,
                        "lastTransitionTime": now,
                        "reason": reason,
                        "message": "",
                    }
                    for kind, (value, reason) in KINDS.items()
                ],
                "addresses": [
                    {"type": "InternalIP", "address": f"10.128.0.{index + 10}"},
                    {"type": "Hostname", "address": name},
                ],
                "nodeInfo": {"kubeletVersion": "v1.36.2", "operatingSystem": "linux"},
            },
        }


CPU_POOL = NodePool("cpu", 1)
V6E_4X4 = NodePool("tpu-v6e-4x4", 4, "tpu-v6e-slice", "4x4", 4, machine="ct6e-standard-4t")


class Nodes:
    """The node controller: marks lost nodes, evicts their pods, removes those of deleted nodes."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        recorder: Recorder,
        collector: Collector,
        timings: Timings,
        lost: set[str],
    ) -> None:
        self._store, self._engine, self._recorder = store, engine, recorder
        self._collector, self._timings, self._lost = collector, timings, lost
        engine.handle("node lost", self._mark)
        engine.handle("node taint", self._evict)
        engine.handle("node gone", self._sweep)
        store.listeners.append(self._heard)

    def lose(self, node: str) -> None:
        """Stop the reports of the node's kubelet."""
        self._lost.add(node)
        self._engine.add("node lost", node, self._timings.node_grace_s)

    def _heard(self, change: Change) -> None:
        if change.resource is NODES and change.type == "DELETED":
            name = change.object["metadata"]["name"]
            self._engine.add("node gone", name, self._timings.pod_collection_s)

    def _pods(self, node: str) -> list[Object]:
        return [p for p in self._store.all(PODS) if p["spec"].get("nodeName") == node]

    def _mark(self, node: str) -> None:
        if node not in self._lost or self._store.get(NODES, "", node) is None:
            return

        def unknown(obj: Object) -> None:
            for held in obj["status"]["conditions"]:
                held |= {
                    "status": "Unknown",
                    "reason": "NodeStatusUnknown",
                    "message": "Kubelet stopped posting node status.",
                    "lastTransitionTime": stamp(),
                }

        self._store.update(NODES, "", node, unknown)
        pods = [p for p in self._pods(node) if p["status"].get("phase") not in TERMINAL]
        for pod in pods:
            meta = pod["metadata"]
            self._store.update(PODS, meta["namespace"], meta["name"], _unready)
        for effect in ("NoSchedule", "NoExecute"):
            if effect == "NoExecute":
                for pod in pods:
                    text = "Node is not ready"
                    self._recorder.say("node-controller", pod, "NodeNotReady", text, warning=True)
            taint = {"key": UNREACHABLE, "effect": effect, "timeAdded": stamp()}
            self._store.update(NODES, "", node, lambda obj, t=taint: _tainted(obj, t))
        for pod in pods:
            wait_s = self._patience(pod)
            if wait_s is not None:
                place = (pod["metadata"]["namespace"], pod["metadata"]["name"])
                self._engine.add("node taint", (*place, pod["metadata"]["uid"]), wait_s)

    def _patience(self, pod: Object) -> float | None:
        taint = {"key": UNREACHABLE, "effect": "NoExecute"}
        tolerations = [t for t in pod["spec"].get("tolerations") or () if tolerates(t, taint)]
        if not tolerations:
            return 0.0
        limits = [t["tolerationSeconds"] for t in tolerations if "tolerationSeconds" in t]
        if not limits:
            return None
        if self._timings.eviction_s is not None:
            return self._timings.eviction_s
        return float(min(limits))

    def _evict(self, place: tuple[str, str, str]) -> None:
        namespace, name, uid = place
        pod = self._store.get(PODS, namespace, name)
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return
        if pod["spec"]["nodeName"] not in self._lost:
            return
        message = f"Marking for deletion Pod {namespace}/{name}"
        self._recorder.say("taint-eviction-controller", pod, "TaintManagerEviction", message)
        why = "Taint manager: deleting due to NoExecute taint"
        self._store.update(
            PODS, namespace, name, lambda obj: _disrupted(obj, "DeletionByTaintManager", why)
        )
        self._collector.delete(PODS, namespace, name)

    def _sweep(self, node: str) -> None:
        if self._store.get(NODES, "", node) is not None:
            return
        for pod in self._pods(node):
            meta = pod["metadata"]

            def fail(obj: Object) -> None:
                if obj["status"].get("phase") in TERMINAL:
                    return
                obj["status"]["phase"] = "Failed"
                _disrupted(obj, "DeletionByPodGC", "PodGC: node no longer exists")

            self._store.update(PODS, meta["namespace"], meta["name"], fail)
            self._collector.delete(PODS, meta["namespace"], meta["name"], grace_s=0)


def _unready(pod: Object) -> None:
    held = condition(pod, "Ready")
    if held is not None:
        new = clone(held) | {"status": "False", "lastTransitionTime": stamp()}
        set_condition(pod["status"], new)


def _tainted(node: Object, taint: Object) -> None:
    node["spec"].setdefault("taints", []).append(taint)


def _disrupted(pod: Object, reason: str, message: str) -> None:
    set_condition(
        pod["status"],
        {
            "type": "DisruptionTarget",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": stamp(),
            "reason": reason,
            "message": message,
        },
    )
