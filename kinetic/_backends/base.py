"""The protocol of backends, which run jobs, and of their optional features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass

if TYPE_CHECKING:
    from kinetic._core.endpoint import Endpoint
    from kinetic._core.exits import Exit
    from kinetic._core.log_format import LogChunk, Position
    from kinetic._core.outcome import HostReport
    from kinetic._core.plan import Plan

Document = dict[str, Any]


@dataclass(frozen=True)
class HostStatus:
    """The status of one host. `exit` is set only if the phase does not say how the host ended."""

    host: int
    phase: JobStatus
    reason: str = ""
    exit: Exit | None = None

    def as_report(self) -> HostReport:
        """Return a report in place of the one that a lost host could not write."""
        from kinetic._core.exits import Exit  # not needed for lists of jobs
        from kinetic._core.outcome import HostReport

        never = self.phase is JobStatus.PENDING
        exit = self.exit or (Exit.NEVER_JOINED if never else Exit.AGENT_LOST)
        return HostReport(self.host, exit, self.reason)


@dataclass(frozen=True)
class Status:
    """The status of a job, as its backend reports it.

    Attributes:
        phase: the job's status; a stored verdict overrides it.
        reason: the reason as a clause, such as "its hosts are starting"; "" for none.
        hosts: hosts with a status of their own.
    """

    phase: JobStatus
    reason: str = ""
    hosts: tuple[HostStatus, ...] = ()

    @property
    def why_waiting(self) -> str | None:
        """The reason why the job waits, as `Explains.why_waiting` returns it: "" for a job that is
        about to be created, None for a job that runs or has ended."""
        if self.phase is JobStatus.NOT_FOUND:
            return ""
        return (self.reason or None) if self.phase is JobStatus.PENDING else None


@dataclass(frozen=True)
class LogRequest:
    """A selection of a job's output.

    Attributes:
        hosts: indices of hosts; None for all.
        follow: read until the job has ended; otherwise only the existing output.
        tail: start with this many last lines of each host; None for everything.
        failures: include the tracebacks of failed hosts; false if the caller raises the exception.
        after: start positions by host: the `end` of the last chunk that the caller has. Other
            hosts start at the beginning, or at their tail.
        attempt: the number of the only attempt to read; None for all, in order.
        metrics: read the metrics of `kinetic.log` instead of the printed output.
    """

    hosts: tuple[int, ...] | None = (0,)
    follow: bool = True
    tail: int | None = None
    failures: bool = True
    after: Mapping[int, Position] = field(default_factory=dict)
    attempt: int | None = None
    metrics: bool = False

    def key(self, ref: JobRef, attempt: int, host: int) -> str:
        """Return the key of a host's output in an attempt."""
        keys = layout.HostKeys(ref.job_id, attempt, host)
        return keys.metrics if self.metrics else keys.log


class Backend(Protocol):
    """A service that runs gangs.

    Promises:
        1. `preflight` raises `PreflightError` if the plan cannot run now, and creates nothing.
        2. `render` is pure: the same plan gives the same plain JSON documents. It needs no cluster,
           and no vendor package except Pathways' builder of its own pods.
        3. `submit` creates all or nothing; after it returns, the job runs without the caller. If it
           raises `BackendUnavailable`, a part may exist, which `cancel` removes.
        4. `status` reads many jobs at once and returns every one of them, with NOT_FOUND for jobs
           that no longer exist. It raises `BackendUnavailable` if the place does not answer.
        5. `logs` yields each host's chunks in the order in which they were printed, and None at
           least every 0.1 s while there is nothing new, so that the caller can check its clock.
           With `follow` it ends when the job has ended and all was read, otherwise when the
           existing output was read. A stream that began while the job ran may end early, and may
           raise `BackendUnavailable` at any time. `after` resumes it: nothing is lost or repeated.
           With `tail`, each host's first chunk is empty and has the position of its tail. The
           output of an attempt follows that of the previous one.
        6. `cancel` asks the job to stop and returns; cancelling an ended job does nothing.
        7. `cleanup` removes everything that the backend created for an ended job, except the stored
           artifacts; idempotent.
    """

    name: str

    def preflight(self, plan: Plan) -> None:
        """Check that the plan can run now. Creates nothing.

        Raises:
            PreflightError: the plan cannot run; the message says why.
            BackendUnavailable: the backend does not answer.
        """
        ...

    def render(self, plan: Plan) -> list[Document]:
        """Return the documents that `submit` would create."""
        ...

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Create the job. `secrets` are values by name, which no document contains."""
        ...

    def status(self, refs: Sequence[JobRef]) -> Mapping[str, Status]:
        """Return the status of each job, by id."""
        ...

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Yield the selected output. A generator may return True: the job had its verdict before
        the last read, so there is no more output."""
        ...

    def cancel(self, ref: JobRef) -> None:
        """Ask the job to stop."""
        ...

    def cleanup(self, ref: JobRef) -> None:
        """Remove everything that the backend created for the job."""
        ...


def phase_of(backend: Backend, ref: JobRef) -> JobStatus:
    """Return the phase of one job."""
    return backend.status([ref])[ref.job_id].phase


@runtime_checkable
class WarmUp(Protocol):
    """Optional: a backend that can prepare slow steps while the call is still being planned."""

    def warm_up(
        self, *, needs_jax: bool, variables: Mapping[str, str], libraries: Sequence[str] = ()
    ) -> None:
        """Prepare for a job that sets these variables and probably imports these libraries. Return
        at once; nothing depends on it."""
        ...


@runtime_checkable
class BuildsImages(Protocol):
    """Optional: a backend whose hosts run images that may have to be built."""

    def choose_image(
        self, plan: Plan, installed: Mapping[str, bytes], tell: Callable[[str], object]
    ) -> Plan:
        """Return the plan with the image of its hosts, after building the image if needed. Create
        nothing else of the job.

        Args:
            plan: the job's plan.
            installed: the files that hosts install, by digest.
            tell: called with lines for the user.

        Raises:
            PreflightError: the image does not exist and cannot be built.
            BackendUnavailable: the service that builds images does not answer.
        """
        ...


@dataclass(frozen=True)
class GangProcesses:
    """The processes of a running job on this machine.

    Attributes:
        supervisor: the id of the process that leads the gang.
        agents: the ids of the agents' processes, by host.
    """

    supervisor: int
    agents: Mapping[int, int]


@runtime_checkable
class Processes(Protocol):
    """Optional: a backend whose jobs are processes of this machine."""

    def processes(self, ref: JobRef) -> GangProcesses | None:
        """Return the processes of a job, or None if it is not running."""
        ...


@runtime_checkable
class Controls(Protocol):
    """Optional: a backend whose callers can reach a job's leader, for example for live stacks."""

    def control(self, ref: JobRef) -> Endpoint | None:
        """Return the endpoint of the job's leader, or None if the job is not running."""
        ...


class Connection(Protocol):
    """A byte stream to and from a port of a host. One thread may read while another one writes.

    `read`, `write` and `finish` raise `OSError` when the connection is lost.
    """

    def read(self) -> bytes:
        """Wait for bytes and return them; b"" at the end of the stream."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of the bytes."""
        ...

    def finish(self) -> None:
        """End the writing direction. Reading can go on, except through Kubernetes' port-forward,
        which ends both directions at once."""
        ...

    def end(self) -> None:
        """End both directions; any thread may call this. A waiting read returns b"". Idempotent."""
        ...

    def close(self) -> None:
        """Close the connection, after all threads have stopped using it. Idempotent."""
        ...


@runtime_checkable
class Tunnels(Protocol):
    """Optional: a backend that can reach a port of a host (the debugger)."""

    def connect(self, ref: JobRef, host: int | None, port: int) -> Connection:
        """Connect to a port of the loopback address of a running host; with None, of the leader.

        Raises:
            OSError: nothing listens on the port.
        """
        ...


@runtime_checkable
class Signals(Protocol):
    """Optional: a backend that lets its caller sleep until a job ends, instead of polling."""

    def ending_fd(self, ref: JobRef) -> int | None:
        """Return a descriptor that becomes readable when the job has ended; None if no process of
        the job can be watched at present. The caller closes the descriptor."""
        ...


@runtime_checkable
class Kills(Protocol):
    """Optional: a backend whose hosts can be killed on purpose, to rehearse losing one."""

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Send a signal to the processes that run the function on these hosts; return the hosts
        that were running and got the signal.

        Args:
            ref: the job.
            hosts: indices of hosts.
            signum: SIGKILL ends a host like a crash, SIGTERM like an eviction by the cluster.
            agents: signal the hosts' agents instead, which looks like a lost machine. Where hosts
                are pods, both always end together.

        Raises:
            UsageError: this backend cannot send this signal.
        """
        ...


@runtime_checkable
class Explains(Protocol):
    """Optional: a backend whose jobs may wait for a long time, and that can say why."""

    def why_waiting(self, ref: JobRef) -> str | None:
        """Return why the job does not run yet, "" if unknown; None if it runs or has ended."""
        ...

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Return why a host was lost, as a sentence; "" if that is unknown, or no longer known."""
        ...

    def why_unready(self, ref: JobRef) -> str:
        """Return why some of a job's hosts never ran, as a sentence; "" if unknown. After the job's
        end, perhaps only a process that called `why_waiting` before knows the reason."""
        ...


@dataclass(frozen=True)
class PoolRow:
    """The machines of one kind that a cluster has now.

    Attributes:
        name: the accelerator, as `accelerator=` takes it; "" if kinetic has no name for it.
        kind: the cluster's own name for the machines: "tpu-v6e-slice", "TPU v6e-16".
        nodes: the number of machines.
        ready: how many of the machines accept work now.
        per_node: chips, GPUs or processors of one machine.
        slices: how many complete slices the ready machines form.
        pool: the name of the node pool; "" for none.
        topology: the topology of the slices, or "".
        is_spot: true if the provider may take the machines away.
    """

    name: str
    kind: str
    nodes: int
    ready: int
    per_node: float
    slices: int
    pool: str = ""
    topology: str = ""
    is_spot: bool = False


@runtime_checkable
class Capacity(Protocol):
    """Optional: a backend that knows how many jobs run well at a time."""

    def room(self, plan: Plan | None) -> int:
        """Return how many jobs with this plan fit at the same time, at least 1. Without a plan,
        return the number for jobs of one host."""
        ...
