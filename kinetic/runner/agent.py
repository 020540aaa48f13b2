"""The agent: the process on every host that starts the worker, keeps its output, tells the coordinator, and ends it.

In: an `Identity`, the plan in the store. Out: one `HostReport`, the leader's value, the host's log. Called by `python -m
kinetic.runner` on a cluster and by the supervisor on this machine. It starts no JAX and runs no code of the user, so it is
alive to say how the worker died.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinetic.coordinator.gang import Beat, HostView
from kinetic.errors import KineticError
from kinetic.job import paths
from kinetic.job.outcome import Exit, HostReport
from kinetic.job.plan import Plan
from kinetic.runner import datasets, debugger, processes, worker, workspace
from kinetic.runner.channel import Channel, Message
from kinetic.runner.ending import ending_of
from kinetic.runner.identity import Identity
from kinetic.runner.jaxworld import World
from kinetic.runner.logs import HostLog, tees
from kinetic.runner.mountpoints import Mountpoints
from kinetic.runner.progress import Sample, moved
from kinetic.storage.base import Store

OPEN_LINE_S = 0.05
"""After this time without its end, the beginning of a line is shown."""
STOPPED_GRACE_S = 1.0
"""A host stopped because of another one gets this long at most: it is often stuck in native code and cannot react."""
PIPE_BYTES = 1 << 20
_OWN_FRAME = re.compile(r'File "(<frozen runpy>|.*/kinetic/runner/\w+\.py|.*/(site|dist)-packages/debugpy/.*)", line')


class Agent:
    """One host's agent, from the fork of its worker to the last cleaning up."""

    def __init__(self, identity: Identity, plan: Plan, store: Store, logs: tuple[Path, Path], alive_fd: int = -1) -> None:
        self._who = identity
        self._plan = plan
        self._store = store
        self._alive_fd = alive_fd
        self._log_paths = logs
        self._mountpoints = Mountpoints(datasets.root(identity, store))
        self._selector = selectors.DefaultSelector()
        self._armed = self._ready = self._started = self._stopping = self._delivered = self._all_done = False
        self._state = "preparing"
        self._report: HostReport | None = None
        self._end: Message | None = None
        self._worker_gone = False
        self._kill_at: float | None = None
        self._open_since: float | None = None
        self._stacks_asked = 0
        self._stacks_text = ""
        self._started_at = 0.0
        self._view: HostView | None = None
        self._finished = False
        self._gate = debugger.Gate(identity, plan, store, port=identity.debug_port) if plan.debug else None

    # -- life ----------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Do everything; return the exit code of the agent process (0: the report was delivered)."""
        os.setpgid(0, 0)
        processes.adopt_orphans()
        self._oom_before = processes.out_of_memory_kills()
        self._fork_worker()  # Before the first thread of this process: a fork would copy locks that threads hold.
        from kinetic.runner.link import Link

        self._log = HostLog(*self._log_paths)
        self._tees = tees(self._out, self._err, self._log, simulated=self._who.simulated)
        self._mark = self._sample()
        self._link = Link(self._who, self._beat)
        self._watch()
        self._link.start()
        self._prepare()
        self._link.join(self._address())
        if self._end is not None:
            self._conclude()
        try:
            while not self._finished:
                self._turn()
        finally:
            self._clean_up()
        return 0 if self._delivered else 1

    def _fork_worker(self) -> None:
        ours, theirs = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        for fd in (out, err):
            _widen(fd)
        self._stacks_path = Path(self._who.scratch) / f"stacks-{self._who.host}"
        stacks = os.open(self._stacks_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            processes.set_title(f"kinetic-worker {self._who.job_id} host {self._who.host}")
            worker.main(Channel(theirs), out, err, stacks, parent)
        theirs.close()
        for fd in (out, err):
            os.close(fd)
        self._stacks_fd = stacks
        self._channel = Channel(ours)
        self._pidfd = os.pidfd_open(self._pid)

    def _watch(self) -> None:
        ways: list[tuple[Any, Callable[[], None]]] = [
            (self._channel, self._on_message),
            (self._pidfd, self._on_death),
            (self._link.wake_fd, self._on_events),
            *((tee.fd, lambda tee=tee: self._on_output(tee)) for tee in self._tees),
        ]
        if self._alive_fd >= 0:
            ways.append((self._alive_fd, self._on_supervisor_gone))
        for fd, act in ways:
            self._selector.register(fd, selectors.EVENT_READ, act)

    def _prepare(self) -> None:
        try:
            self._workspace = workspace.prepare(self._who, self._plan, self._store)
            self._mountpoints.keep(self._plan.data)
            self._state = "waiting"
        except (KineticError, OSError) as error:
            self._end = {"event": Exit.SETUP_FAILED, "detail": str(error)}

    def _address(self) -> str:
        """How JAX on the other hosts reaches this one; the leader also reserves the port of JAX's coordination service."""
        if self._who.host != 0 or self._who.hosts == 1:
            return self._who.address
        # Held without listening until the end: with SO_REUSEPORT JAX's server can bind it, and nobody is given it meanwhile.
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((self._who.address if self._who.simulated else "", 0))
        return f"{self._who.address}:{self._reserved.getsockname()[1]}"

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj in self._selector.get_map():
                key.data()
        now = time.monotonic()
        if self._open_since is not None and now - self._open_since >= OPEN_LINE_S:
            for tee in self._tees:
                tee.flush()
            self._open_since = None
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_worker()
        if self._gate is not None and self._gate.opens():
            self._channel.send({"go": True})
        self._maybe_finish()

    def _patience(self) -> float:
        waits = [1.0]
        if self._open_since is not None:
            waits.append(self._open_since + OPEN_LINE_S - time.monotonic())
        if self._kill_at is not None:
            waits.append(self._kill_at - time.monotonic())
        if self._gate is not None and self._gate.holds:
            waits.append(debugger.LOOK_EVERY_S)
        return max(min(waits), 0.0)

    # -- what can happen -----------------------------------------------------------------------------------------------

    def _on_output(self, tee: Any) -> None:
        if not tee.pump():
            self._selector.unregister(tee.fd)
        if tee.has_open_line:
            self._open_since = self._open_since or time.monotonic()
        elif not any(t.has_open_line for t in self._tees):
            self._open_since = None

    def _on_message(self) -> None:
        messages, is_open = self._channel.available()
        if not is_open:
            self._selector.unregister(self._channel)
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message["event"] == "armed":
            self._armed = True
            self._maybe_start()
        elif message["event"] == "started":
            self._state, self._started_at = "running", message["time"]
            self._mark = self._sample()
        elif message["event"] in debugger.EVENTS and self._gate is not None:
            self._gate.take(message, str(self._workspace.tree))
            self._state = self._gate.state or "waiting"
            self._link.beat_now()
        else:
            self._end = message
            self._state = "returned" if message["event"] == Exit.RETURNED else "running"
            for tee in self._tees:
                tee.drain()
            self._conclude()
            if self._stopping:
                self._kill_worker()

    def _on_death(self) -> None:
        if self._channel in self._selector.get_map():
            self._on_message()
        self._collect()
        processes.kill_descendants()
        for tee in self._tees:
            tee.drain()
        self._conclude()

    def _collect(self) -> None:
        """Reap the worker."""
        self._selector.unregister(self._pidfd)
        _, self._status, usage = os.wait4(self._pid, 0)
        self._worker_gone = True
        self._kill_at = None
        self._peak = usage.ru_maxrss * 1024

    def _on_supervisor_gone(self) -> None:
        self._selector.unregister(self._alive_fd)
        self._coordinator_lost("The supervisor of the job died.")

    def _on_events(self) -> None:
        for event in self._link.events():
            if event.view is not None:
                self._see(event.view)
            elif event.lost:
                self._coordinator_lost(event.lost)
            elif event.reported:
                self._delivered = True

    def _coordinator_lost(self, detail: str) -> None:
        """Nobody is there to report to: end the worker, leave the report in the store, go."""
        if not self._worker_gone:
            self._kill_worker()
            self._collect()
        if self._report is None:
            self._end = {"event": Exit.STOPPED, "detail": detail}
            self._conclude()
        self._finished = True

    def _see(self, view: HostView) -> None:
        self._view = view
        if view.ready:
            self._ready = True
            self._maybe_start()
        if view.stacks_request > self._stacks_asked:
            self._stacks_asked = view.stacks_request
            self._link.stacks(view.stacks_request, self._dump_stacks())
        if view.stop and not self._stopping:
            self._stop(view)
        if view.all_done and not self._all_done:
            self._all_done = True
            self._channel.send({"exit": True, "leave": True})
            self._kill_at = time.monotonic() + max(view.grace_s, 5.0)

    def _stop(self, view: HostView) -> None:
        self._stopping = True
        if self._worker_gone:
            return
        if self._end is not None or not self._started:
            self._kill_worker()  # It has nothing left to lose.
            return
        processes.kill(self._pid, signal.SIGTERM)
        grace_s = min(view.grace_s, STOPPED_GRACE_S) if view.stop_exit in (Exit.STOPPED, Exit.HANG) else view.grace_s
        self._kill_at = time.monotonic() + grace_s

    # -- doing ---------------------------------------------------------------------------------------------------------

    def _maybe_start(self) -> None:
        if not (self._armed and self._ready) or self._started or self._stopping or self._end is not None:
            return
        assert self._view is not None
        self._started = True
        self._channel.send({"start": self._start_message(self._view.addresses[0])})

    def _start_message(self, leader: str) -> dict[str, Any]:
        who, plan, space = self._who, self._plan, self._workspace
        world = World(leader, who.hosts, who.host, plan.topology.chips_per_host, plan.topology.kind, who.simulated)
        own = {
            "KINETIC_JOB_ID": who.job_id,
            "JOB_ID": who.job_id,
            "KINETIC_HOST_INDEX": str(who.host),
            "KINETIC_HOSTS": str(who.hosts),
            "KINETIC_ACCELERATOR": plan.topology.name,
            "KINETIC_ATTEMPT": str(who.attempt),
            "KINETIC_OUTPUT_DIR": space.output_dir,
        }
        debugging = debugger.ENVIRON if self._gate is not None else {}
        return {
            "places": list(space.data.places),
            "mounts": [asdict(mount) for mount in space.data.mounts],
            "payload": str(space.payload),
            "payload_digest": plan.payload.digest,
            "function": "" if space.function is None else str(space.function),
            "env": dict(who.base_env) | world.environ() | own | debugging | plan.env | dict(who.secrets),
            "cwd": str(space.cwd),
            "sys_path": list(space.sys_path),
            "scratch": str(space.root),
            "world": world.to_json(),
            "joins_jax": plan.joins_jax,
            "name": plan.name,
            "tree": str(space.tree),
            "client_root": plan.client_root,
            "cells": [vars(cell) for cell in plan.cells],
            "debugger": None if self._gate is None else self._gate.start_message(),
        }

    def _kill_worker(self) -> None:
        self._kill_at = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        processes.kill(self._pid, signal.SIGKILL)

    def _dump_stacks(self) -> str:
        """Ask the worker for its Python stacks; it writes them even while native code blocks."""
        if not self._armed or self._worker_gone:
            return ""
        before = os.fstat(self._stacks_fd).st_size
        processes.kill(self._pid, worker.STACKS_SIGNAL)
        size, deadline = before, time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            size, last = os.fstat(self._stacks_fd).st_size, size
            if size == last > before:
                break
        text = os.pread(self._stacks_fd, size - before, before).decode(errors="replace")
        if self._started and self._plan.client_root:  # Each host has a tree of its own; the caller's names are equal.
            text = text.replace(f"{self._workspace.tree}/", f"{self._plan.client_root}/")
        for cell in self._plan.cells:
            text = text.replace(f'"{cell.file}"', f'"{cell.title}"')
        self._stacks_text = "\n".join(line for line in text.splitlines() if not _OWN_FRAME.search(line))
        return self._stacks_text

    # -- telling -------------------------------------------------------------------------------------------------------

    def _sample(self) -> Sample:
        below = sum(map(processes.cpu_s, processes.descendants(self._pid)))
        return Sample(
            time.monotonic(), processes.cpu_s(self._pid) + below, processes.main_thread_cpu_ns(self._pid), self._log.size_bytes
        )

    def _beat(self) -> Beat:
        now = self._sample()
        if self._state != "running" or moved(self._mark, now):
            self._mark = now
        return Beat(
            host=self._who.host,
            state=self._state,
            stalled_s=now.time_s - self._mark.time_s,
            rss_bytes=processes.rss_bytes(self._pid),
            cpu_s=now.cpu_s,
            log_bytes=now.log_bytes,
            last_line=self._log.last_line(),
        )

    def _conclude(self) -> None:
        """Make the report, once, when the worker has said how it ended or is gone."""
        if self._report is not None:
            return
        status = self._status if self._worker_gone else None
        peak = self._peak if self._worker_gone else processes.high_water_bytes(self._pid)
        stop = self._view if self._stopping else None
        oom = processes.out_of_memory_kills() > self._oom_before
        report = ending_of(self._end, status, stop, self._who.host, peak_bytes=peak, oom_killed=oom)
        self._report = self._with_artifacts(report)
        if self._gate is not None:
            self._gate.close()
        data = self._report.to_json()
        with contextlib.suppress(KineticError):  # The coordinator gets it as well; one of the two is enough.
            import json

            self._store.put(paths.report(self._who.job_id, self._who.host), json.dumps(data).encode())
        self._link.report(self._report)

    def _with_artifacts(self, report: HostReport) -> HostReport:
        """Put the pickled value or exception into the store and complete the report with it and with what the agent knows."""
        from dataclasses import replace

        end = self._end or {}
        report = replace(
            report,
            attempt=self._who.attempt,
            started_at=self._started_at,
            ended_at=time.time(),
            lost_log_bytes=self._log.lost_bytes,
            stacks=self._stacks_text if report.exit is Exit.HANG else "",
        )
        try:
            if "result_file" in end and report.ok:
                self._store.put(paths.result(self._who.job_id), Path(end["result_file"]))
            if report.error is not None and "error_file" in end["error"]:
                key = paths.error(self._who.job_id, self._who.host)
                self._store.put(key, Path(end["error"]["error_file"]))
                report = replace(report, error=replace(report.error, key=key))
        except (KineticError, OSError) as error:
            if report.ok:
                return replace(
                    report, exit=Exit.RESULT_UNPICKLABLE, result_digest="", detail=f"The value could not be stored: {error}"
                )
        return report

    def _maybe_finish(self) -> None:
        if self._report is not None and self._delivered and self._worker_gone and (self._all_done or self._stopping):
            self._finished = True

    def _clean_up(self) -> None:
        if not self._worker_gone:
            self._kill_worker()
        processes.kill_descendants()
        for tee in self._tees:
            tee.drain()
        self._log.close()
        self._mountpoints.release(self._plan.data)
        workspace.remove(Path(self._who.scratch) / f"host-{self._who.host}")
        self._stacks_path.unlink(missing_ok=True)


def _widen(fd: int) -> None:
    """Give a pipe a large buffer, so that a burst of output does not stop the worker."""
    import fcntl

    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
