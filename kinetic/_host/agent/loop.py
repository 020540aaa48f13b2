"""The agent: the process on every host that starts the worker, keeps its output, tells the
coordinator, and ends it.

In: an `Identity`, the plan in the store. Out: one `HostReport`, the leader's value, the host's log.
It starts no JAX and runs no code of the user, so it is alive to say how the worker died.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.gang.blame import RETURNED
from kinetic._core.gang.machine import Activity, Heartbeat, HostView
from kinetic._core.log_format import FAILURE, STDERR
from kinetic._core.outcome import HostReport
from kinetic._core.plan import Plan
from kinetic._host.agent import datasets, memory, workspace
from kinetic._host.agent.briefing import WORLD_FILE, start_message
from kinetic._host.agent.exit_report import Moment, ending_of, last_words
from kinetic._host.agent.identity import Identity
from kinetic._host.agent.link import Link
from kinetic._host.agent.log_writer import open_log, tees
from kinetic._host.agent.mountpoints import Mountpoints
from kinetic._host.agent.stall import Stillness
from kinetic._host.agent.worker_process import Child
from kinetic._host.channel import Message, WorkerEvent
from kinetic._host.worker import debugger, joining
from kinetic._host.worker.main import LAST_WORD
from kinetic._store import files
from kinetic._store.base import Store
from kinetic._system import processes
from kinetic.errors import KineticError, StoreFull

OPEN_LINE_S = 0.05
"""After this time without its end, the beginning of a line is shown."""
ALONE_S = 0.2
"""For so long the only host of a simulated slice runs before it speaks with the coordinator: it has
nobody to wait for, and a small job is over before the two could, also on a busy machine."""
LEFTOVER_GRACE_S = 0.2
"""How long processes that the function left behind may take to end by themselves, once the worker
is gone."""
LEFTOVERS_NAMED = 5
RESERVE_BYTES = 1 << 18
"""Kept on disk so that a small value, an exception and the report can be stored when the function
has filled the disk."""
STOPPED_GRACE_S = 1.0
"""A host stopped because of another one gets this long at most: it is often stuck in native code
and cannot react."""


class Agent:
    """One host's agent, from the fork of its worker to the last cleaning up."""

    def __init__(
        self,
        identity: Identity,
        plan: Plan,
        store: Store,
        logs: tuple[Path, Path],
        alive_fd: int = -1,
    ) -> None:
        self._who = identity
        self._plan = plan
        self._store = store
        self._alive_fd = alive_fd
        self._log_paths = logs
        self._mountpoints = Mountpoints(datasets.root(identity, store))
        self._selector = selectors.DefaultSelector()
        # The supervisor sees its end, and finds the report in the store.
        self._alone = identity.hosts == 1 and alive_fd >= 0
        self._ready = self._alone
        self._armed = self._started = self._stopping = self._kept = self._delivered = (
            self._all_done
        ) = False
        self._link_at: float | None = None
        self._state = Activity.PREPARING
        self._report: HostReport | None = None
        self._ending: Message | None = None
        self._end: Message | None = None
        self._kill_at: float | None = None
        self._open_since: float | None = None
        self._stacks_asked = 0
        self._stacks_text = ""
        self._started_at = 0.0
        self._supervisor = os.getppid()
        self._view: HostView | None = None
        self._finished = False
        self._gate = (
            debugger.Gate(identity, plan, store, port=identity.debug_port)
            if plan.options.debug
            else None
        )

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Do everything; return the exit code of the agent process (0: the report was
        delivered)."""
        os.setpgid(0, 0)
        processes.adopt_orphans()
        name = f"{self._who.job_id} host {self._who.host}"
        stacks = Path(self._who.scratch) / f"stacks-{self._who.host}"
        # Before the first thread of this process: a fork would copy locks that threads hold.
        self._worker = Child(f"kinetic-worker {name}", stacks)
        self._reserve = processes.reserve_disk(
            Path(self._who.scratch) / f"reserve-{self._who.host}", RESERVE_BYTES
        )
        self._memory = memory.Watch(self._worker.pid)
        key = layout.log(self._who.job_id, self._who.attempt, self._who.host)
        self._log = open_log(self._store, key, self._log_paths)
        self._announce_attempt()
        self._tees = tees(
            self._worker.out,
            self._worker.err,
            self._log,
            without_gloo=self._who.simulated and self._who.hosts > 1,
        )
        self._stillness = Stillness(self._worker.sample(self._log.output_bytes))
        self._link = Link(self._who, self._beat)
        self._watch()
        if self._alone:
            self._link_at = time.monotonic() + ALONE_S
        else:
            self._link.start()
        self._prepare()
        self._address = self._reserve_ports()
        self._link.join(self._address)
        if self._end is not None:
            self._conclude()
        try:
            while not self._finished:
                self._turn()
        finally:
            self._clean_up()
        return 0 if self._is_told() else 1

    def _announce_attempt(self) -> None:
        """Let the log say where another attempt begins, and why."""
        number, attempts = self._who.attempt, self._plan.options.retries + 1
        if number > 1:
            why = f": {lines[0]}" if (lines := self._who.failed_before.splitlines()) else "."
            self._log.say(
                f"kinetic: attempt {number - 1} of {attempts} failed{why}\n"
                f"kinetic: attempt {number} of {attempts} begins."
            )

    def _watch(self) -> None:
        ways: list[tuple[Any, Callable[[], None]]] = [
            (self._worker.channel, self._on_message),
            (self._worker.pidfd, self._on_death),
            (self._link.wake_fd, self._on_events),
            *((tee.fd, lambda tee=tee: self._on_output(tee)) for tee in self._tees),
        ]
        if self._alive_fd >= 0:
            ways.append((self._alive_fd, self._on_supervisor_gone))
        for fd, act in ways:
            self._selector.register(fd, selectors.EVENT_READ, act)

    def _prepare(self) -> None:
        try:
            # It may take long, and nobody listens.
            with processes.dying_with(self._supervisor if self._alive_fd >= 0 else 0):
                self._workspace = workspace.prepare(self._who, self._plan, self._store)
            self._mountpoints.keep(self._plan.data)
            self._state = Activity.STARTING if self._ready else Activity.WAITING
        except (KineticError, OSError, ValueError) as error:
            self._end = {"event": Exit.SETUP_FAILED, "detail": str(error)}

    def _reserve_ports(self) -> str:
        """How the other hosts reach this one; the leader also reserves a port for JAX, and one for
        other frameworks.

        They are held without listening until the end: what asks for one, with SO_REUSEPORT or
        SO_REUSEADDR, can bind it, and nothing is given it meanwhile.
        """
        if self._who.host != 0:
            return self._who.address
        self._ports = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2)]
        for held in self._ports:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                held.setsockopt(socket.SOL_SOCKET, option, 1)
            held.bind((self._who.address if self._who.simulated else "", 0))
        ports = ",".join(str(held.getsockname()[1]) for held in self._ports)
        return f"{self._who.address}:{ports}"

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
            self._kill_at = None
            if self._all_done:
                self._log.say(
                    "kinetic: the process went on for too long after the function (an exit "
                    "handler?) and was killed."
                )
            self._worker.kill()
        if self._link_at is not None and now >= self._link_at:
            self._link_at = None
            self._link.start()
        if self._gate is not None and self._gate.opens():
            self._worker.channel.send({"go": True})
        self._maybe_finish()

    def _patience(self) -> float:
        waits = [1.0]
        if self._open_since is not None:
            waits.append(self._open_since + OPEN_LINE_S - time.monotonic())
        if self._kill_at is not None:
            waits.append(self._kill_at - time.monotonic())
        if self._link_at is not None:
            waits.append(self._link_at - time.monotonic())
        if self._gate is not None and self._gate.holds:
            waits.append(debugger.LOOK_EVERY_S)
        return max(min(waits), 0.0)

    # -- what can happen ---------------------------------------------------------------------------

    def _on_output(self, tee: Any) -> None:
        if not tee.pump():
            self._selector.unregister(tee.fd)
        if tee.has_open_line:
            self._open_since = self._open_since or time.monotonic()
        elif not any(t.has_open_line for t in self._tees):
            self._open_since = None

    def _on_message(self) -> None:
        messages, is_open = self._worker.channel.available()
        if not is_open:
            self._selector.unregister(self._worker.channel)
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message["event"] == WorkerEvent.ARMED:
            self._armed = True
            self._maybe_start()
        elif message["event"] == WorkerEvent.STARTED:
            self._state, self._started_at = Activity.RUNNING, message["time"]
            self._stillness = Stillness(self._worker.sample(self._log.output_bytes))
        elif message["event"] == WorkerEvent.ENDING:
            self._ending = message
        elif message["event"] == WorkerEvent.STANDS_BY:
            self._worker.stacks_thread = message["thread"]
        elif message["event"] in debugger.EVENTS and self._gate is not None:
            self._gate.take(message, str(self._workspace.tree))
            self._state = self._gate.activity
            self._link.beat_now()
        else:
            self._end = message
            returned = message["event"] == Exit.RETURNED
            self._state = Activity.RETURNED if returned else Activity.RUNNING
            for tee in self._tees:
                tee.drain()
            self._conclude()
            if self._stopping:
                self._worker.kill()
            elif self._alone and self._kept:
                self._dismiss(0.0)

    def _on_death(self) -> None:
        if self._worker.channel in self._selector.get_map():
            self._on_message()
        self._selector.unregister(self._worker.pidfd)
        self._memory.look()
        self._worker.reap()
        self._kill_at = None
        self._end = self._end or self._last_word()
        # A debugger leaves a process of its own.
        if self._end is not None and not self._stopping and self._gate is None:
            self._name_leftovers()
        processes.kill_descendants()
        for tee in self._tees:
            tee.drain()
        self._conclude()

    def _last_word(self) -> Message | None:
        """How the function ended, from a worker that it had cut off."""
        # AttributeError: there is no workspace yet.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            message: Message = json.loads(files.content(self._workspace.root / LAST_WORD))
            return message
        return None

    def _name_leftovers(self) -> None:
        """Say in the log which processes the function left behind; those that end by themselves in
        time are not named."""
        pids = processes.await_leaving(LEFTOVER_GRACE_S)
        left = [
            f"{processes.name(pid).replace('kinetic-worker', 'fork of the function')} ({pid})"
            for pid in pids
        ]
        if left:
            shown = ", ".join(left[:LEFTOVERS_NAMED]) + (
                " and others" if len(left) > LEFTOVERS_NAMED else ""
            )
            for tee in self._tees:
                tee.drain()
            self._log.say(
                f"kinetic: still running after the function ended, and killed: processes {shown}"
            )

    def _name_files(self) -> None:
        """Say in the log which files the function wrote where they will not be kept."""
        if self._started_at > 0 and (words := workspace.left_behind(self._workspace)):
            self._log.say(f"kinetic: {words}")

    def _on_supervisor_gone(self) -> None:
        self._selector.unregister(self._alive_fd)
        if not self._who.is_program:
            self._coordinator_lost("The job's supervisor was killed.")
        elif self._who.host == 0:
            self._give_up(Exit.AGENT_LOST, "Its program, which led the gang, was killed.")
            self._finished = True
        else:
            self._give_up(Exit.AGENT_LOST, "Its program was killed.")
            self._stopping = True  # It ends when the leader knows.

    def _on_events(self) -> None:
        for event in self._link.events():
            if event.view is not None:
                self._see(event.view)
            elif event.lost:
                self._coordinator_lost(f"{event.lost} This host's agent gave up.")
                self._end_supervisor()
            elif event.reported:
                self._delivered = True

    def _coordinator_lost(self, detail: str) -> None:
        """Nobody is there to report to: end the worker, leave the report in the store, go."""
        self._give_up(Exit.STOPPED, detail)
        self._finished = True

    def _give_up(self, how: Exit, detail: str) -> None:
        """End the worker, and report this where it has not reported."""
        if not self._worker.gone:
            self._worker.kill()
            self._worker.reap()
            self._selector.unregister(self._worker.pidfd)
        if self._report is None:
            self._end = {"event": how, "detail": detail}
            self._conclude()

    def _end_supervisor(self) -> None:
        """On this machine: a supervisor that is there and does not answer would keep the job's
        callers waiting forever."""
        leads = not self._who.is_program or self._who.host == 0
        if self._alive_fd >= 0 and leads and os.getppid() == self._supervisor:
            processes.kill(self._supervisor, signal.SIGKILL)

    def _see(self, view: HostView) -> None:
        if view.notice and not (self._view and self._view.notice):
            self._say_notice(view.notice)
        self._view = view
        if view.ready:
            if not self._ready and self._state is Activity.WAITING:
                self._state = Activity.STARTING
            self._ready = True
            self._maybe_start()
        if view.stacks_request > self._stacks_asked:
            self._stacks_asked = view.stacks_request
            self._link.stacks(view.stacks_request, self._dump_stacks())
        if view.stop and not self._stopping and not self._all_done:
            self._stop(view)
        if view.all_done and not self._all_done:
            self._dismiss(view.grace_s)

    def _say_notice(self, notice: str) -> None:
        """Put the coordinator's line into the output that callers see."""
        if self._who.host != 0:
            return
        advice = (
            ""
            if self._plan.limits.hang_timeout_s is not None
            else "; hang_timeout= ends a job that stands still"
        )
        self._log.say(
            f"kinetic: {notice} `kinetic jobs stacks {self._who.job_id}` shows where they "
            f"stand{advice}."
        )

    def _dismiss(self, grace_s: float) -> None:
        """Nobody needs the worker any more: let it end as a script ends."""
        self._all_done = True
        self._worker.channel.send({"exit": True, "leave": True})
        self._kill_at = time.monotonic() + max(grace_s, 5.0)

    def _stop(self, view: HostView) -> None:
        self._stopping = True
        if self._worker.gone:
            return
        if self._end is not None or self._state is not Activity.RUNNING:
            self._worker.kill()  # The function has not begun or has ended: it has nothing to lose.
            return
        self._worker.terminate()
        grace_s = (
            min(view.grace_s, STOPPED_GRACE_S)
            if view.stop_exit in (Exit.STOPPED, Exit.HANG)
            else view.grace_s
        )
        self._kill_at = time.monotonic() + grace_s

    # -- doing -------------------------------------------------------------------------------------

    def _maybe_start(self) -> None:
        if (
            not (self._armed and self._ready)
            or self._started
            or self._stopping
            or self._end is not None
        ):
            return
        self._started = True
        debugging = None if self._gate is None else self._gate.start_message()
        leader = (
            self._view.addresses[0]
            if self._view is not None and self._view.ready
            else self._address
        )
        self._worker.channel.send(
            {"start": start_message(self._who, self._plan, self._workspace, leader, debugging)}
        )

    def _dump_stacks(self) -> str:
        """The worker's stacks, with files named as the caller knows them, so that equal stacks of
        all hosts are equal."""
        if self._state is Activity.RETURNED:
            return RETURNED
        text = (
            self._worker.stacks() if self._armed or processes.is_stopped(self._worker.pid) else ""
        )
        if self._started and self._plan.client_root:
            text = text.replace(f"{self._workspace.tree}/", f"{self._plan.client_root}/")
        for cell in self._plan.cells:
            text = text.replace(f'"{cell.file}"', f'"{cell.title}"')
        self._stacks_text = text
        return text

    # -- telling -----------------------------------------------------------------------------------

    def _beat(self) -> Heartbeat:
        now = self._worker.sample(self._log.output_bytes)
        self._memory.look()
        return Heartbeat(
            host=self._who.host,
            state=(state := self._state_now()),
            stalled_s=self._stillness.lasts(now) if state is Activity.RUNNING else 0.0,
            rss_bytes=self._worker.rss_bytes,
            cpu_s=now.cpu_s,
            log_bytes=now.log_bytes,
            last_line=self._log.last_line(),
        )

    def _state_now(self) -> Activity:
        return (
            Activity.JOINING
            if self._state is Activity.RUNNING and self._standing() == joining.JOINING
            else self._state
        )

    def _standing(self) -> str:
        """How far JAX is on this host."""
        return joining.standing(str(self._workspace.root / WORLD_FILE)) if self._started else ""

    def _conclude(self) -> None:
        """Make the report, once, when the worker has said how it ended or is gone."""
        if self._report is not None:
            return
        self._name_files()
        status, peak = (self._worker.status if self._worker.gone else None), self._worker.peak_bytes
        stop = self._view if self._stopping else None
        moment = Moment(started=self._started_at > 0, ending=self._ending)
        report = ending_of(
            self._end,
            status,
            stop,
            self._who.host,
            peak_bytes=peak,
            memory=self._memory.verdict(),
            moment=moment,
        )
        self._report = self._with_artifacts(report)
        self._log_failure(self._report)
        self._log.deliver()  # Whoever sees the report will look for the output.
        if self._gate is not None:
            self._gate.close()
        data = self._report.to_json()
        # The coordinator gets it as well; one of the two is enough.
        with contextlib.suppress(KineticError):
            self._store_put(
                layout.report(self._who.job_id, self._who.attempt, self._who.host),
                json.dumps(data).encode(),
            )
            self._kept = True
        self._link.report(self._report)
        if damaged := (self._end or {}).get("damaged"):
            # What is there is not sent again: the next submission must find it absent.
            with contextlib.suppress(KineticError):
                self._store.delete(layout.blob(damaged))

    def _log_failure(self, report: HostReport) -> None:
        """Let the host's log end as the log of any program that fails."""
        # Nobody raises the failure of an attempt that is repeated, so everybody sees it, and the
        # next attempt says why it begins.
        is_last = self._who.attempt > self._plan.options.retries or not report.exit.kind.retryable
        words = last_words(report)
        if not words or (report.exit is Exit.STOPPED and not is_last):
            return
        for tee in self._tees:
            tee.drain()
        self._log.say(words, FAILURE if is_last else STDERR)

    def _with_artifacts(self, report: HostReport) -> HostReport:
        """Put the pickled value or exception into the store and complete the report with it and
        with what the agent knows."""
        end = self._end or {}
        report = replace(
            report,
            started_at=self._started_at,
            ended_at=time.time(),
            lost_log_bytes=self._log.lost_bytes,
            stacks=self._stacks_text if report.exit is Exit.HANG else "",
            joined_jax=self._standing() == joining.JOINED,
        )
        where = self._who.job_id, self._who.attempt, self._who.host
        try:
            if report.ok:
                self._put(layout.result(*where), end, "result")
            elif report.error is not None:
                key = layout.error(*where)
                if self._put(key, end["error"], "error"):
                    report = replace(report, error=replace(report.error, key=key))
        except (KineticError, OSError) as error:
            if report.ok:
                return replace(
                    report,
                    exit=Exit.RESULT_UNPICKLABLE,
                    result_digest="",
                    detail=f"The value could not be stored: {error}",
                )
        return report

    def _put(self, key: str, told: Message, name: str) -> bool:
        """Store the pickle that the worker sent in its message, or left in a file; return whether
        there was one."""
        if f"{name}_data" in told:
            data: bytes | Path = base64.b64decode(told[f"{name}_data"])
        elif f"{name}_file" in told:
            data = Path(told[f"{name}_file"])
        else:
            return False
        self._store_put(key, data)
        return True

    def _store_put(self, key: str, data: bytes | Path) -> None:
        """Store; on a full disk with the help of what was reserved there."""
        try:
            self._store.put(key, data)
        except StoreFull:
            self._reserve.unlink(missing_ok=True)
            self._store.put(key, data)

    def _is_told(self) -> bool:
        """Whether the supervisor knows the report, or will find it."""
        return self._delivered or (self._alone and self._kept)

    def _maybe_finish(self) -> None:
        if self._report is not None and self._is_told() and self._worker.gone:
            self._finished = self._alone or self._all_done or self._stopping

    def _clean_up(self) -> None:
        self._worker.kill()
        processes.kill_descendants()
        for tee in self._tees:
            tee.drain()
        self._log.close()
        self._reserve.unlink(missing_ok=True)
        self._mountpoints.release(self._plan.data)
        workspace.remove(Path(self._who.scratch) / f"host-{self._who.host}")
        self._worker.close()
