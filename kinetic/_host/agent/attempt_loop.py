"""The agent process of a host whose job may have several attempts: it runs one `Agent` per attempt.

Each attempt has a new worker, forked by a process that has no threads. Between two attempts the
process waits for the host's assignment from the coordinator.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._core import layout
from kinetic._core.exits import ProgramCode
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.plan import Plan
from kinetic._host.agent import worker_process, workspace
from kinetic._host.agent.loop import Agent
from kinetic._host.agent.packages import AddedPackages
from kinetic._host.agent.worker_process import WorkerProcess
from kinetic._host.fork_server import ForkServer
from kinetic._host.identity import Identity
from kinetic._host.worker import jaxworld, process
from kinetic._source.renewal import UnpackedTree
from kinetic._store.base import Store
from kinetic._system import processes
from kinetic.errors import KineticError

Logs = Callable[[Identity], tuple[Path, Path]]


class AttemptLoop:
    """Runs one host's agent, attempt after attempt. Create it before this process has threads."""

    def __init__(
        self, identity: Identity, plan: Plan, store: Store, *, logs: Logs, alive_fd: int
    ) -> None:
        self._identity = identity
        self._plan = plan
        self._store = store
        self._logs = logs
        self._alive_fd = alive_fd
        self._tree: UnpackedTree | None = None
        """The source tree of the last call on a session."""
        self._channel: Any = None
        """A channel to the leader that stays open: opening one starts many threads."""
        self._world = 0
        """Number of the world that the worker keeps between calls; 0 for none."""
        self._folder = Path(identity.scratch) / f"host-{identity.assigned_index}"
        self._packages = AddedPackages(
            self._folder.with_name(f"packages-{identity.assigned_index}"), plan.requirements
        )
        if plan.holds is not None and identity.is_program:
            _import_for_calls(plan)
        label = f"{identity.job_id} host {identity.assigned_index}"
        self._title = f"kinetic-worker {label}"
        self._fork_servers = [
            ForkServer(worker_process.serve, f"kinetic-forks {label}", without=[alive_fd])
            for _ in range(1 if plan.holds is None else 2)
        ]
        """In a session the second one imports what earlier plain calls have imported."""
        self._preloaded: set[str] = set()

    def run(self) -> int:
        """Run this host's part of every attempt of the job; return the exit code of the agent
        process after the last one."""
        is_first = self._identity.start == 1 and self._plan.holds is None
        identity: Identity | None = self._identity if is_first else None
        worker, code = self._new_worker(), int(ProgramCode.DELIVERED)
        while True:
            if identity is None:
                place, over = self._await_place(worker)
                if place is None:
                    # A cluster that judges all hosts of a job together needs each host's exit code.
                    is_last = over is ProgramCode.DELIVERED and not self._identity.is_led_from_afar
                    return self._leave(worker, code if is_last else over)
                identity = self._identity.take_place(place)
                if self._world not in (0, place.world):
                    worker = self._replace(worker)
            plan = self._plan
            if identity.session:  # Each call has its own plan.
                plan = Plan.read(self._store.get(layout.JobKeys(identity.job_id).plan))
            # Libraries may read variables when they are imported.
            is_usual = plan.options.env == self._plan.options.env and not plan.captured
            server = self._choose_fork_server(is_usual=is_usual)
            if not worker.is_kept and worker.fork_server is not server:
                worker = self._replace(worker, server)
            agent = Agent(
                identity,
                plan,
                self._store,
                worker,
                logs=self._logs(identity),
                alive_fd=self._alive_fd,
                tree=self._tree,
                channel=self._channel,
                packages=self._packages,
            )
            code = agent.run()
            if agent.nothing_follows:
                self._close_fork_servers()
                return code
            agent.release()
            self._tree = agent.tree
            if not worker.is_kept:
                worker.close()
                if is_usual:
                    self._preload(agent.imports)
                worker = self._new_worker(self._choose_fork_server(is_usual=is_usual))
            self._world = identity.assignment.world if worker.is_kept and identity.assignment else 0
            identity = None

    def _replace(self, worker: WorkerProcess, server: ForkServer | None = None) -> WorkerProcess:
        """End a worker that cannot be used for the next call; return a new one."""
        self._world = 0
        worker.kill()
        worker.reap()
        processes.kill_descendants(trees=worker.keep)
        worker.close()
        return self._new_worker(server)

    def _preload(self, imports: dict[str, Any]) -> None:
        """Have the second fork server, if any, import what a call has imported, once each."""
        new = [name for name in imports.get("names", ()) if name not in self._preloaded]
        for server in self._fork_servers[1:]:
            if new and server.is_ready():
                server.prepare(imports | {"names": new})
                self._preloaded.update(new)

    def _choose_fork_server(self, *, is_usual: bool = True) -> ForkServer:
        """Return the second fork server if there is one and it is not importing, else the first. A
        call with variables of its own (`is_usual` is False) always gets the first."""
        first, *others = self._fork_servers
        return next((server for server in others if is_usual and server.is_ready()), first)

    def _new_worker(self, server: ForkServer | None = None) -> WorkerProcess:
        server = server or self._choose_fork_server()
        try:
            worker = WorkerProcess(self._title, server)
        except OSError:
            if server is self._fork_servers[0]:
                raise
            self._fork_servers.remove(server)
            server.close()
            return self._new_worker()
        worker.keep = tuple(server.pid for server in self._fork_servers)
        return worker

    def _close_fork_servers(self) -> None:
        for server in self._fork_servers:
            server.close()

    def _leave(self, worker: WorkerProcess, code: int) -> int:
        worker.kill()
        self._close_fork_servers()
        processes.kill_descendants()
        worker.close()
        workspace.remove(self._folder)
        return code

    def _await_place(self, worker: WorkerProcess) -> tuple[HostAssignment | None, ProgramCode]:
        """Wait for the assignment to the next attempt. Return None and an exit code if no attempt
        follows, the leader is lost, or the idle worker was killed."""
        answers: list[tuple[HostAssignment | None, ProgramCode]] = [(None, ProgramCode.UNDELIVERED)]
        done, wake = os.pipe()
        if self._identity.is_led_from_afar:  # SIGTERM now means that the host is taken away.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(ProgramCode.DELIVERED))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

        def ask() -> None:
            from kinetic._rpc import client, codec

            identity = self._identity
            patience_s = identity.unreachable_after_s
            if identity.is_pod:  # The time that a cluster takes to replace the leader's pod.
                patience_s = identity.join_timeout_s
            request = codec.PlaceRequest(identity.assigned_index, identity.start, self._world)
            endpoint = replace(identity.endpoint, attempt=0)
            try:
                self._channel = self._channel or client.open_channel(endpoint)
                place = client.request_assignment(
                    endpoint, request, unreachable_after_s=patience_s, channel=self._channel
                )
                answers[0] = place, ProgramCode.DELIVERED
            except KineticError:
                pass
            finally:
                os.close(wake)

        threading.Thread(target=ask, name="kinetic-place", daemon=True).start()
        with selectors.DefaultSelector() as selector:
            for fd in (done, self._alive_fd, worker.pidfd):
                selector.register(fd, selectors.EVENT_READ)
            ready = [key.fd for key, _ in selector.select()]
        if ready == [done]:
            os.close(done)
            return answers[0]
        lost = worker.pidfd in ready and self._alive_fd not in ready
        return None, ProgramCode.WORKER_LOST if lost else ProgramCode.UNDELIVERED


def _import_for_calls(plan: Plan) -> None:
    """Import what every worker of a session needs, so that its forks need not. For sessions on this
    machine the zygote has done this."""
    for name in process.PRELOADED:
        importlib.import_module(name)
    if not any(name.startswith("JAX_") for name in plan.options.env):
        jaxworld.preload(("numpy", "jax"))
