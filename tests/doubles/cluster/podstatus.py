"""Status of a pod as its kubelet reports it, from the pod and its containers' states. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from doubles.cluster.objects import Object, clone, stamp

SUCCEEDED, FAILED, RUNNING, PENDING = "Succeeded", "Failed", "Running", "Pending"
KUBELETS_OWN = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)


@dataclass
class ContainerState:
    """The kubelet's state of one container."""

    name: str
    image: str
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last: Object = field(default_factory=dict)
    restarts: int = 0
    id: str = ""

    @property
    def running(self) -> bool:
        return "running" in self.state

    @property
    def terminated(self) -> Object | None:
        return self.state.get("terminated")

    def report(self) -> Object:
        ids = {"containerID": self.id} if self.id else {}
        return {
            "name": self.name,
            "state": clone(self.state),
            "lastState": clone(self.last),
            "ready": self.running,
            "restartCount": self.restarts,
            "image": self.image,
            "imageID": f"{self.image.partition(':')[0]}@sha256:{'7d' * 32}" if self.id else "",
            **ids,
            "started": self.running,
        }


def status_of(
    pod: Object,
    containers: list[ContainerState],
    phase: str,
    *,
    sandbox: bool,
    address: str,
    host_ip: str,
) -> Object:
    """Return the status to report. Conditions that do not change keep their times."""
    held = pod["status"]
    generation = pod["metadata"].get("generation", 1)
    over = phase in (SUCCEEDED, FAILED) or all(c.terminated for c in containers)
    unready = [c.name for c in containers if not c.running]
    finished = "PodCompleted" if all(_code(c) == 0 for c in containers) else "PodFailed"
    because: Object = {}
    if over:
        because = {"reason": finished}
    elif unready:
        message = f"containers with unready status: [{' '.join(unready)}]"
        because = {"reason": "ContainersNotReady", "message": message}
    # If a container will be restarted, the pod has not ended.
    restarts = phase == RUNNING and pod["spec"]["restartPolicy"] == "OnFailure"
    if over and restarts and finished == "PodFailed":
        message = f"containers with unready status: [{' '.join(unready)}]"
        because = {"reason": "ContainersNotReady", "message": message}
        over = False
    ready = "False" if because else "True"
    initialized = {"reason": "PodCompleted"} if over and finished == "PodCompleted" else {}
    wanted: dict[str, tuple[str, Object]] = {
        "PodReadyToStartContainers": (
            "True" if sandbox and phase not in (SUCCEEDED, FAILED) else "False",
            {},
        ),
        "Initialized": ("True", initialized),
        "Ready": (ready, because),
        "ContainersReady": (ready, because),
        "PodScheduled": ("True", {}),
    }
    old = {c["type"]: c for c in held.get("conditions") or ()}
    conditions = [clone(c) for kind, c in old.items() if kind not in KUBELETS_OWN]
    for kind, (value, more) in wanted.items():
        before = old.get(kind)
        same = before is not None and before["status"] == value
        conditions.append(
            {
                "type": kind,
                "observedGeneration": generation,
                "status": value,
                "lastProbeTime": None,
                "lastTransitionTime": before["lastTransitionTime"] if same and before else stamp(),
                **more,
            }
        )
    status: Object = {"observedGeneration": generation, "phase": phase, "conditions": conditions}
    status |= {"hostIP": host_ip, "hostIPs": [{"ip": host_ip}]}
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    status["startTime"] = held.get("startTime") or stamp()
    status["containerStatuses"] = [c.report() for c in containers]
    status["qosClass"] = held.get("qosClass", "BestEffort")
    status["resources"] = {}
    return status


def _code(container: ContainerState) -> int | None:
    terminated = container.terminated
    return None if terminated is None else int(terminated["exitCode"])
