"""Program that runs inside the namespaces of the tests' Ray cluster, started by `ray_cluster`. It
starts the head and the nodes, carries out orders, and relays connections to the dashboard.
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
import threading
import time
import urllib.request
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

READY_WITHIN_S = 240.0
TOKEN = "token-of-the-tests-0123456789abcdef"
OBJECT_STORE_BYTES = 80 << 20
"""The smallest size that Ray accepts."""
DASHBOARD_PORT = 8265
FIRST_PORT = 20_000
LISTEN_PORT = "dashboard_agent_listen_port"
_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")
_PR_SET_PDEATHSIG = 1


def main(folder: Path, listener_fd: int, life_fd: int) -> None:
    """Run a cluster until the process behind `life_fd` ends. As the first process of its namespace,
    this program also reaps orphans."""
    _die_with_parent()
    _raise_loopback()
    (folder / "ray").mkdir()
    settings = json.loads((folder / "settings.json").read_text())
    threading.Thread(target=_end_after, args=(folder, life_fd), daemon=True).start()
    running = _Running(folder, settings["nodes"], sends_output=settings["sends_output"])
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
    """The head and the nodes. Each public method carries out an order from the tests."""

    def __init__(self, folder: Path, nodes: list[dict[str, Any]], *, sends_output: bool) -> None:
        from ray.cluster_utils import Cluster

        _wait_longer_for_raylets()
        self._started: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._removed: list[Any] = []
        self._drained: set[int] = set()
        self._ports = itertools.count(FIRST_PORT)
        self._common = {
            "num_cpus": 1,
            "node_ip_address": "127.0.0.1",
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        head = {
            "temp_dir": str(folder / "ray"),
            "include_log_monitor": sends_output,
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
        """Choose the ports of a node's agents, and write the files in which agents report them: a
        raylet kills itself if it gets no report in 15 s. All ports of this network are free."""
        ports = {name: next(self._ports) for name in _PORTS}
        node_id = os.urandom(28).hex()
        report = f"{LISTEN_PORT}_{node_id}", str(ports[LISTEN_PORT])
        threading.Thread(target=_write_port, args=(self._folder, *report), daemon=True).start()
        variables = settings.get("env_vars", {}) | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id}
        return self._common | settings | ports | {"env_vars": variables}

    def kill_node(self, index: int) -> bool:
        raylet = self._raylet(index)
        raylet.kill()
        raylet.wait()
        return True

    def drain_node(self, about: tuple[int, int]) -> bool:
        index, deadline_s = about
        self._drained.add(index)
        node_id = self._started[index][0].node_id
        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        which = ["--address", self._cluster.address, "--node-id", node_id]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        limit = ["--deadline-remaining-seconds", str(deadline_s)]
        drain = [*ray, *which, *why, *limit]
        done = subprocess.run(drain, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
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
            if not self._is_alive(index) or index in self._drained:
                if node in self._cluster.worker_nodes:
                    self._cluster.remove_node(node, allow_graceful=False)
                self._await_death(node)
                self._start(index, settings)
        self._drained.clear()
        return True

    def _await_death(self, node: Any) -> None:
        """Wait until Ray has noticed that a node is dead, and sends no more work to it."""
        deadline = time.monotonic() + READY_WITHIN_S
        while node.node_id in self._cluster.global_state._live_node_ids():
            if time.monotonic() > deadline:
                raise TimeoutError("Ray does not notice that a node is dead")
            time.sleep(0.2)

    def _is_alive(self, index: int) -> bool:
        raylet = self._raylet(index)
        return raylet is not None and raylet.poll() is None

    def _raylet(self, index: int) -> Any:
        raylets = self._started[index][0].all_processes.get("raylet")
        return raylets[0].process if raylets else None


def _wait_longer_for_raylets() -> None:
    """Raise the limit of 30 s for the start of a raylet, which a busy machine can exceed."""
    from ray._private import services

    find = services.get_node

    def find_patiently(*args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            with contextlib.suppress(RuntimeError):
                return find(*args, **options)
            if time.monotonic() > deadline:
                raise RuntimeError("no raylet")
            time.sleep(0.2)

    services.get_node = find_patiently


def _write_port(folder: Path, name: str, port: str) -> None:
    """Write the file in which an agent would report its port, before it does so."""
    while not (session := next(folder.glob("session_2*/"), None)):
        time.sleep(0.01)
    (session / name).write_text(port)


def _await_agent(node_id: str) -> None:
    """Wait until the dashboard can reach its agent on a node."""
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
    """Wait until the owner ends; then end all processes and remove the folder."""
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
    """Bring the loopback interface up, like `ip link set lo up`."""
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
        for end in (outside, inside):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
