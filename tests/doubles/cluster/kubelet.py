"""The kubelets of all nodes: they run pods as processes and report the pods' states.

A node that a test has lost reports nothing.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from doubles.cluster.collector import TERMINAL, Collector
from doubles.cluster.containers import Container, Log, Runtime
from doubles.cluster.engine import Engine
from doubles.cluster.environ import Addresses, NotReady, command_of, container_environ
from doubles.cluster.kinds import CONFIG_MAPS, NODES, PODS, SECRETS
from doubles.cluster.names import Relay
from doubles.cluster.objects import Object, dig, stamp
from doubles.cluster.podstatus import FAILED, PENDING, RUNNING, SUCCEEDED, ContainerState, status_of
from doubles.cluster.recorder import Recorder
from doubles.cluster.store import Change, Store
from doubles.cluster.timings import Timings
from doubles.cluster.volumes import make_volumes

ACTOR = "kubelet"
START_ERROR = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc"
    " create failed: unable to start container process: error during container init: exec:"
)
FORCED_GRACE_S = 1.0
Place = tuple[str, str, str]
"""The namespace, name and uid of a pod."""


@dataclass
class Pod:
    """The state of one pod on its node."""

    place: Place
    node: str
    folder: Path
    address: str
    states: list[ContainerState]
    running: list[Container | None]
    logs: list[list[Log]]
    sandbox: bool = False
    is_reported: bool = False
    killing: bool = False
    phase: str = PENDING
    due: dict[str, float] = field(default_factory=dict)
    """The time of the next attempt of each step."""
    oom: bool = False


IMAGE_NAME = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9._/-]+(:[\w.-]+)?(@[\w:]+)?")


class Kubelet:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        recorder: Recorder,
        collector: Collector,
        timings: Timings,
        folder: Path,
        image_environ: dict[str, str],
        *,
        deaf: bool = False,
    ) -> None:
        self._store, self._engine, self._recorder = store, engine, recorder
        self._collector, self._timings, self._folder = collector, timings, folder
        self.image_environ, self._deaf = dict(image_environ), deaf
        self.runtime = Runtime(folder)
        self.addresses = Addresses()
        self._relays: list[Relay] = []
        self.pods: dict[str, Pod] = {}
        self.lost_nodes: set[str] = set()
        self.missing_images: set[str] = {"does-not-exist"}
        """Parts of names: images with one of these are in no registry."""
        self.entrypoints: dict[str, list[str]] = {}
        """The entrypoints of images, by a part of the name; other images run a shell."""
        self._images: dict[str, set[str]] = {}
        engine.handle("pod", self._sync)
        engine.handle("kill", self._kill)
        store.listeners.append(self._heard)

    def close(self) -> None:
        for relay in self._relays:
            relay.close()
        self.runtime.close()

    def log_of(self, uid: str, container: int) -> list[Log]:
        """Return the logs of a container, one for each start, the latest last."""
        pod = self.pods.get(uid)
        return pod.logs[container] if pod else []

    def _heard(self, change: Change) -> None:
        if change.resource is PODS and change.object["spec"].get("nodeName"):
            meta = change.object["metadata"]
            self._engine.add("pod", (meta["namespace"], meta["name"], meta["uid"]))
        elif change.resource in (SECRETS, CONFIG_MAPS) and change.type == "ADDED":
            for pod in list(self.pods.values()):
                if pod.phase == PENDING:
                    pod.due.clear()
                    self._engine.add("pod", pod.place)

    # --- one pass over one pod

    def _sync(self, place: Place) -> None:
        namespace, name, uid = place
        obj = self._store.get(PODS, namespace, name)
        pod = self.pods.get(uid)
        if obj is None or obj["metadata"]["uid"] != uid:
            self._forget(place, pod)
            return
        node = obj["spec"]["nodeName"]
        if node in self.lost_nodes:
            return
        if pod is None:
            if obj["status"].get("phase") in TERMINAL:
                if "deletionTimestamp" in obj["metadata"]:
                    self._collector.delete(PODS, namespace, name, grace_s=0, uid=uid)
                return
            pod = self._admit(obj, place)
            self._report(pod)
        if "deletionTimestamp" in obj["metadata"]:
            self._stop(obj, pod)
        elif pod.phase not in TERMINAL:
            self._notice_ends(obj, pod)
            if pod.phase not in TERMINAL:
                self._start(obj, pod)

    def _admit(self, obj: Object, place: Place) -> Pod:
        folder = self._folder / place[2]
        (folder / "tmp").mkdir(parents=True)
        containers = obj["spec"]["containers"]
        states = [ContainerState(c["name"], c.get("image", "")) for c in containers]
        pod = Pod(
            place,
            obj["spec"]["nodeName"],
            folder,
            self.addresses.of_pod(obj),
            states,
            [None] * len(states),
            [[] for _ in states],
        )
        self.pods[place[2]] = pod
        return pod

    def _forget(self, place: Place, pod: Pod | None) -> None:
        """End the processes of a pod that was removed from the API."""
        if pod is None:
            return
        alive = [c for c in pod.running if c is not None and c.alive]
        for container in alive:
            container.kill(signal.SIGKILL)
        if not alive:
            del self.pods[place[2]]
            shutil.rmtree(pod.folder, ignore_errors=True)

    # --- reports

    def _report(self, pod: Pod) -> None:
        namespace, name, uid = pod.place
        address = pod.address if pod.is_reported else ""

        def change(obj: Object) -> None:
            old = obj["status"]
            obj["status"] = status_of(
                obj,
                pod.states,
                pod.phase,
                sandbox=pod.sandbox,
                address=address,
                host_ip=self._host_ip(pod.node),
            )
            for key in ("reason", "message"):
                if key in old:
                    obj["status"][key] = old[key]

        self._store.update(PODS, namespace, name, change, uid=uid)

    def _host_ip(self, node: str) -> str:
        held = self._store.get(NODES, "", node)
        return str(dig(held, "status", "addresses", 0, "address", default="127.0.0.1"))

    def _say(
        self, pod: Pod, index: int, reason: str, message: str, *, warning: bool = False
    ) -> None:
        obj = self._store.get(PODS, *pod.place[:2])
        if obj is None:
            return
        path = f"spec.containers{{{pod.states[index].name}}}" if index >= 0 else ""
        self._recorder.say(ACTOR, obj, reason, message, warning=warning, field=path, host=pod.node)

    # --- starting

    def _is_due(self, pod: Pod, step: str) -> bool:
        return time.monotonic() >= pod.due.get(step, 0.0)

    def _retry(self, pod: Pod, step: str, delay_s: float) -> None:
        pod.due[step] = time.monotonic() + delay_s
        self._engine.add("pod", pod.place, delay_s)

    def _start(self, obj: Object, pod: Pod) -> None:
        if any("waiting" in s.state for s in pod.states) and not self._mounted(obj, pod):
            return
        changed = False
        for index, state in enumerate(pod.states):
            if "waiting" in state.state and pod.running[index] is None:
                changed = self._start_one(obj, pod, index) or changed
        if changed:
            self._report(pod)

    def _mounted(self, obj: Object, pod: Pod) -> bool:
        for volume in obj["spec"].get("volumes") or ():
            for kind, resource, key in (
                ("configMap", CONFIG_MAPS, "name"),
                ("secret", SECRETS, "secretName"),
            ):
                source = volume.get(kind)
                if source is None or source.get("optional"):
                    continue
                if self._store.get(resource, pod.place[0], source[key]) is None:
                    if self._is_due(pod, "mount"):
                        why = f'{resource.kind.lower()} "{source[key]}" not found'
                        text = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {why}'
                        self._say(pod, -1, "FailedMount", text, warning=True)
                        self._retry(pod, "mount", self._timings.mount_retry_s)
                    return False
        return True

    def _start_one(self, obj: Object, pod: Pod, index: int) -> bool:
        """Start a container; return True if its new state must be reported now."""
        state, spec = pod.states[index], obj["spec"]["containers"][index]
        if not self._is_due(pod, f"start {index}"):
            return False
        if not self._may_pull(obj, pod, index) or not self._has_image(pod, index):
            return "waiting" in state.state
        host_ip = self._host_ip(pod.node)
        try:
            variables = container_environ(obj, spec, self._store, pod.address, host_ip)
        except NotReady as problem:
            self._say(pod, index, "Failed", f"Error: {problem}", warning=True)
            pod.is_reported = pod.sandbox = True
            state.state = {
                "waiting": {"reason": "CreateContainerConfigError", "message": str(problem)}
            }
            self._retry(pod, f"start {index}", 10.0)
            return True
        env = self.image_environ | {
            "HOME": str(pod.folder),
            "TMPDIR": str(pod.folder / "tmp"),
            "HOSTNAME": obj["spec"].get("hostname") or pod.place[1],
        }
        ports = [p["containerPort"] for p in spec.get("ports") or ()]

        def lead(addresses: list[str]) -> str:
            return self._resolve(addresses, ports)

        env |= {k: self.addresses.with_addresses(obj, v, lead) for k, v in variables.items()}
        env |= make_volumes(obj, spec, env, pod.folder, self._store)
        argv = command_of(spec, env, self._entrypoint(state.image))
        folder = Path(spec.get("workingDir") or pod.folder)
        self._say(pod, index, "Created", "Container created")
        pod.sandbox = True
        if state.last:
            state.restarts += 1
        else:
            self._report(pod)
        container = self.runtime.start(
            argv,
            env,
            folder if folder.is_dir() else pod.folder,
            lambda: self._engine.add("pod", pod.place),
            deaf=self._deaf,
        )
        pod.running[index] = container
        pod.logs[index].append(container.log)
        state.id = f"containerd://{uuid.uuid4().hex}{uuid.uuid4().hex}"
        return False

    def _resolve(self, addresses: list[str], ports: list[int]) -> str:
        """Return the address to use for a host name. `addresses` are those of the pods with this
        name, oldest first. If an earlier one still runs, return a relay to it, else the last."""

        def target() -> str:
            alive = {
                pod.address
                for pod in list(self.pods.values())
                if any(c is not None and c.alive for c in pod.running)
            }
            return next((a for a in addresses if a in alive), addresses[-1])

        if target() == addresses[-1]:
            return addresses[-1]
        self._relays.append(Relay(self.addresses.fresh(), ports, target))
        return self._relays[-1].address

    def _entrypoint(self, image: str) -> list[str]:
        return next((argv for part, argv in self.entrypoints.items() if part in image), ["sh"])

    def _may_pull(self, obj: Object, pod: Pod, index: int) -> bool:
        """True if the name of the image is valid, and the image is present or may be pulled."""
        state, spec = pod.states[index], obj["spec"]["containers"][index]
        image = state.image
        present = image in self._images.setdefault(pod.node, set())
        if not IMAGE_NAME.fullmatch(image):
            reason = "InvalidImageName"
            why = f'couldn\'t parse image name "{image}": invalid reference format'
            message = f'Failed to apply default image tag "{image}": {why}'
        elif spec.get("imagePullPolicy") == "Never" and not present:
            reason = "ErrImageNeverPull"
            message = f'Container image "{image}" is not present with pull policy of Never'
        else:
            return True
        self._say(pod, index, "Failed", f"Error: {reason}", warning=True)
        pod.is_reported = pod.sandbox = True
        state.state = {"waiting": {"reason": reason, "message": message}}
        self._retry(pod, f"start {index}", self._timings.image_retry_s)
        return False

    def _has_image(self, pod: Pod, index: int) -> bool:
        state = pod.states[index]
        image, present = state.image, self._images.setdefault(pod.node, set())
        if image in present:
            message = (
                f'Container image "{image}" already present on machine and can be accessed by the'
                " pod"
            )
            self._say(pod, index, "Pulled", message)
            return True
        what = f"pull {index}"
        if what not in pod.due or self._is_due(pod, what):
            self._say(pod, index, "Pulling", f'Pulling image "{image}"')
        if any(part in image for part in self.missing_images):
            self._fail_pull(pod, index)
            return False
        if self._timings.pull_s and what not in pod.due:
            self._retry(pod, what, self._timings.pull_s)
            return False
        if not self._is_due(pod, what):
            return False
        present.add(image)
        took = int(self._timings.pull_s * 1000)
        message = (
            f'Successfully pulled image "{image}" in {took}ms ({took}ms including waiting). Image'
            " size: 412733440 bytes."
        )
        self._say(pod, index, "Pulled", message)
        return True

    def _fail_pull(self, pod: Pod, index: int) -> None:
        """Report ErrImagePull and ImagePullBackOff alternately, without end."""
        state, image = pod.states[index], pod.states[index].image
        what = f"start {index}"
        error = (
            f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}":'
            f" failed to resolve image: {image}: not found"
        )
        pod.is_reported = pod.sandbox = True
        if dig(state.state, "waiting", "reason") != "ErrImagePull":
            self._say(
                pod, index, "Failed", f'Failed to pull image "{image}": {error}', warning=True
            )
            self._say(pod, index, "Failed", "Error: ErrImagePull", warning=True)
            self._say(pod, index, "BackOff", f'Back-off pulling image "{image}"')
            self._say(pod, index, "Failed", "Error: ImagePullBackOff", warning=True)
            state.state = {"waiting": {"reason": "ErrImagePull", "message": error}}
        else:
            message = f'Back-off pulling image "{image}": ErrImagePull: {error}'
            state.state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        self._retry(pod, what, self._timings.image_retry_s)

    # --- ends

    def _notice_ends(self, obj: Object, pod: Pod) -> None:
        """Report containers that have started or ended, or that failed to start."""
        changed = False
        for index, container in enumerate(pod.running):
            state = pod.states[index]
            if container is None or state.terminated:
                continue
            if container.pid is not None and "waiting" in state.state:
                state.state = {"running": {"startedAt": stamp(container.started_at)}}
                pod.phase, pod.is_reported = RUNNING, True
                self._report(pod)
                self._say(pod, index, "Started", "Container started")
            if container.log.closed:
                self._end(obj, pod, index, container)
                changed = True
        if any(not s.terminated for s in pod.states):
            if changed:
                self._report(pod)
            return
        codes = [s.terminated["exitCode"] for s in pod.states if s.terminated]
        if "deletionTimestamp" not in obj["metadata"]:
            if changed:
                self._report(pod)  # The containers have ended, but the phase has not changed yet.
                if any(codes) and obj["spec"]["restartPolicy"] == "OnFailure":
                    self._restart(pod)
                    return
                self._retry(pod, "settled", self._timings.settle_s)
                return  # Let other controllers see this state first.
            if not self._is_due(pod, "settled"):
                return
        pod.phase = FAILED if any(codes) else SUCCEEDED
        self._report(pod)

    def _end(self, obj: Object, pod: Pod, index: int, container: Container) -> None:
        state, spec = pod.states[index], obj["spec"]["containers"][index]
        if container.error is not None:
            program = container.error.rpartition(": ")[2].strip("'") or "?"
            argv = command_of(spec, {}, self._entrypoint(state.image))
            why = f'{START_ERROR} "{argv[0]}": executable file not found in $PATH'
            if "No such file" not in container.error:
                why = f'{START_ERROR} "{argv[0]}": {program}'
            self._say(pod, index, "Failed", f"Error: {why}", warning=True)
            pod.is_reported = True
            ended: Object = {"exitCode": 128, "reason": "StartError", "message": why}
            ended |= {"startedAt": "1970-01-01T00:00:00Z", "finishedAt": stamp()}
        else:
            code = container.exit or 0
            reason = "Completed" if code == 0 else "OOMKilled" if pod.oom else "Error"
            ended = {"exitCode": code, "reason": reason}
            policy = spec.get("terminationMessagePolicy")
            if code and policy == "FallbackToLogsOnError" and (text := container.log.end()):
                ended["message"] = text
            ended |= {"startedAt": stamp(container.started_at)}
            ended |= {"finishedAt": stamp(container.ended_at)}
        state.state = {"terminated": ended | {"containerID": state.id}}

    def _restart(self, pod: Pod) -> None:
        """Restart failed containers; the first restart is without a delay."""
        for index, state in enumerate(pod.states):
            if not state.terminated or state.terminated["exitCode"] == 0:
                continue
            delay_s = 0.0
            if state.restarts:
                delay_s = self._timings.crash_backoff_s * 2 ** (state.restarts - 1)
                namespace, name, uid = pod.place
                where = f"{name}_{namespace}({uid})"
                self._say(
                    pod,
                    index,
                    "BackOff",
                    f"Back-off restarting failed container {state.name} in pod {where}",
                    warning=True,
                )
                message = (
                    f"back-off {delay_s:g}s restarting failed container={state.name} pod={where}"
                )
                waiting: Object = {"reason": "CrashLoopBackOff", "message": message}
            else:
                waiting = {"reason": "ContainerCreating"}
            state.last, state.state = state.state, {"waiting": waiting}
            pod.running[index] = None
            self._retry(pod, f"start {index}", delay_s)
            if delay_s:
                self._report(pod)

    # --- stopping

    def _stop(self, obj: Object, pod: Pod) -> None:
        alive = [c for c in pod.running if c is not None and not c.log.closed]
        grace_s = float(obj["metadata"]["deletionGracePeriodSeconds"])
        if alive and not pod.killing:
            pod.killing = True
            for index, container in enumerate(pod.running):
                if container in alive:
                    name = pod.states[index].name
                    self._say(pod, index, "Killing", f"Stopping container {name}")
        if alive:
            for container in alive:
                if container.alive and "term" not in pod.due:
                    container.kill(signal.SIGTERM)
            if all(c.alive for c in alive):
                pod.due.setdefault("term", time.monotonic())
            if "term" in pod.due:
                left_s = pod.due["term"] + max(grace_s, FORCED_GRACE_S) - time.monotonic()
                self._engine.add("kill", pod.place, max(left_s, 0.001))
            return
        if pod.phase not in TERMINAL:
            self._notice_ends(obj, pod)
        namespace, name, uid = pod.place
        self._collector.delete(PODS, namespace, name, grace_s=0, uid=uid)

    def _kill(self, place: Place) -> None:
        pod = self.pods.get(place[2])
        obj = self._store.get(PODS, *place[:2])
        if pod is None or "term" not in pod.due or pod.node in self.lost_nodes:
            return
        grace_s = float(dig(obj, "metadata", "deletionGracePeriodSeconds", default=0))
        left_s = pod.due["term"] + max(grace_s, FORCED_GRACE_S) - time.monotonic()
        if left_s > 0.002:
            return  # The deletion has changed since this was scheduled.
        for container in pod.running:
            if container is not None:
                container.kill(signal.SIGKILL)
