"""The cluster for tests: start it, read its state, and make its parts fail.

`close` ends everything.

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
"""The user in the kubeconfig, who may do everything unless `restrict` was called."""
NAMESPACE = "default"


class FakeCluster:
    """An API server with its controllers, scheduler and nodes."""

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
        """Start a cluster.

        Args:
            pools: node pools.
            namespaces: the namespaces; the first one is the kubeconfig's.
            service_accounts: accounts in each namespace.
            timings: the delays of the cluster.
            job_sets: install JobSet.
            environ: variables of the image; pods get nothing else of this process's environment.
            deaf: processes without a handler ignore SIGTERM, as PID 1 of a container does.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=os.environ.get("TMPDIR")))
        self.kubeconfig = self.folder / "kubeconfig"
        self.timings = timings or Timings()
        self.faults = Faults()
        self.store = Store()
        self.engine = Engine()
        self.recorder = Recorder(self.store)
        # Listeners are called in this order. A pod must get its node before its Job is handled
        # again, and the JobSet controller must see every state of its Jobs.
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

    # --- access of clients

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def write_kubeconfig(
        self, path: Path, *, token: str | None = None, exec_plugin: bool = False
    ) -> Path:
        """Write a kubeconfig for the administrator, or for the user of `token` ("" for no user).
        With `exec_plugin`, a program prints the token, and clients run it again on expiry.
        """
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
        path.write_text(json.dumps(document))  # JSON is also YAML.
        path.chmod(0o600)
        return path

    def set_image(
        self, entrypoints: Mapping[str, list[str]], environ: Mapping[str, str] | None = None
    ) -> None:
        """Set the entrypoints of images, by parts of the images' names, and variables for all."""
        self.kubelet.entrypoints |= entrypoints
        self.kubelet.image_environ |= environ or {}

    def add_user(self, name: str, permission: Permission) -> str:
        """Add a user with a permission; return the user's token."""
        token = f"token-of-{name}"
        self.api.users[name] = permission
        self.api.tokens[token] = name
        return token

    def restrict(self, permission: Permission) -> None:
        """Give the kubeconfig's user this permission instead of all permissions."""
        self.api.users[ADMIN] = permission
        self.api.used.clear()

    def used(self) -> set[tuple[str, str]]:
        """Return the verbs and resources that the kubeconfig's user has used since `restrict`."""
        return {(verb, noun) for user, verb, noun in self.api.used if user == ADMIN}

    def refused(self) -> list[str]:
        """Return the refused calls of the kubeconfig's user."""
        return sorted(f"{verb} {noun}" for user, verb, noun in self.api.refused if user == ADMIN)

    def expire_token(self) -> None:
        """Refuse the administrator's token from now on."""
        self.api.tokens.pop(self._token, None)

    def renew_token(self) -> str:
        """Make a new token for the administrator; update kubeconfig and exec plugin."""
        self._token = f"token-{len(self.api.tokens) + int(time.time())}"
        self.api.tokens[self._token] = ADMIN
        (self.folder / "token").write_text(self._token)
        self.write_kubeconfig(self.kubeconfig)
        return self._token

    # --- contents

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
        """Add the nodes of a pool; return their names."""
        return [str(self.store.create(NODES, node)["metadata"]["name"]) for node in pool.objects()]

    def install_job_sets(self) -> None:
        self.api.discovery.custom.add(JOB_SETS)
        self._define(JOB_SETS)

    def remove_job_sets(self) -> None:
        """Remove the definition of JobSets and with it all JobSets; open watches end."""
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
        """Install Kueue with queues by name and their quotas: `{"lq": {"google.com/tpu": "4"}}`."""
        self.api.discovery.custom.update(QUEUES)
        namespace = namespace or self.namespace
        kueue = Kueue(self.store, self.engine, self.recorder, namespace, quotas)
        self.admit_with(kueue.suspend)
        return kueue

    def add_quota(self, name: str, hard: dict[str, str], namespace: str = "") -> None:
        meta = {"name": name, "namespace": namespace or self.namespace}
        self.store.create(QUOTAS, {"metadata": meta, "spec": {"hard": hard}})

    def admit_with(self, check: Callable[[Resource, Object], None]) -> None:
        """Call `check` with each object that clients create. It may change or refuse the object."""
        self.api.admitting.append(check)

    # --- reading

    def objects(self, plural: str, namespace: str = "") -> list[Object]:
        """Return copies of all objects of a kind."""
        return [clone(obj) for obj in self.store.all(self._resource(plural), namespace)]

    def object(self, plural: str, name: str, namespace: str = "") -> Object | None:
        resource = self._resource(plural)
        namespace = (namespace or self.namespace) if resource.namespaced else ""
        return clone(self.store.get(resource, namespace, name))  # type: ignore[no-any-return]

    def _resource(self, plural: str) -> Resource:
        from doubles.cluster.kinds import ALWAYS, QUEUES

        return next(r for r in (*ALWAYS, *QUEUES, JOB_SETS) if r.plural == plural)

    def left_over(self) -> list[str]:
        """Return the objects that were created since the start and still exist, except Events."""
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
        """Wait until `condition`, called after every change, is true; return its result."""
        until = time.monotonic() + timeout_s
        while True:
            version = self.store.version
            if result := condition():
                return result
            if self.crashes:
                raise AssertionError(self.crashes[0])
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"waited in vain for {what or condition}\n{self.describe()}")
            self.store.wait(version, min(left_s, 0.5))

    def wait_for_condition(
        self, plural: str, name: str, kind: str, timeout_s: float = 60.0
    ) -> Object:
        """Wait until an object has a condition; return the object."""
        from doubles.cluster.objects import is_true

        def read() -> Object | None:
            obj = self.object(plural, name)
            return obj if obj is not None and is_true(obj, kind) else None

        obj = self.wait_for(read, timeout_s, f"{plural}/{name} {kind}")
        assert isinstance(obj, dict)
        return obj

    def describe(self) -> str:
        """Describe all objects and the last output of pods in a few lines, for failed tests."""
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
        """Return the output of a pod's first container."""
        obj = self.object("pods", pod, namespace)
        assert obj is not None, f"no pod {pod}"
        logs = self.kubelet.log_of(obj["metadata"]["uid"], 0)
        return b"".join(logs[-1].read()).decode(errors="replace") if logs else ""

    def pid(self, pod: str, namespace: str = "") -> int:
        """Return the process id of a pod's first container."""
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
        """Count requests by verb and resource: "create jobs", "watch pods", "get pods/log"; "try
        jobs" is a dry run."""
        return self.api.counts()

    def forget_requests(self) -> None:
        self.api.requests.clear()

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that the API does not know in clients' requests, mostly spelling mistakes."""
        return self.api.unknown

    @property
    def crashes(self) -> list[str]:
        """Errors in the code of the double."""
        return self.engine.crashes + self.server.crashes

    # --- breaking

    def stop_server(self) -> None:
        """Stop the API server; pods continue to run."""
        self.server.stop()

    def start_server(self, *, new_port: bool = False) -> None:
        if new_port:
            self.server.port = 0
        self.server.start()
        if new_port:
            self.write_kubeconfig(self.kubeconfig)

    def restart_server(self, down_s: float = 0.0) -> None:
        """Restart the API server on the same port: connections break, but objects stay."""
        self.server.stop()
        time.sleep(down_s)
        self.server.start()

    def compact(self) -> None:
        """Drop the history: a watch that continues from an earlier version gets status 410."""
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
        """Evict a pod like the eviction API, or preempt it like the scheduler."""
        reason, message = "EvictionByEvictionAPI", "Eviction API: evicting"
        if preempted:
            reason = "PreemptionByScheduler"
            message = "default-scheduler: preempting to accommodate a higher priority pod"
        self.api.disrupt(namespace or self.namespace, name, reason, message)
        self.collector.delete(PODS, namespace or self.namespace, name)

    def kill_pod_process(
        self, name: str, number: int = signal.SIGKILL, *, oom: bool = False, namespace: str = ""
    ) -> None:
        """Send a signal to a pod's process; with `oom`, report it as out of memory."""
        pid = self.pid(name, namespace)
        if oom:
            obj = self.object("pods", name, namespace)
            assert obj is not None
            self.kubelet.pods[obj["metadata"]["uid"]].oom = True
        os.kill(pid, number)

    def lose_node(self, name: str) -> None:
        """Simulate a power failure of a machine: its processes end, and nothing reports that."""
        self.nodes.lose(name)
        for pod in list(self.kubelet.pods.values()):
            if pod.node == name:
                for container in pod.running:
                    if container is not None:
                        container.kill(signal.SIGKILL)

    def delete_node(self, name: str) -> None:
        self.store.remove(NODES, "", name)

    def hold_back(self, prefix: str) -> None:
        """Do not schedule pods whose names match the pattern, and report no reason."""
        self.scheduler.held.add(prefix)

    def let_go(self, prefix: str) -> None:
        self.scheduler.held.discard(prefix)
        self.scheduler.look_again()
