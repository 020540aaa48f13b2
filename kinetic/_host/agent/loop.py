"""The agent: the process on every host that starts the worker, logs its output, reports to the
coordinator, and ends the worker.

`AgentMachine` decides what to do; this module does it. The agent imports no JAX and runs no user
code, so that it survives to report how the worker died.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core import documents, layout, metrics
from kinetic._core.agent import Act, AgentMachine
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.gang.blame import RETURNED
from kinetic._core.gang.messages import Activity, Heartbeat, HostView
from kinetic._core.gang.programs import ProgramNote
from kinetic._core.outcome import HostReport, program_code
from kinetic._core.plan import Plan
from kinetic._host.agent import chip_logs, memory, workspace
from kinetic._host.agent.exit_report import Moment, ending_of
from kinetic._host.agent.link import Link
from kinetic._host.agent.log_writer import open_log, open_tees
from kinetic._host.agent.metric_file import MetricFile
from kinetic._host.agent.preemption import Preemption
from kinetic._host.agent.reporter import Reporter
from kinetic._host.agent.stall import Sample, StallDetector, measure_starvation
from kinetic._host.agent.start_message import WORLD_FILE, start_message
from kinetic._host.agent.worker_process import WorkerProcess
from kinetic._host.channel import Message, WorkerEvent
from kinetic._host.identity import ALONE_S, Identity
from kinetic._host.worker import joining
from kinetic._source.renewal import UnpackedTree
from kinetic._store.base import Store
from kinetic._system import processes
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._host.agent.packages import AddedPackages
    from kinetic._host.worker.debugger import Gate

_MAY_STALL = (Activity.STARTING, Activity.RUNNING, Activity.JOINING)
OPEN_LINE_S = 0.05
"""Age at which an unfinished line is written to the log."""


class Agent:
    """The agent of one host in one attempt, until it has cleaned up after its worker."""

    def __init__(
        self,
        identity: Identity,
        plan: Plan,
        store: Store,
        worker: WorkerProcess,
        *,
        logs: tuple[Path, Path],
        alive_fd: int = -1,
        tree: UnpackedTree | None = None,
        channel: Any = None,
        packages: AddedPackages | None = None,
    ) -> None:
        """Make the agent.

        Args:
            identity, plan, store: of the host and its job.
            worker: a worker that waits for its start message.
            logs: paths of the host's log and its index.
            alive_fd: reads end-of-file once the process that forked this one has died; -1 for none.
            tree: in a session, the source tree of the last call.
            channel: in a session, an open channel to the coordinator.
            packages: in a session, the packages that calls have added.
        """
        self._identity, self.tree, self._packages = identity, tree, packages
        self._keeps = identity.assignment is not None and identity.assignment.world > 0
        self._plan = plan
        self._store, self._worker = store, worker
        self._alive_fd, self._log_paths = alive_fd, logs
        self._selector = selectors.DefaultSelector()
        # The supervisor sees this process exit and reads the report from the store.
        self._alone = identity.hosts == 1 and alive_fd >= 0 and not identity.stays
        self._machine = AgentMachine(
            alone=self._alone,
            is_elastic=plan.elastic_gang is not None,
            is_led_from_afar=identity.is_led_from_afar,
            is_held=bool(identity.session),
            keeps_worker=self._keeps,
            keeps_interrupted=identity.hosts == 1,
        )
        self._preemption = Preemption(identity, plan.options.env)
        self._link = Link(identity, self._beat, channel)
        self._report: HostReport | None = None
        self._ending: Message | None = None
        self._end: Message | None = None
        self.imports: Message = {}
        """The modules that a plain call has imported, for `libraries.preload`; {} for none."""
        self._kept_files, self._written = 0, ""
        self._open_since: float | None = None
        self._stacks_asked, self._stacks_text = 0, ""
        self._started_at = self._began = 0.0
        """Start of the function, since the epoch and on the monotonic clock; 0.0 before it."""
        self._supervisor = os.getppid()
        self._leaving = Sample(0.0, 0.0, None, 0)
        self._gate: Gate | None = None
        if plan.options.debug:
            from kinetic._host.worker.debugger import Gate  # few jobs are debugged

            self._gate = Gate(identity, plan, store, port=identity.debug_port)

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the attempt has ended on this host; return a `ProgramCode`."""
        self._memory = memory.Watch(self._worker.pid)
        identity = self._identity
        key = layout.HostKeys(identity.job_id, identity.attempt, identity.host).log
        self._log = open_log(self._store, key, self._log_paths, mirrored=identity.is_mirrored)
        self._metrics = MetricFile(identity, self._store)
        quiet = identity.simulated and identity.hosts > 1
        self._tees = open_tees(self._worker.out, self._worker.err, self._log, without_gloo=quiet)
        self._reporter = Reporter(
            identity,
            self._plan,
            self._store,
            log=self._log,
            tees=self._tees,
            metrics=self._metrics,
        )
        self._reporter.announce_attempt()
        self._stall = StallDetector(Sample(time.monotonic(), 0.0, None, 0))
        self._link_at: float | None = time.monotonic() + ALONE_S if self._alone else None
        self._has_kept, self._worker.is_kept = self._worker.is_kept, False
        if self._has_kept:
            self._tell(self._machine.on_armed)
        self._watch()
        if not self._alone:
            self._link.start()
        self._prepare()
        self._ports, self._address = _reserve_ports(identity)
        self._link.join(self._address, lambda: self._began)
        self._tell(self._machine.on_prepared, failed=self._end is not None)
        try:
            while not self._machine.finished:
                self._step()
        finally:
            self._clean_up()
        if self._report is None or not self._machine.has_reported:
            return ProgramCode.UNDELIVERED
        return program_code(self._report)

    @property
    def nothing_follows(self) -> bool:
        """True if no attempt follows: every host has returned, or the leader is lost."""
        return self._machine.nothing_follows

    def _watch(self) -> None:
        handlers: list[tuple[Any, Callable[[], None]]] = [
            (self._worker.channel, self._on_message),
            (self._worker.pidfd, self._on_death),
            (self._link.wake_fd, self._on_events),
            *((tee.fd, lambda tee=tee: self._on_output(tee)) for tee in self._tees),
        ]
        if self._alive_fd >= 0:
            handlers.append((self._alive_fd, self._on_supervisor_gone))
            self._sigterm_fd = processes.waking_fd(signal.SIGTERM, self._on_early_sigterm)
            handlers.append((self._sigterm_fd, self._on_sigterm))
            if self._alone:
                processes.waking_fd(signal.SIGCONT, self._on_leader_listening)
        for fd, handler in handlers:
            self._selector.register(fd, selectors.EVENT_READ, handler)

    def _prepare(self) -> None:
        # Preparing may take long, and the loop that sees the supervisor's death does not run yet.
        parent = self._supervisor if self._alive_fd >= 0 else 0
        try:
            with processes.dying_with(parent):
                before, self.tree = self.tree, None
                self._workspace = workspace.prepare(
                    self._identity, self._plan, self._store, before, is_kept=self._has_kept
                )
                if self._identity.session and self._packages is not None:
                    self._add_packages(self._packages)
        except (KineticError, OSError, ValueError) as error:
            self._end = {"event": Exit.SETUP_FAILED, "detail": str(error)}

    def _add_packages(self, packages: AddedPackages) -> None:
        """Install what a call requires and its session lacks, and let the call import it."""
        if added := packages.add(self._plan, self._store):
            self._log.say(f"kinetic: installed for this session: {added}")
        if packages.folder.exists():
            editable = (*self._workspace.editable, str(packages.folder))
            self._workspace = replace(self._workspace, editable=editable)

    def _step(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            if key.fileobj in self._selector.get_map():
                key.data()
        now = time.monotonic()
        if self._open_since is not None and now - self._open_since >= OPEN_LINE_S:
            for tee in self._tees:
                tee.flush()
            self._open_since = None
        kill_at = self._machine.kill_at
        if self._machine.all_done and kill_at is not None and now >= kill_at:
            before, self._leaving = self._leaving, self._sample()
            self._machine.kill_at = kill_at + measure_starvation(before, self._leaving)
        self._tell(self._machine.tick, now)
        if self._link_at is not None and now >= self._link_at:
            self._link_at = None
            self._link.start()
        if self._gate is not None and self._gate.opens():
            self._worker.channel.send({"go": True})
        self._machine.settle()

    def _timeout_s(self) -> float:
        show_at = None if self._open_since is None else self._open_since + OPEN_LINE_S
        dues = [due for due in (show_at, self._machine.kill_at, self._link_at) if due is not None]
        waits = [1.0, *(due - time.monotonic() for due in dues)]
        if self._gate is not None and self._gate.holds:
            waits.append(self._gate.poll_s)
        return max(min(waits), 0.0)

    # -- events ------------------------------------------------------------------------------------

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
            self._handle(message)

    def _handle(self, message: Message) -> None:
        event = message["event"]
        if event == WorkerEvent.ARMED:
            self._tell(self._machine.on_armed)
        elif event == WorkerEvent.STARTED:
            self._machine.on_called()
            self._started_at, self._began = message["time"], message["monotonic"]
            self._stall = StallDetector(self._sample())
            self._reporter.announce_recovery(self._began)
        elif event == WorkerEvent.ENDING:
            self._ending = message
        elif event == WorkerEvent.IDLE:
            self._worker.is_kept = True
            for tee in self._tees:
                tee.drain()
            self._reporter.name_leftovers(self._worker.keep, (self._worker.pid,))
            self._machine.note_kept()
        elif event == WorkerEvent.PROGRAM:
            note = documents.from_document(ProgramNote, message["program"], "A worker's program")
            self._link.tell_program(note)
        elif event == WorkerEvent.STANDS_BY:
            self._worker.stacks_thread = message["thread"]
        elif self._gate is not None and self._gate.accepts(message):
            self._gate.take(message, str(self._workspace.tree))
            self._machine.activity = self._gate.activity
            self._link.beat_now()
        else:
            self._end, self.imports = message, message.pop("imports", {})
            for tee in self._tees:
                tee.drain()
            self._tell(self._machine.on_end, returned=event == Exit.RETURNED)
            self._tell(self._machine.on_concluded, time.monotonic())

    def _on_death(self) -> None:
        if self._worker.channel in self._selector.get_map():
            self._on_message()
        self._selector.unregister(self._worker.pidfd)
        if self._end is None:
            self._memory.read_group()
        self._worker.reap()
        # Not in a debug job (with a gate): debugpy always leaves its adapter process running.
        if self._end is not None and not self._machine.stopping and self._gate is None:
            self._reporter.name_leftovers(self._worker.keep)
        processes.kill_descendants(trees=self._worker.keep)
        for tee in self._tees:
            tee.drain()
        self._tell(self._machine.on_death, has_end=self._end is not None)

    def _on_early_sigterm(self) -> None:
        if self._machine.activity is Activity.PREPARING:  # The loop does not run yet.
            self._on_taken_away()

    def _on_sigterm(self) -> None:
        if not self._machine.may_be_taken_away():  # Leave it pending for the next attempt, if any.
            self._selector.unregister(self._sigterm_fd)
            return
        if signal.SIGTERM in os.read(self._sigterm_fd, 64):
            self._on_taken_away()

    def _on_leader_listening(self) -> None:
        """Connect before the usual delay, because the leader may have to stop this host."""
        self._link_at = 0.0
        if self._machine.activity is Activity.PREPARING:  # The loop does not run yet.
            self._link.start()

    def _on_taken_away(self) -> None:
        """Begin the preemption of this host, and tell the gang."""
        if self._machine.may_be_taken_away():
            grace_s = self._plan.limits.grace_s
            self._preemption.begin(grace_s, ours=True)
            self._tell(self._machine.on_taken_away, grace_s, time.monotonic())

    def _on_supervisor_gone(self) -> None:
        self._selector.unregister(self._alive_fd)
        if not self._identity.is_program:
            of = "session" if self._identity.session else "job"
            self._on_coordinator_lost(f"The {of}'s supervisor was killed.")
        elif self._identity.leads:
            self._end_with(Exit.AGENT_LOST, "Its program, which led the gang, was killed.")
            self._tell(self._machine.on_lost, is_final=False)
        else:
            self._end_with(Exit.AGENT_LOST, "Its program was killed.")
            self._tell(self._machine.on_program_gone, time.monotonic())

    def _on_events(self) -> None:
        for event in self._link.events():
            if event.view is not None:
                self._on_view(event.view)
            elif event.lost:
                self._on_coordinator_lost(f"{event.lost} This host's agent gave up.")
                # Clients would wait forever for a supervisor that lives but does not answer.
                leads = not self._identity.is_program or self._identity.leads
                if self._alive_fd >= 0 and leads and os.getppid() == self._supervisor:
                    processes.kill(self._supervisor, signal.SIGKILL)
            elif event.reported:
                self._machine.note_delivery()

    def _on_coordinator_lost(self, detail: str) -> None:
        self._end_with(Exit.STOPPED, detail)
        self._tell(self._machine.on_lost, is_final=not self._identity.is_led_from_afar)

    def _end_with(self, how: Exit, detail: str) -> None:
        """Set the end that will be reported, unless the report exists already."""
        if self._report is None:
            self._end = {"event": how, "detail": detail}

    def _on_view(self, view: HostView) -> None:
        before = self._machine.view
        if view.notice and view.notice != (before and before.notice):
            self._reporter.notice(view.notice)
        if view.ready:
            self._tell(self._machine.on_ready, view)
        if view.stacks_request > self._stacks_asked:
            self._stacks_asked = view.stacks_request
            self._link.stacks(view.stacks_request, self._dump_stacks())
        if view.preempted and self._preemption.begin(view.grace_s):
            why = view.stop_reason if view.stop_exit is Exit.OVER_BUDGET else ""
            self._reporter.tell_of_preemption(self._preemption.left_s, why)
        self._tell(self._machine.on_view, view, time.monotonic())

    # -- acts --------------------------------------------------------------------------------------

    def _tell(self, event: Callable[..., list[Act]], *args: Any, **more: Any) -> None:
        """Call this method of the state machine, and do the acts that it returns."""
        self._machine.note_eviction(self._preemption.describe())
        for act in event(*args, **more):
            self._do(act)

    def _do(self, act: Act) -> None:
        worker, reporter = self._worker, self._reporter
        acts: dict[Act, Callable[[], object]] = {
            Act.START: self._start,
            Act.CONCLUDE: self._conclude,
            Act.ANNOUNCE: lambda: self._link.announce(self._exit_report()),
            Act.TERMINATE: worker.terminate,
            Act.KILL: worker.kill,
            Act.REAP: self._reap,
            Act.EXIT: lambda: worker.channel.send({"exit": True, "leave": True}),
            Act.KEEP: lambda: worker.channel.send(
                {"keep": True, "has_failed": not self._machine.all_done}
            ),
            Act.RUN_EXIT_HANDLERS: lambda: worker.channel.send({"exit": True}),
            Act.REQUEST_REFORM: lambda: workspace.request_reform(self._workspace),
            Act.SAY_LATE: lambda: reporter.tell_of_late_exit(worker.stacks()),
        }
        if act in (Act.EXIT, Act.RUN_EXIT_HANDLERS):
            self._leaving = self._sample()
        acts[act]()

    def _reap(self) -> None:
        if not self._worker.has_ended:
            self._worker.kill()
            self._worker.reap()
            self._selector.unregister(self._worker.pidfd)
        self._machine.note_reaped()

    def _start(self) -> None:
        self._stall = StallDetector(self._sample())
        debugging = None if self._gate is None else self._gate.start_message()
        view = self._machine.view
        leader = view.addresses[0] if view is not None and view.ready else self._address
        if self._keeps:  # The world of JAX lives as long as its processes.
            leader = self._worker.leader = self._worker.leader or leader
        message = start_message(self._identity, self._plan, self._workspace, leader, debugging)
        message["env"][metrics.VARIABLE] = str(self._metrics.path)
        if self._identity.session and not self._keeps and self._packages is not None:
            message["packages"] = str(self._packages.folder)
        self._worker.channel.send({"start": message})

    def _dump_stacks(self) -> str:
        """Return the worker's stacks with the client's file names, so that equal stacks of
        different hosts compare equal."""
        if self._machine.activity is Activity.RETURNED:
            return RETURNED
        can_tell = self._machine.armed or processes.is_stopped(self._worker.pid)
        text = self._worker.stacks() if can_tell else ""
        tree = self._workspace.tree if self._machine.started else None
        self._stacks_text = workspace.as_client_names(text, tree, self._plan)
        return self._stacks_text

    # -- reporting ---------------------------------------------------------------------------------

    def _beat(self) -> Heartbeat:
        now, state = self._sample(), self._machine.activity
        if state is Activity.RUNNING and self._join_state() == joining.JOINING:
            state = Activity.JOINING
        may_stall = self._machine.started and state in _MAY_STALL
        self._memory.read_group()
        beat = Heartbeat(
            host=self._identity.host,
            state=state,
            stalled_s=self._stall.observe(now) if may_stall else 0.0,
            rss_bytes=self._worker.rss_bytes,
            cpu_s=now.cpu_s,
            log_bytes=now.log_bytes,
            last_line=self._log.last_line(),
            saving_step=now.saving_step,
        )
        self._metrics.note(beat)
        return beat

    def _sample(self) -> Sample:
        saving_step = workspace.read_saving_step(self._preemption.folder)
        return self._worker.sample(self._log.output_bytes, self._metrics.row_bytes, saving_step)

    def _join_state(self) -> str:
        """Return this host's progress in joining the JAX world; see `joining.join_state`."""
        if not self._machine.started:
            return ""
        return joining.join_state(str(self._workspace.root / WORLD_FILE))

    def _conclude(self) -> None:
        """Make, store and deliver the report, once: after the worker's last message or death."""
        if self._report is not None:
            return
        # In a preemption the report is urgent: `_clean_up` keeps the files.
        if self._started_at > 0 and not self._preemption.is_known:
            self._kept_files, self._written = self._reporter.keep_files(self._workspace)
        report = self._exit_report()
        if not report.ok and not self._preemption.is_known:
            self._keep_chip_logs()
        self._report, stored = self._reporter.conclude(
            report, self._end or {}, is_discarded=self._preemption.discards_end
        )
        # The supervisor reads the report of an only host from the store: no delivery needed.
        self._machine.note_report(self._report, arrives=self._alone and stored)
        if self._gate is not None:
            self._gate.close()
        self._link.report(self._report)

    def _keep_chip_logs(self) -> None:
        """Store the logs of TPU chips. A simulated host has such logs only if the user's variables
        name a folder of them."""
        identity = self._identity
        folder = self._plan.options.env.get(chip_logs.VARIABLE, "")
        if not identity.simulated:
            folder = folder or identity.base_env.get(chip_logs.VARIABLE, chip_logs.FOLDER)
        if folder:
            key = layout.HostKeys(identity.job_id, identity.attempt, identity.host).chip_logs
            chip_logs.store_chip_logs(
                self._store, key, folder, since=self._started_at, hosts=identity.hosts
            )

    def _exit_report(self) -> HostReport:
        """Return the report on the worker's end, completed with the agent's own figures."""
        now = time.monotonic()
        report = ending_of(
            None if self._preemption.discards_end else self._end,
            self._worker.status if self._worker.has_ended else None,
            self._preemption.overriding_stop(
                self._machine.view if self._machine.stopping else None
            ),
            self._identity.host,
            peak_bytes=self._worker.peak_bytes,
            memory=memory.MemoryVerdict() if self._end else self._memory.verdict(),
            moment=Moment(started=self._started_at > 0, ending=self._ending),
        )
        return replace(
            report,
            started_at=self._started_at,
            ended_at=self._started_at + now - self._began if self._began else time.time(),
            lost_log_bytes=self._log.lost_bytes,
            stacks=self._stacks_text if report.exit is Exit.HANG else "",
            joined_jax=self._join_state() == joining.JOINED,
            kept_files=self._kept_files,
            written=self._written,
        )

    def _clean_up(self) -> None:
        keep = (self._worker.pid,) if self._worker.is_kept else ()
        if not self._worker.is_kept:
            self._worker.kill()
        processes.kill_descendants(keep=keep, trees=self._worker.keep)
        for tee in self._tees:
            tee.drain()
        self._log.close()
        self._metrics.close()
        if self._started_at > 0 and (
            self._written or self._preemption.is_known or workspace.has_new_entries(self._workspace)
        ):
            self._reporter.keep_files(self._workspace)  # With the files of exit handlers.
        if self._machine.activity is not Activity.PREPARING and self._identity.session:
            self.tree = workspace.clear(self._workspace)
        if self.tree is None and not self._is_swept_up():
            workspace.remove(Path(self._identity.scratch) / f"host-{self._identity.index}")

    def _is_swept_up(self) -> bool:
        """True if the supervisor will remove this host's folder. It does so after it has written
        the verdict, which must not wait for the removal."""
        is_last = not self._identity.stays and self._plan.options.retries == 0
        return self._identity.simulated and is_last and os.getppid() == self._supervisor

    def release(self) -> None:
        """Free the link and descriptors of this attempt: the process goes on with another one."""
        self._link.stop()
        self._selector.close()
        if self._worker.is_kept and not self._worker.ports:
            self._worker.ports = self._ports  # Of the address of its world of JAX.
            return
        for port in self._ports:
            port.close()


def _reserve_ports(identity: Identity) -> tuple[list[socket.socket], str]:
    """Return the reserved sockets and the address of this host for its peers. The leader reserves a
    port for JAX and one for other frameworks, and its address names both.

    The sockets stay bound without listening until the end: frameworks bind the same port with
    SO_REUSEPORT or SO_REUSEADDR, and the kernel gives it to no other process.
    """
    if identity.host != 0:
        return [], identity.address
    ports = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(2)]
    for port in ports:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            port.setsockopt(socket.SOL_SOCKET, option, 1)
        port.bind((identity.address if identity.simulated else "", 0))
    numbers = ",".join(str(port.getsockname()[1]) for port in ports)
    return ports, f"{identity.address}:{numbers}"
