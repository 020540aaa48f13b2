"""A real Ray cluster on this machine: a head with its dashboard, and raylets that stand for the
hosts of simulated TPU slices.

In: slices, nodes. Out: the address of the dashboard; nodes that are killed at a word.

Everything of the cluster runs in namespaces of its own (network, processes, mounts): Ray insists on
the machine's own address, which is the loopback where there is no other; and with the first
process of the namespaces all others end, whatever has become of whoever started them. The tests
stay outside. A listening socket belongs to the network in which it was made: it is made out here,
and the program inside accepts what connects to it, and hands it on to the dashboard. Folders, and
Unix sockets in them, are shared: by one, the tests give orders.

All tests of a run, also in several processes, share one cluster, which ends with the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

READY_WITHIN_S = 240.0
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes."""
LEAST_BYTES = 2 << 30
DASHBOARD_PORT = 8265
FIRST_PORT = 20_000
LISTEN_PORT = "dashboard_agent_listen_port"
_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")
TOKEN = "token-of-the-tests-0123456789abcdef"
_KEPT = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SliceShape:
    """What the nodes of one slice tell Ray."""

    accelerator: str
    topology: str
    hosts: int
    chips: int = 4

    def node(self, name: str, worker: int) -> dict[str, Any]:
        """What the node of one worker of a slice is started with."""
        generation = self.accelerator.partition("-")[0].upper()
        resources = {"TPU": self.chips, f"accelerator_type:TPU-{generation}": 1}
        if worker == 0:
            resources[f"TPU-{self.accelerator}-head"] = 1
        labels = {
            "ray.io/tpu-slice-name": name,
            "ray.io/tpu-worker-id": str(worker),
            "ray.io/tpu-pod-type": self.accelerator,
            "ray.io/tpu-topology": self.topology,
        }
        variables = {
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": self.accelerator,
            "TPU_TOPOLOGY": self.topology,
        }
        return {"resources": resources, "labels": labels, "env_vars": variables}


V6E_16 = SliceShape("v6e-16", "4x4", hosts=4)


@dataclass(frozen=True)
class GivenCluster:
    """A cluster that somebody else runs.

    Attributes:
        address: of its dashboard.
    """

    address: str


class RayCluster:
    """A running cluster.

    Attributes:
        address: of the dashboard, for whoever is on this machine: http://127.0.0.1:port.
        token: without which nobody is let in.
        folder: what Ray and the cluster's program write.
    """

    def __init__(self, folder: Path) -> None:
        ready = json.loads((folder / "ready.json").read_text())
        self.folder = folder
        self.address = f"http://127.0.0.1:{ready['port']}"
        self.token = TOKEN
        self.pid = int(ready["pid"])
        """Of the program that made the namespaces; everything ends with it."""

    def add_node(self, **settings: Any) -> int:
        """Start a node with what `ray.cluster_utils.Cluster.add_node` takes; return its index,
        from 1."""
        return int(self._ask("add_node", settings))

    def add_slice(self, name: str, shape: SliceShape = V6E_16) -> list[int]:
        """Start the nodes of a slice; return their indices by worker."""
        return [self.add_node(**shape.node(name, worker)) for worker in range(shape.hosts)]

    def kill_node(self, index: int) -> None:
        """Kill the raylet of a node, as `kill -9` does, and nothing else. Ray notices after 2 s
        here, elsewhere after more than a minute."""
        self._ask("kill_node", index)

    def remove_node(self, index: int) -> None:
        """End all programs of a node, as a machine that is switched off does. It does not come
        back."""
        self._ask("remove_node", index)

    def nodes(self) -> dict[int, bool]:
        """Which nodes were started, and whether their raylets are alive."""
        return {int(index): alive for index, alive in self._ask("nodes", None).items()}

    def mend(self) -> None:
        """Replace nodes that were killed by new ones that tell the same of themselves."""
        self._ask("mend", None)

    def run_inside(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's network and among its processes."""
        program = next(_children_of(self.pid))
        inside = ["nsenter", "-n", "-p", "-m", *_user_of(program), "-t", str(program), *command]
        return subprocess.run(inside, text=True, capture_output=True, check=False, **settings)

    def _ask(self, order: str, about: Any) -> Any:
        with Client(str(self.folder / "orders"), "AF_UNIX") as connection:
            connection.send((order, about))
            answer = connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer[0]


def _children_of(pid: int) -> Iterator[int]:
    yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _user_of(pid: int) -> list[str]:
    """Whether its namespaces belong to a user namespace of its own."""
    theirs, ours = (os.readlink(f"/proc/{who}/ns/user") for who in (pid, "self"))
    return [] if theirs == ours else ["-U", "--preserve-credentials"]


# --- for the tests


def why_impossible() -> str:
    """Return why there can be no cluster on this machine, or ""."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return 'Ray is not installed: pip install "ray[default]"'
    if not shutil.which("unshare"):
        return "there is no unshare (package util-linux), which makes namespaces"
    tried = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return f"the kernel forbids namespaces ({tried.stderr.strip()})" if tried.returncode else ""


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def share_cluster(folder: Path, owner: int) -> RayCluster:
    """Return the cluster of this run of tests, started if it is not there.

    Args:
        folder: common to all processes of the run.
        owner: the process with which the cluster ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / "cluster"
        if known.exists():
            place = Path(known.read_text())
            with contextlib.suppress(OSError, RuntimeError):
                cluster = RayCluster(place)
                cluster.nodes()
                return cluster
        cluster = start_cluster(owner)
        known.write_text(str(cluster.folder))
        return cluster


def end_shared_cluster(folder: Path) -> None:
    """End the cluster of this run of tests, if it was started."""
    known = folder / "cluster"
    if known.exists():
        place = Path(known.read_text())
        known.unlink()
        with contextlib.suppress(OSError, RuntimeError):
            end_cluster(place, RayCluster(place).pid)


def start_cluster(
    owner: int | None = None,
    *,
    slices: Mapping[str, SliceShape] | None = None,
    variables: Mapping[str, str] | None = None,
) -> RayCluster:
    """Start a cluster that lives as long as a process does: this one, unless told otherwise.

    Args:
        owner: the id of the process.
        slices: by name; one slice of v6e-16 unless told otherwise.
        variables: what Ray's programs have in their environment besides, such as RAY_AUTH_MODE.
    """
    # Sockets of Ray have long names, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kr-", dir=_find_place()))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    life = os.pidfd_open(owner or os.getpid())
    shapes = {"slice-0": V6E_16} if slices is None else slices
    nodes = [shape.node(name, i) for name, shape in shapes.items() for i in range(shape.hosts)]
    (folder / "settings.json").write_text(
        json.dumps({"nodes": nodes, "port": listener.getsockname()[1]})
    )
    log = (folder / "log").open("w")
    with listener, log:
        program = subprocess.Popen(
            [*_unshare(), sys.executable, __file__, str(folder), str(listener.fileno()), str(life)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environ(folder, variables or {}),
            pass_fds=[listener.fileno(), life],
            start_new_session=True,
        )
    os.close(life)
    _programs[folder] = program
    ready = folder / "ready.json"
    deadline = time.monotonic() + READY_WITHIN_S
    while not ready.exists():
        if program.poll() is not None or time.monotonic() > deadline:
            said = (folder / "log").read_text()
            end_cluster(folder, program.pid)
            raise RuntimeError(f"no cluster came to be:\n{said}")
        time.sleep(0.05)
    ready.write_text(json.dumps(json.loads(ready.read_text()) | {"pid": program.pid}))
    return RayCluster(folder)


def _find_place() -> str:
    """Memory, where there is some: a busy disk takes long for many small files."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free > LEAST_BYTES and os.access(memory, os.W_OK):
            return str(memory)
    return "/tmp"


_programs: dict[Path, subprocess.Popen[bytes]] = {}
"""Kept, because one that is forgotten while it runs is a warning."""


def end_cluster(folder: Path, pid: int) -> None:
    """End a cluster now, and remove what it left."""
    children = []
    with contextlib.suppress(OSError):
        children = list(_children_of(pid))
    for each in (*children, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    if folder in _programs:
        _programs.pop(folder).wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environ(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the tests' own, by which they know the processes of jobs."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # Else each node keeps a Python ready, which is memory.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_metrics_report_interval_ms": "60000",
        # Ray runs workers, and jobs with all that they start, 15 steps below others: beside other
        # tests they would hardly run.
        "RAY_worker_niceness": "0",
        # A busy machine is slow, not dead: it may take a minute to answer. Where nobody listens any
        # more, each try fails at once; Ray's own settings make that 15 s and more.
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
    }
    return kept | own | variables


# --- the program inside


def main(folder: Path, listener_fd: int, life_fd: int) -> None:
    """Run a cluster until the process of `life_fd` ends. The first of a process namespace: it also
    reaps what others leave."""
    _die_with_parent()
    _raise_loopback()
    (folder / "ray").mkdir()
    settings = json.loads((folder / "settings.json").read_text())
    threading.Thread(target=_end_after, args=(folder, life_fd), daemon=True).start()
    running = _Running(folder, settings["nodes"])
    listener = socket.socket(fileno=listener_fd)
    threading.Thread(target=_relay_all, args=(listener,), daemon=True).start()
    with Listener(str(folder / "orders"), "AF_UNIX") as orders:
        text = json.dumps({"port": settings["port"]})
        (folder / "ready.json.new").write_text(text)
        (folder / "ready.json.new").rename(folder / "ready.json")
        while True:
            with orders.accept() as connection:
                _answer(running, connection)


def _answer(running: _Running, connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        order, about = connection.recv()
        try:
            connection.send((getattr(running, order)(about),))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class _Running:
    """Head and nodes."""

    def __init__(self, folder: Path, nodes: list[dict[str, Any]]) -> None:
        from ray.cluster_utils import Cluster

        _wait_longer_for_raylets()
        self._started: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._removed: list[Any] = []
        self._ports = itertools.count(FIRST_PORT)
        self._common = {
            "num_cpus": 1,
            "node_ip_address": "127.0.0.1",
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        head = {
            "temp_dir": str(folder / "ray"),
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": DASHBOARD_PORT,
        }
        self._folder = folder / "ray"
        self._cluster = Cluster(initialize_head=True, head_node_args=self._identify(head))
        for index, settings in enumerate(nodes, start=1):
            self._start(index, settings, wait=False)
        self._cluster.wait_for_nodes(READY_WITHIN_S)
        _await_agent(self._cluster.head_node.node_id)

    def add_node(self, settings: dict[str, Any]) -> int:
        index = max(self._started, default=0) + 1
        self._start(index, settings)
        return index

    def _start(self, index: int, settings: dict[str, Any], *, wait: bool = True) -> None:
        node = self._cluster.add_node(wait=wait, **self._identify(settings))
        self._started[index] = (node, settings)

    def _identify(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Choose the ports of a node's agents. A raylet kills itself if they have not told theirs
        within 15 s, by files. Nobody else is in this network."""
        ports = {name: next(self._ports) for name in _PORTS}
        node_id = os.urandom(28).hex()
        told = f"{LISTEN_PORT}_{node_id}", str(ports[LISTEN_PORT])
        threading.Thread(target=_tell_port, args=(self._folder, *told), daemon=True).start()
        variables = settings.get("env_vars", {}) | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id}
        return self._common | settings | ports | {"env_vars": variables}

    def kill_node(self, index: int) -> bool:
        raylet = self._raylet(index)
        raylet.kill()
        raylet.wait()
        return True

    def remove_node(self, index: int) -> bool:
        node, _ = self._started.pop(index)
        self._cluster.remove_node(node, allow_graceful=False)
        self._removed.append(node)
        return True

    def nodes(self, _: object) -> dict[int, bool]:
        return {index: self._is_alive(index) for index in self._started}

    def mend(self, _: object) -> bool:
        while self._removed:
            self._await_death(self._removed.pop())
        for index, (node, settings) in list(self._started.items()):
            if not self._is_alive(index):
                if node in self._cluster.worker_nodes:
                    self._cluster.remove_node(node, allow_graceful=False)
                self._await_death(node)
                self._start(index, settings)
        return True

    def _await_death(self, node: Any) -> None:
        """Wait until Ray has noticed: it would go on to send work there."""
        deadline = time.monotonic() + READY_WITHIN_S
        while node.node_id in self._cluster.global_state._live_node_ids():
            if time.monotonic() > deadline:
                raise TimeoutError("Ray does not notice that a node is dead")
            time.sleep(0.2)

    def _is_alive(self, index: int) -> bool:
        raylet = self._raylet(index)
        return raylet is not None and raylet.poll() is None

    def _raylet(self, index: int) -> Any:
        found = self._started[index][0].all_processes.get("raylet")
        return found[0].process if found else None


def _wait_longer_for_raylets() -> None:
    """Ray itself gives up a raylet that is not there after 30 s, which a busy machine takes."""
    from ray._private import services

    find = services.get_node

    def find_patiently(*given: Any, **named: Any) -> Any:
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            with contextlib.suppress(RuntimeError):
                return find(*given, **named)
            if time.monotonic() > deadline:
                raise RuntimeError("no raylet")
            time.sleep(0.2)

    services.get_node = find_patiently


def _tell_port(folder: Path, name: str, port: str) -> None:
    """Write the file in which an agent tells its port, before it does."""
    while not (session := next(folder.glob("session_2*/"), None)):
        time.sleep(0.01)
    (session / name).write_text(port)


def _await_agent(node_id: str) -> None:
    """Wait until the dashboard reaches its agent on a node."""
    query = f"/api/v0/logs?node_id={node_id}&glob=nothing"
    request = urllib.request.Request(
        f"http://127.0.0.1:{DASHBOARD_PORT}{query}", headers={"authorization": f"Bearer {TOKEN}"}
    )
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30):
            return
        time.sleep(0.2)


def _end_after(folder: Path, life_fd: int) -> None:
    """End everything once this process has ended, and leave no folder."""
    select.select([life_fd], [], [])
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _raise_loopback() -> None:
    """What `ip link set lo up` does."""
    siocsifflags, up, running = 0x8914, 0x1, 0x40
    request = b"lo".ljust(16, b"\0") + (up | running).to_bytes(2, sys.byteorder).ljust(24, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, siocsifflags, request)


def _relay_all(listener: socket.socket) -> None:
    while True:
        outside, _ = listener.accept()
        try:
            inside = socket.create_connection(("127.0.0.1", DASHBOARD_PORT))
        except OSError:
            outside.close()
            continue
        for each in (outside, inside):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((outside, inside), (inside, outside)):
            threading.Thread(target=_relay, args=pair, daemon=True).start()


def _relay(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
