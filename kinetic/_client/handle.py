"""Step 5, outcome: a job as its caller sees it, from any process.

In: `JobRef`, later the hosts' reports. Out: phases, output, the value or the error. A handle holds
nothing but the reference: the store and the backend know the rest.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from kinetic._backends import registry
from kinetic._backends.base import Backend, Controls, LogRequest, Processes, Signals, phase_of
from kinetic._client import following, futures, notebook
from kinetic._client import result as collecting
from kinetic._client.board import console
from kinetic._client.board.console import Printer, leads_to_the_caller
from kinetic._client.following import Finished, OnStatus, StatusWatch
from kinetic._core import layout
from kinetic._core.duration import Duration, patience_s
from kinetic._core.events import GangEvent
from kinetic._core.events import parse as parse_events
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import ATTRIBUTES, JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._store import index as stored
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic.errors import KineticError, NotFound, UsageError, WaitTimeout

if TYPE_CHECKING:
    from kinetic._client.board.drawing import Picture
    from kinetic._client.debugging import PortForward
    from kinetic._core.place import Place

R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("kinetic.handle")
_TAIL_LINES = 60
"""Of which the last that say something are shown."""


class JobHandle(Generic[R_co]):
    """One job. All methods work from any process, and again after the job has ended.

    The fields of the reference are attributes: `job_id`, `place`, `backend`, `accelerator`,
    `func_name`, `display_name`, `project`, `cluster_name`, `zone`, `namespace`,
    `bucket_name`, `k8s_name`, `image_uri`, `group_id`, `debug`, ...
    """

    if TYPE_CHECKING:
        job_id: str
        place: Place
        backend: str
        requested_backend: str
        accelerator: str
        func_name: str
        display_name: str
        store_uri: str
        hosts: int
        project: str
        cluster_name: str
        zone: str
        namespace: str
        bucket_name: str
        k8s_name: str
        image_uri: str
        group_id: str | None
        group_kind: str | None
        group_index: int | None
        debug: bool

    def __init__(
        self,
        ref: JobRef,
        backend: Backend | None = None,
        store: Store | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ref = ref
        self._store = store or open_store(ref.store_uri)
        self._made_backend = backend
        self._clock = clock
        self._collected: tuple[Any] | None = None
        self._callbacks = futures.Callbacks(self)
        self._left = False

    if not TYPE_CHECKING:  # A type checker should report misspelt names.

        def __getattr__(self, name):
            if name in JobRef.__dataclass_fields__:
                return getattr(self.ref, name)
            if name in ATTRIBUTES:
                return self.ref.attributes()[name]
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """What there is to complete: the fields of the reference, too, and nothing internal."""
        names = {*super().__dir__(), *ATTRIBUTES}
        return sorted(name for name in names if name.startswith("__") or not name.startswith("_"))

    def __repr__(self) -> str:
        return (
            f"<JobHandle {self.job_id}: {self.display_name} on {self.accelerator} ({self.backend})>"
        )

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        return drawing.html(self.picture())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.ref == self.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobHandle.from_dict, (self.to_dict(),)

    @property
    def created_at(self) -> str:
        """When it was submitted, in UTC, as ISO 8601 has it: "2026-01-31T12:00:00Z".
        `ref.created_at` is a number of seconds."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.ref.created_at))

    @property
    def output_dir(self) -> str:
        """Where the function leaves files: `KINETIC_OUTPUT_DIR` in its environment."""
        return (
            self.ref.output_dir
            or f"{self.ref.store_uri.rstrip('/')}/{layout.outputs(self.ref.job_id)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the reference as a JSON object."""
        return self.ref.attributes()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobHandle[Any]:
        """Rebuild a handle from `to_dict`; unknown keys are ignored."""
        return JobHandle(JobRef.from_json(data))

    # -- looking -----------------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """Return what the job is: PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED or NOT_FOUND."""
        found = self._stored()
        if found is not None:
            return status_of_verdict(found.verdict)
        return following.standing(
            self._store, self.ref, phase_of(self._backend, self.ref), time.time()
        )[0]

    def outcome(self) -> Outcome | None:
        """Return the verdict over all hosts, or None while the job goes on."""
        return following.settle(self._backend, self._store, self.ref, time.time())

    def settle(self, refs: Sequence[JobRef]) -> dict[str, Outcome | KineticError | None]:
        """Return the verdicts of jobs of the same place and store as this one, by id; an error for
        a job that cannot be looked at, or whose records were removed."""
        return following.settle_many(self._backend, self._store, refs, time.time())

    def ending_fd(self) -> int | None:
        """Return a descriptor that becomes readable when the job has ended; None where there is
        none. The caller closes it."""
        return self._backend.ending_fd(self.ref) if isinstance(self._backend, Signals) else None

    def grouped(self, group_id: str, index: int) -> JobHandle[R_co]:
        """Make the job the member of a batch; return its handle as such."""
        ref = replace(self.ref, group_id=group_id, group_kind="map", group_index=index)
        stored.replace(self._store, ref)
        return JobHandle(ref, self._made_backend, self._store)

    @overload
    def logs(
        self,
        follow: Literal[False] = False,
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> str: ...

    @overload
    def logs(
        self,
        follow: Literal[True],
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> None: ...

    @overload
    def logs(
        self,
        follow: bool,
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> str | None: ...

    @leads_to_the_caller
    def logs(
        self,
        follow: bool = False,
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> str | None:
        """Return what a host printed so far; with `follow`, print it as it comes until the job
        ends, and return None.

        Args:
            follow: stream to stdout and stderr instead.
            host: which host; 0 is the leader.
            all_hosts: all of them, each line with "[host 3] " in front.
            tail: only the last so many lines of each host.
            attempt: only the n-th attempt, from 1; by default all of them, one after the other.
        """
        hosts = None if all_hosts else (self._known(host),)
        request = LogRequest(hosts=hosts, follow=follow, tail=tail, attempt=attempt)
        printer = Printer(prefixed=all_hosts)
        if follow:
            self._watch(request, printer)
            return None
        return b"".join(
            printer.shown(chunk) for chunk in self.chunks(request) if chunk is not None
        ).decode("utf-8", "replace")

    def tail(self, n: int = 100, host: int = 0) -> str:
        """Return the last n lines that a host printed."""
        return self.logs(tail=n, host=host)

    def chunks(self, request: LogRequest) -> Iterator[LogChunk | None]:
        """Yield output as bytes with host, stream and time; None while nothing is new."""
        return following.chunks(self._backend, self._store, self.ref, request)

    def events(self) -> list[dict[str, Any]]:
        """Return what happened when, oldest first, as JSON objects. A damaged line is passed over,
        and so is what only a newer version knows."""
        return [event.to_json() for event in self._events()]

    def _events(self) -> list[GangEvent]:
        try:
            return parse_events(self._store.get(layout.events(self.job_id)))
        except NotFound:
            return []

    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return the Python stacks of every host's worker: live, or as they were kept when the gang
        hung.

        Raises:
            NotFound: the job is not running and none were kept.
        """
        endpoint = self._backend.control(self.ref) if isinstance(self._backend, Controls) else None
        if endpoint is not None:
            from kinetic._rpc.client import ControlClient

            with ControlClient(endpoint, give_up_s=timeout_s) as client:
                return client.dump_stacks(timeout_s)
        found = self._stored()
        kept = {} if found is None else collecting.stacks(found)
        if not kept:
            raise NotFound(
                f"{self.job_id} is not running, and no stacks were kept: they are when "
                "hang_timeout ends a job."
            )
        return kept

    @leads_to_the_caller
    def debug_attach(self, local_port: int = 5678, working_dir: str | None = None) -> PortForward:
        """Wait until the debugger of a debug job listens, bring it to a port of this machine, and
        say how to attach.

        Args:
            local_port: the port; 0 takes any free one.
            working_dir: where the job's source is here; by default where it was sent from.

        Returns:
            What forwards the port, with `poll`, `wait` and `terminate` as a `subprocess.Popen` has
            them.

        Raises:
            UsageError: the job was not started with debug=True, or the port is taken.
            NotFound: the job has ended.
        """
        from kinetic._client import debugging

        forward = debugging.attach(
            self._backend,
            self._store,
            self.ref,
            local_port=local_port,
            working_dir=working_dir,
            ended=lambda: self.status().ended,
        )
        console.notice(forward.instructions, once=False)
        return forward

    def processes(self) -> dict[str, Any]:
        """Return the process ids of a job that runs on this machine: {"supervisor": pid, "agents":
        {host: pid}}; else {}."""
        found = self._backend.processes(self.ref) if isinstance(self._backend, Processes) else None
        if found is None:
            return {}
        return {"supervisor": found.supervisor, "agents": dict(found.agents)}

    # -- waiting -----------------------------------------------------------------------------------

    @leads_to_the_caller
    def wait(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the job has ended and return the verdict; raises nothing for a job that
        failed.

        Raises:
            WaitTimeout: `timeout` seconds have passed; the job keeps running.
        """
        return self._watch(LogRequest(hosts=()), timeout=timeout)

    @leads_to_the_caller
    def result(  # noqa: PLR0917 - as scripts call it
        self,
        timeout: Duration | None = None,
        cleanup: bool | None = None,
        cleanup_timeout: Duration = 180,
        cleanup_poll_interval: float = 2,
        stream_logs: bool | None = None,
        on_status_change: OnStatus | None = None,
    ) -> R_co:
        """Wait for the job and return the leader's value, or raise what the function raised. Can be
        called again.

        Args:
            timeout: how long to wait at most: seconds, "90s", "1h30m" or a timedelta; None waits
                until it ends.
            cleanup: None frees what the backend holds and keeps the records; True also removes the
                records of a job that succeeded; False leaves everything. Records of a job that
                failed always stay.
            cleanup_timeout: seconds that freeing may take.
            cleanup_poll_interval: taken for the sake of older scripts; nothing is polled.
            stream_logs: print the leader's output meanwhile.
            on_status_change: called with each new status.

        Raises:
            WaitTimeout: the time has passed; the job keeps running.
            JobFailed: the job failed, and not through an exception of the function that can be
                rebuilt here.
        """
        __tracebackhide__ = (
            True  # Notebooks and pytest show the caller's line and the function's own frames.
        )
        if self._collected is not None:
            return cast("R_co", self._collected[0])
        request = LogRequest(hosts=(0,) if stream_logs else (), failures=False)
        outcome = self._watch(
            request, Printer() if stream_logs else None, timeout, on_status_change
        )
        free = not self.debug if cleanup is None else cleanup
        try:
            if not outcome.ok:
                raise self._error(outcome, seen=bool(stream_logs))
            value = collecting.value(self._store, self.ref, outcome)
            if cleanup:
                self._collected = (value,)
            return cast("R_co", value)
        finally:
            if free:
                self._free(records=self._collected is not None, timeout=cleanup_timeout)

    @leads_to_the_caller
    def results(self, timeout: Duration | None = None) -> list[R_co]:
        """Wait for the job and return the values of all hosts, by index; for jobs that were run
        with `all_hosts=True`.

        The first of them is what `result` returns. A job that failed on any host raises what
        `result` raises.

        Args:
            timeout: how long to wait at most, as for `result`.

        Raises:
            UsageError: the job has several hosts, and only the leader's value was kept.
            WaitTimeout: the time has passed; the job keeps running.
        """
        outcome = self.wait(timeout)
        if not outcome.ok:
            raise self._error(outcome, seen=False)
        return collecting.values(self._store, self.ref, outcome)

    def error(self, *, seen: bool = False) -> BaseException | None:
        """Return what `result` raises for this job, or None when it succeeded or goes on.

        Args:
            seen: the leader's output has been shown; the message does not repeat its last lines.
        """
        outcome = self.outcome()
        return None if outcome is None or outcome.ok else self._error(outcome, seen=seen)

    # -- as a future -------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the job has ended, however it did."""
        return self.status().ended

    def exception(self, timeout: Duration | None = None) -> BaseException | None:
        """Wait for the job and return what `result` raises for it; None for a job that succeeded.

        Raises:
            WaitTimeout: the time has passed; the job keeps running.
        """
        outcome = self.wait(timeout)
        return None if outcome.ok else self._error(outcome, seen=False)

    def add_done_callback(self, fn: Callable[[JobHandle[R_co]], object]) -> None:
        """Call `fn` with this handle once the job has ended; now, if it has ended already.

        Callbacks are called in the order in which they were added, in a daemon thread: they do not
        keep the process alive. What one raises is logged and changes nothing.
        """
        self._callbacks.add(functools.partial(fn, self))

    def __await__(self) -> Generator[Any, Any, R_co]:
        """Wait as `result()` does, without blocking the event loop of asyncio. Cancelling the
        waiting leaves the job running."""
        return self._awaited().__await__()

    async def _awaited(self) -> R_co:
        await futures.ended(self)
        return await futures.beside(self.result, abandoned=lambda: None, daemon=True)

    def leave(self) -> None:
        """Have the waiting that goes on in another thread end, and say how to come back to the
        job."""
        self._left = True
        self._tell_it_goes_on()

    # -- ending ------------------------------------------------------------------------------------

    def cancel(self, cleanup_timeout: Duration = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job. Its records stay; cancelling a job that has ended does nothing.

        Waits until it has stopped, but no longer than `cleanup_timeout` seconds: then it is left to
        stop, with a warning. With 0 it does not wait.
        """
        limit_s = patience_s(cleanup_timeout)
        self._backend.cancel(self.ref)
        if limit_s:
            self._wait_for_the_end(limit_s)

    def _wait_for_the_end(self, limit_s: float) -> None:
        try:
            self._watch(LogRequest(hosts=()), timeout=limit_s)
        except NotFound:
            pass
        except WaitTimeout:
            _log.warning(
                "%s was asked to stop, and has not stopped within %g s.", self.job_id, limit_s
            )

    def cleanup(
        self,
        k8s: bool = True,
        gcs: bool = True,
        cleanup_timeout: Duration = 180,
        cleanup_poll_interval: float = 2,
    ) -> None:
        """Remove the job: what its backend holds (`k8s`), and its records in the store (`gcs`). A
        running job is stopped first.

        Raises:
            UsageError: only the records of a job that is running were to be removed.
            WaitTimeout: the job did not stop within `cleanup_timeout` seconds.
        """
        if not self.status().ended:
            if not k8s:
                raise UsageError(
                    f"{self.job_id} is running and needs its records. Cancel it first, or clean up "
                    "with k8s=True."
                )
            self.cancel(cleanup_timeout=0)
            with contextlib.suppress(NotFound):
                self._watch(LogRequest(hosts=()), timeout=cleanup_timeout)
        if k8s:
            self._backend.cleanup(self.ref)
        if gcs:
            self._store.delete(layout.job(self.job_id))
            stored.remove(self._store, self.job_id)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        if self._made_backend is None:
            self._made_backend = registry.make(self.ref.place, self._store)
        return self._made_backend

    def _stored(self) -> Outcome | None:
        return following.stored(self._store, self.ref, time.time())

    def _error(self, outcome: Outcome, *, seen: bool) -> BaseException:
        return collecting.error(
            self._store,
            self.ref,
            outcome,
            lambda host: "" if seen and host == 0 else self._last_lines(host, outcome.attempt),
        )

    def _last_lines(self, host: int, attempt: int) -> str:
        request = LogRequest((host,), False, _TAIL_LINES, failures=False, attempt=attempt)
        with contextlib.suppress(KineticError, OSError):
            chunks = self.chunks(request)
            return b"".join(chunk.data for chunk in chunks if chunk is not None).decode(
                errors="replace"
            )
        return ""

    def _known(self, host: int) -> int:
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host < self.hosts:
            raise UsageError(
                f"{self.job_id} has hosts 0 to {self.hosts - 1}; there is no host {host!r}."
            )
        return host

    def _watch(
        self,
        request: LogRequest,
        printer: Printer | None = None,
        timeout: Duration | None = None,
        on_status: OnStatus | None = None,
    ) -> Outcome:
        patience = math.inf if timeout is None else patience_s(timeout)
        deadline = self._clock() + patience
        look = StatusWatch(self.status, on_status, self._clock)
        with notebook.progress(self.picture, self._clock) as show:
            for event in following.follow(self._backend, self._store, self.ref, request):
                if isinstance(event, Finished):
                    look(event.outcome)
                    show(event.outcome)
                    return event.outcome
                if isinstance(event, LogChunk) and printer is not None:
                    show.before(event.data)
                    printer.write(event)
                look()
                show()
                if self._left:
                    raise WaitTimeout(
                        f"The wait for {self.job_id} was given up. It keeps running; "
                        f"{self._way_back()}"
                    )
                if self._clock() >= deadline and self._stored() is None:
                    raise WaitTimeout(
                        f"{self.job_id} has not ended within {patience:g} s. It keeps running; "
                        f"{self._way_back()}"
                    )
        raise NotFound(f"{self.job_id} ended without a verdict.")

    def picture(self, outcome: Outcome | None = None) -> Picture:
        """What there is to see of the job now. Never fails: it is drawn while something else goes
        on."""
        from kinetic._client.board import drawing

        state, events = "unknown", list[GangEvent]()
        with contextlib.suppress(KineticError, OSError):
            outcome = outcome or self._stored()
            status = self.status() if outcome is None else status_of_verdict(outcome.verdict)
            state = status.lower()
            events = self._events() if outcome is None else []
        return drawing.of_job(self.ref, state, events, outcome, time.time())

    def _free(self, *, records: bool, timeout: Duration) -> None:
        """Clean up after the value was fetched; failing at that must not cost the value."""
        try:
            self.cleanup(k8s=True, gcs=records, cleanup_timeout=timeout)
        except (KineticError, OSError) as error:
            _log.warning("%s could not be cleaned up: %s", self.job_id, error)

    def _way_back(self) -> str:
        return (
            f'reattach with kinetic.attach("{self.job_id}").result() or `kinetic jobs logs -f '
            f"{self.job_id}`, "
            f"stop it with `kinetic jobs cancel {self.job_id}`."
        )

    def _parting_words(self) -> str:
        return f"kinetic: {self.job_id} keeps running; {self._way_back()}"

    def _tell_it_goes_on(self) -> None:
        console.notice(f"\n{self._parting_words()}", once=False)
