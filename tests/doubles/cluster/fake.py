"""The cluster as a test holds it: start it, look into it, break it.

In: node pools and timings. Out: a kubeconfig that the official client takes; objects, requests and
logs for the test to look at; ways to make things go wrong. Everything ends with `close`.

    with FakeCluster([CPU_POOL]) as cluster:
        config.load_kube_config(str(cluster.kubeconfig))
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from doubles.cluster.admission import Admission
from doubles.cluster.collector import Collector
from doubles.cluster.engine import Engine
from doubles.cluster.faults import Faults
from doubles.cluster.jobs import Jobs
from doubles.cluster.jobsets import JobSets
from doubles.cluster.kinds import (
    ALWAYS,
    DEFINITIONS,
    EVENTS,
    JOB_SETS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    QUEUES,
    QUOTAS,
    SERVICE_ACCOUNTS,
    WORKLOADS,
    Resource,
)
from doubles.cluster.kubelet import Kubelet
from doubles.cluster.kueue import Kueue
from doubles.cluster.nodes import CPU_POOL, NodePool, Nodes
from doubles.cluster.objects import Object, clone
from doubles.cluster.recorder import Recorder
from doubles.cluster.routes import Api, Permission
from doubles.cluster.scheduler import Scheduler
from doubles.cluster.server import Request, Server
from doubles.cluster.store import Store
from doubles.cluster.timings import Timings

ADMIN, ADMIN_TOKEN = "admin@example.com", "token-1"
"""Whom the kubeconfig names; may do everything, unless `restrict` says otherwise."""
NAMESPACE = "default"


class FakeCluster:
    """An API server with everything behind it."""

    def __init__(
        self,
        pools: Iterable[NodePool] = (CPU_POOL,),
        *,
        namespaces: Iterable[str] = (NAMESPACE,),
        service_accounts: Iterable[str] = ("default", "kinetic"),
        timings: Timings | None = None,
        job_sets: bool = True,
        environ: dict[str, str] | None = None,
        deaf: bool = False,
    ) -> None:
        """With `deaf`, processes ignore SIGTERM unless they handle it, as PID 1 does. `environ` is
        what the image sets; pods see nothing else of this process's environment."""
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=os.environ.get("TMPDIR")))
        self.kubeconfig = self.folder / "kubeconfig"
        self.timings = timings or Timings()
        self.faults = Faults()
        self.store = Store()
        self.engine = Engine()
        self.recorder = Recorder(self.store)
        # Who hears of a change first acts first: a pod has its node before its Job looks again, and
        # a JobSet sees each state of its Jobs.
        self.scheduler = Scheduler(self.store, self.engine, self.recorder)
        self.collector = Collector(self.store, self.engine)
        self.admission = Admission(self.store)
        image = {"PATH": os.environ.get("PATH", os.defpath), "SHARED": str(self.folder)}
        self.kubelet = Kubelet(
            self.store,
            self.engine,
            self.recorder,
            self.collector,
            self.timings,
            self.folder,
            image if environ is None else environ,
            deaf=deaf,
        )
        self.nodes = Nodes(
            self.store,
            self.engine,
            self.recorder,
            self.collector,
            self.timings,
            self.kubelet.lost_nodes,
        )
        JobSets(self.store, self.engine, self.recorder, self.collector, self.admission)
        Jobs(self.store, self.engine, self.recorder, self.collector, self.admission, self.timings)
        self.api = Api(
            self.store, self.collector, self.admission, self.kubelet, self.faults, self.timings
        )
        self.server = Server(self.api.answer, self.faults)
        self._token = ADMIN_TOKEN
        self.api.tokens[ADMIN_TOKEN] = ADMIN
        self.api.users[ADMIN] = lambda verb, resource, namespace: True
        for namespace in {"default", "kube-system", *namespaces}:
            self.add_namespace(namespace, service_accounts)
        self.namespace = next(iter(namespaces), NAMESPACE)
        if job_sets:
            self.install_job_sets()
        else:
            self.api.discovery.custom.discard(JOB_SETS)
        for pool in pools:
            self.add_pool(pool)
        self._before = self._names()
        self.engine.start()
        self.server.start()
        self.write_kubeconfig(self.kubeconfig)

    def close(self) -> None:
        """End all pods and stop."""
        self.store.close()
        self.server.stop()
        self.engine.stop()
        self.kubelet.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # How clients get in

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def write_kubeconfig(
        self, path: Path, *, token: str | None = None, exec_plugin: bool = False
    ) -> Path:
        """A kubeconfig for the administrator, or for whom `token` stands for ("" for nobody). With
        `exec_plugin` the token comes from a program that is asked again when it has expired."""
        token = self._token if token is None else token
        user: Object = {"token": token} if token else {}
        if exec_plugin:
            (self.folder / "token").write_text(token)
            code = (
                "import json,pathlib;print(json.dumps({'apiVersion':'client.authentication.k8s.io"
                "/v1','kind':'ExecCredential','status':{'token':pathlib.Path("
                f"{str(self.folder / 'token')!r}).read_text()}}}}))"
            )
            user = {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1",
                    "command": sys.executable,
                    "args": ["-I", "-S", "-c", code],
                    "interactiveMode": "Never",
                }
            }
        context = {"cluster": "fake", "user": "tester", "namespace": self.namespace}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "tester", "user": user}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(document))  # JSON is YAML
        path.chmod(0o600)
        return path

    def set_image(
        self, entrypoints: Mapping[str, list[str]], environ: Mapping[str, str] | None = None
    ) -> None:
        """Say what images run by themselves, by parts of their names, and what all of them set."""
        self.kubelet.entrypoints |= entrypoints
        self.kubelet.image_environ |= environ or {}

    def add_user(self, name: str, permission: Permission) -> str:
        """A user who may do what `permission` says. Their token."""
        token = f"token-of-{name}"
        self.api.users[name] = permission
        self.api.tokens[token] = name
        return token

    def restrict(self, permission: Permission) -> None:
        """Whom the kubeconfig names may do what `permission` says, and is no administrator."""
        self.api.users[ADMIN] = permission
        self.api.used.clear()

    def used(self) -> set[tuple[str, str]]:
        """The verbs and resources that whom the kubeconfig names has used since `restrict`."""
        return {(verb, noun) for user, verb, noun in self.api.used if user == ADMIN}

    def refused(self) -> list[str]:
        """What whom the kubeconfig names has tried, and may not do."""
        return sorted(f"{verb} {noun}" for user, verb, noun in self.api.refused if user == ADMIN)

    def expire_token(self) -> None:
        """The administrator's token is refused from now on."""
        self.api.tokens.pop(self._token, None)

    def renew_token(self) -> str:
        """A new token for the administrator: in the kubeconfig and for the exec plugin."""
        self._token = f"token-{len(self.api.tokens) + int(time.time())}"
        self.api.tokens[self._token] = ADMIN
        (self.folder / "token").write_text(self._token)
        self.write_kubeconfig(self.kubeconfig)
        return self._token

    # What there is

    def add_namespace(self, name: str, service_accounts: Iterable[str] = ("default",)) -> None:
        if self.store.get(NAMESPACES, "", name) is None:
            labels = {"kubernetes.io/metadata.name": name}
            self.store.create(
                NAMESPACES,
                {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Active"}},
            )
        for account in service_accounts:
            if self.store.get(SERVICE_ACCOUNTS, name, account) is None:
                self.store.create(
                    SERVICE_ACCOUNTS, {"metadata": {"name": account, "namespace": name}}
                )

    def add_pool(self, pool: NodePool) -> list[str]:
        """Nodes. Their names."""
        return [str(self.store.create(NODES, node)["metadata"]["name"]) for node in pool.objects()]

    def install_job_sets(self) -> None:
        self.api.discovery.custom.add(JOB_SETS)
        self._define(JOB_SETS)

    def remove_job_sets(self) -> None:
        """The definition goes, and with it every JobSet; open watches end."""
        self.api.discovery.custom.discard(JOB_SETS)
        for obj in self.store.all(JOB_SETS):
            self.delete("jobsets", obj["metadata"]["name"], namespace=obj["metadata"]["namespace"])
        self.store.remove(DEFINITIONS, "", JOB_SETS.full)
        self.store.wake()

    def _define(self, resource: Resource) -> None:
        spec = {
            "group": resource.group,
            "names": {"plural": resource.plural, "kind": resource.kind},
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "versions": [{"name": resource.version, "served": True, "storage": True}],
        }
        established = {"type": "Established", "status": "True", "reason": "InitialNamesAccepted"}
        self.store.create(
            DEFINITIONS,
            {
                "metadata": {"name": resource.full},
                "spec": spec,
                "status": {"conditions": [established], "storedVersions": [resource.version]},
            },
        )

    def install_kueue(self, quotas: dict[str, dict[str, str]], namespace: str = "") -> Kueue:
        """Queues by name, with what may run at once: `{"lq": {"google.com/tpu": "4"}}`."""
        self.api.discovery.custom.update(QUEUES)
        place = namespace or self.namespace
        kueue = Kueue(self.store, self.engine, self.recorder, place, quotas)
        self.admit_with(kueue.suspend)
        return kueue

    def add_quota(self, name: str, hard: dict[str, str], namespace: str = "") -> None:
        meta = {"name": name, "namespace": namespace or self.namespace}
        self.store.create(QUOTAS, {"metadata": meta, "spec": {"hard": hard}})

    def admit_with(self, check: Callable[[Resource, Object], None]) -> None:
        """Have `check` see (and change, or refuse) each object that clients create."""
        self.api.admitting.append(check)

    # Looking

    def objects(self, plural: str, namespace: str = "") -> list[Object]:
        """Copies of all objects of a kind."""
        return [clone(obj) for obj in self.store.all(self._resource(plural), namespace)]

    def object(self, plural: str, name: str, namespace: str = "") -> Object | None:
        resource = self._resource(plural)
        place = (namespace or self.namespace) if resource.namespaced else ""
        return clone(self.store.get(resource, place, name))  # type: ignore[no-any-return]

    def _resource(self, plural: str) -> Resource:
        from doubles.cluster.kinds import ALWAYS, QUEUES

        return next(r for r in (*ALWAYS, *QUEUES, JOB_SETS) if r.plural == plural)

    def left_over(self) -> list[str]:
        """What was made since the cluster began and is still there, of every kind but Events."""
        return sorted(self._names() - self._before)

    def _names(self) -> set[str]:
        kinds = (*ALWAYS, JOB_SETS, WORKLOADS)
        return {
            f"{resource.plural}/{obj['metadata']['name']}"
            for resource in kinds
            if resource is not EVENTS
            for obj in self.store.all(resource)
        }

    def wait_for(
        self, condition: Callable[[], object], timeout_s: float = 60.0, what: str = ""
    ) -> object:
        """What `condition` says once that is true; it is asked after every change."""
        until = time.monotonic() + timeout_s
        while True:
            version = self.store.version
            if found := condition():
                return found
            if self.crashes:
                raise AssertionError(self.crashes[0])
            left = until - time.monotonic()
            if left <= 0:
                raise AssertionError(f"waited in vain for {what or condition}\n{self.describe()}")
            self.store.wait(version, min(left, 0.5))

    def wait_for_condition(
        self, plural: str, name: str, kind: str, timeout_s: float = 60.0
    ) -> Object:
        """The object, once it has this condition."""
        from doubles.cluster.objects import is_true

        def look() -> Object | None:
            obj = self.object(plural, name)
            return obj if obj is not None and is_true(obj, kind) else None

        found = self.wait_for(look, timeout_s, f"{plural}/{name} {kind}")
        assert isinstance(found, dict)
        return found

    def describe(self) -> str:
        """All objects in a few lines, and the last lines of pods, for failed tests."""
        lines = []
        for resource in (JOB_SETS, JOBS, PODS):
            for obj in self.store.all(resource):
                lines.append(f"{resource.plural}/{obj['metadata']['name']} {obj.get('status')}")
        for pod in self.store.all(PODS):
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            lines.append(f"  log of {name}: {self.log(name, namespace)[-2000:]}")
        for obj in self.store.all(EVENTS)[-20:]:
            about = obj["involvedObject"]
            lines.append(f"  {about['kind']}/{about['name']} {obj['reason']}: {obj['message']}")
        return "\n".join(lines)

    def log(self, pod: str, namespace: str = "") -> str:
        """What a pod's first container printed."""
        obj = self.object("pods", pod, namespace)
        assert obj is not None, f"no pod {pod}"
        logs = self.kubelet.log_of(obj["metadata"]["uid"], 0)
        return b"".join(logs[-1].read()).decode(errors="replace") if logs else ""

    def pid(self, pod: str, namespace: str = "") -> int:
        """The process of a pod's first container."""
        obj = self.object("pods", pod, namespace)
        assert obj is not None, f"no pod {pod}"
        container = self.kubelet.pods[obj["metadata"]["uid"]].running[0]
        assert container is not None, f"pod {pod} does not run"
        assert container.pid is not None, f"pod {pod} does not run yet"
        return container.pid

    @property
    def requests(self) -> list[Request]:
        return list(self.api.requests)

    def counts(self) -> Counter[str]:
        """Requests by verb and resource: "create jobs", "watch pods", "get pods/log"; "try jobs"
        is a dry run."""
        return self.api.counts()

    def forget_requests(self) -> None:
        self.api.requests.clear()

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that clients sent and the API does not know: typing errors, mostly."""
        return self.api.unknown

    @property
    def crashes(self) -> list[str]:
        """Errors of the cluster itself."""
        return self.engine.crashes + self.server.crashes

    # Breaking

    def stop_server(self) -> None:
        """The API server is gone; pods go on."""
        self.server.stop()

    def start_server(self, *, new_port: bool = False) -> None:
        if new_port:
            self.server.port = 0
        self.server.start()
        if new_port:
            self.write_kubeconfig(self.kubeconfig)

    def restart_server(self, down_s: float = 0.0) -> None:
        """The API server restarts on its port: all connections break, nothing is lost."""
        self.server.stop()
        time.sleep(down_s)
        self.server.start()

    def compact(self) -> None:
        """Forget history: a watch that goes on from before gets 410."""
        self.store.compact()

    def delete(
        self, plural: str, name: str, *, policy: str = "Background", namespace: str = ""
    ) -> None:
        self.collector.delete(
            self._resource(plural), namespace or self.namespace, name, policy=policy
        )

    def delete_pod(
        self, name: str, *, grace_s: float | None = None, force: bool = False, namespace: str = ""
    ) -> None:
        self.collector.delete(
            PODS, namespace or self.namespace, name, grace_s=0 if force else grace_s
        )

    def evict_pod(self, name: str, namespace: str = "", *, preempted: bool = False) -> None:
        """As the eviction API does it; or the scheduler, for a pod of higher priority."""
        reason, message = "EvictionByEvictionAPI", "Eviction API: evicting"
        if preempted:
            reason = "PreemptionByScheduler"
            message = "default-scheduler: preempting to accommodate a higher priority pod"
        self.api.disrupt(namespace or self.namespace, name, reason, message)
        self.collector.delete(PODS, namespace or self.namespace, name)

    def kill_pod_process(
        self, name: str, number: int = signal.SIGKILL, *, oom: bool = False, namespace: str = ""
    ) -> None:
        """A signal to the pod's process; with `oom` as if the kernel had sent it."""
        pid = self.pid(name, namespace)
        if oom:
            obj = self.object("pods", name, namespace)
            assert obj is not None
            self.kubelet.pods[obj["metadata"]["uid"]].oom = True
        os.kill(pid, number)

    def lose_node(self, name: str) -> None:
        """The machine loses power: its processes end, nobody says so."""
        self.nodes.lose(name)
        for pod in list(self.kubelet.pods.values()):
            if pod.node == name:
                for container in pod.running:
                    if container is not None:
                        container.kill(signal.SIGKILL)

    def delete_node(self, name: str) -> None:
        self.store.remove(NODES, "", name)

    def hold_back(self, prefix: str) -> None:
        """Pods whose names start so (a pattern) are not scheduled and nobody says why."""
        self.scheduler.held.add(prefix)

    def let_go(self, prefix: str) -> None:
        self.scheduler.held.discard(prefix)
        self.scheduler.look_again()
