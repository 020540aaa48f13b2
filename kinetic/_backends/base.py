"""The seam to the place where jobs run.

In: a `Plan`, later `JobRef`s. Out: JSON documents, what the backend knows of jobs, log chunks.
"""

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
    """What a backend knows of one host. `exit` says how it ended, where the phase does not."""

    host: int
    phase: JobStatus
    reason: str = ""
    exit: Exit | None = None

    def as_report(self) -> HostReport:
        """Return what the host would have reported, had it been able to."""
        from kinetic._core.exits import Exit  # not needed for lists of jobs
        from kinetic._core.outcome import HostReport

        never = self.phase is JobStatus.PENDING
        exit = self.exit or (Exit.NEVER_JOINED if never else Exit.AGENT_LOST)
        return HostReport(self.host, exit, self.reason)


@dataclass(frozen=True)
class Status:
    """What a backend knows of a job.

    Attributes:
        phase: the job's status; a stored verdict overrides it.
        reason: why, as a sentence, such as "its hosts are starting"; "" if there is nothing to
            say.
        hosts: hosts of which more is known than of the job.
    """

    phase: JobStatus
    reason: str = ""
    hosts: tuple[HostStatus, ...] = ()

    @property
    def why_waiting(self) -> str | None:
        """As in `Explains`: "" for a job that is about to be created, None for one that runs."""
        if self.phase is JobStatus.NOT_FOUND:
            return ""
        return (self.reason or None) if self.phase is JobStatus.PENDING else None


@dataclass(frozen=True)
class LogRequest:
    """Which output to read.

    Attributes:
        hosts: indices of hosts; None for all.
        follow: keep reading until the job has ended and everything was read; otherwise read what
            there is.
        tail: start with this many last lines of each host; None for everything.
        failures: include the tracebacks of failed hosts; a caller that raises the exception leaves
            them out.
        after: where to begin, by host: the `end` of the last chunk that the caller has. Other
            hosts begin at the start, or at their tail.
        attempt: only the output of this attempt; None for all of them, in order.
        metrics: read what hosts have logged with `kinetic.log` instead of what they printed.
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
    """A place that runs gangs.

    Promises:
        1. `preflight` raises `PreflightError` when the plan cannot run here now, and creates
           nothing.
        2. `render` is pure: the same plan gives the same plain JSON documents; no cluster, and no
           vendor package but Pathways' own description of its pods.
        3. `submit` creates all or nothing; after it returns the job runs without the caller. If it
           raises `BackendUnavailable` a part may exist, which `cancel` removes.
        4. `status` reads, for many jobs at once: each of them is in the answer, including those
           that are gone (NOT_FOUND). It raises `BackendUnavailable` if nothing can be said.
        5. `logs` yields each host's chunks in the order in which they were printed, and None at
           least every 0.1 s while there is nothing new, so that the caller can look at its clock.
           It ends when the job has ended and all was read (`follow`), or when the existing output
           was read. A stream that began while the job ran may end early; it may raise
           `BackendUnavailable` at any time. `after` resumes it: nothing is lost or repeated. With
           `tail`, each host's first chunk is empty and has the position of its tail. Attempts
           follow one another.
        6. `cancel` asks the job to stop and returns; cancelling an ended job does nothing.
        7. `cleanup` removes what the backend created for an ended job (not the stored artifacts);
           idempotent.
    """

    name: str

    def preflight(self, plan: Plan) -> None:
        """Check that the plan can run here now."""
        ...

    def render(self, plan: Plan) -> list[Document]:
        """Return the documents that `submit` would create."""
        ...

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Create the job; `secrets` are values that are in no document."""
        ...

    def status(self, refs: Sequence[JobRef]) -> Mapping[str, Status]:
        """Return what the backend knows of the jobs, by id."""
        ...

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Yield output."""
        ...

    def cancel(self, ref: JobRef) -> None:
        """Ask the job to stop."""
        ...

    def cleanup(self, ref: JobRef) -> None:
        """Remove what the backend holds for the job."""
        ...


def phase_of(backend: Backend, ref: JobRef) -> JobStatus:
    """Return what the backend says of one job."""
    return backend.status([ref])[ref.job_id].phase


@runtime_checkable
class WarmUp(Protocol):
    """Optional: a backend that can prepare what takes time while the call is still being
    planned."""

    def warm_up(
        self, *, needs_jax: bool, variables: Mapping[str, str], libraries: Sequence[str] = ()
    ) -> None:
        """Prepare for a job that sets these variables and probably imports these libraries. Returns
        at once; nothing depends on it."""
        ...


@runtime_checkable
class BuildsImages(Protocol):
    """Optional: a backend whose hosts run images that may have to be built.

    `installed` is what hosts install, by digest; `tell` is called with lines for the caller.
    """

    def choose_image(
        self, plan: Plan, installed: Mapping[str, bytes], tell: Callable[[str], object]
    ) -> Plan:
        """Return the plan with the image that hosts run, once that exists. Creates nothing of the
        job.

        Raises:
            PreflightError: there is no such image, and it cannot be built.
            BackendUnavailable: the service that builds it does not answer.
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
    """Optional: a backend whose running jobs can be called (live stacks)."""

    def control(self, ref: JobRef) -> Endpoint | None:
        """Return how to reach the job's coordinator, or None if the job is not running."""
        ...


class Connection(Protocol):
    """Bytes to and from a port of a host. One thread may read while another one writes.

    All methods raise `OSError` when the connection is lost, except the last two.
    """

    def read(self) -> bytes:
        """Wait for bytes and return them; b"" when no more will come."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of the bytes."""
        ...

    def finish(self) -> None:
        """Say that nothing more will be written. Reading goes on, except through Kubernetes'
        port-forward, which ends both directions at once."""
        ...

    def end(self) -> None:
        """End both directions, from any thread: a waiting read returns b"". Idempotent."""
        ...

    def close(self) -> None:
        """Close it, once no thread reads or writes any more. Idempotent."""
        ...


@runtime_checkable
class Tunnels(Protocol):
    """Optional: a backend that can reach a port of a host (the debugger)."""

    def connect(self, ref: JobRef, host: int, port: int) -> Connection:
        """Connect to a port of the loopback address of a running host.

        Raises:
            OSError: nothing listens there.
        """
        ...


@runtime_checkable
class Signals(Protocol):
    """Optional: a backend that lets its caller sleep until a job ends, instead of polling."""

    def ending_fd(self, ref: JobRef) -> int | None:
        """Return a descriptor that becomes readable when the job has ended, which the caller
        closes; None while there is none."""
        ...


@runtime_checkable
class Kills(Protocol):
    """Optional: a backend whose hosts can be killed on purpose, to rehearse the loss of one."""

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Send a signal to the processes that run the function on these hosts; return the hosts
        that it was sent to, () if nothing of the job runs there now.

        Args:
            ref: the job.
            hosts: by index.
            signum: SIGKILL ends a host like a crash, SIGTERM like a cluster that takes it away.
            agents: signal the hosts' agents instead, which looks like a lost machine. Where hosts
                are pods, both always end together.
        Raises:
            UsageError: hosts cannot be sent this signal here.
        """
        ...


@runtime_checkable
class Explains(Protocol):
    """Optional: a backend where jobs may wait for a long time, for reasons that users want to
    know."""

    def why_waiting(self, ref: JobRef) -> str | None:
        """Return why the job does not run yet, "" when there is nothing to say; None once it
        runs, or has ended."""
        ...

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Return why a host was lost, as a sentence; "" where that is not known (any more)."""
        ...

    def why_unready(self, ref: JobRef) -> str:
        """Return why not all of a job's hosts came to run, as a sentence; "" where that is not
        known: once the job has ended, only who has asked `why_waiting` may know it."""
        ...


@dataclass(frozen=True)
class PoolRow:
    """Machines of one kind that a place has now.

    Attributes:
        name: as `accelerator=` takes it; "" if kinetic has no name for it.
        kind: what the place calls it: "tpu-v6e-slice", "TPU v6e-16".
        pool: the name of their node pool; "" for none.
        topology: of the slices that the nodes form, or "".
        nodes: how many there are.
        ready: how many of them take work now.
        each: chips, GPUs or processors of one node.
        slices: complete slices that the ready nodes form.
        is_spot: whether they may be taken away.
    """

    name: str
    kind: str
    nodes: int
    ready: int
    each: float
    slices: int
    pool: str = ""
    topology: str = ""
    is_spot: bool = False


@runtime_checkable
class Capacity(Protocol):
    """Optional: a backend that knows how many jobs run well at a time."""

    def room(self, plan: Plan | None) -> int:
        """Return how many jobs of this shape there is room for, at least 1; None stands for jobs of
        one host."""
        ...
