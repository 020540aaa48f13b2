"""Step 5, outcome: the handle of a job, in any process.

A handle holds only the reference: everything else is read from the store and the backend.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from kinetic._backends import registry
from kinetic._backends.base import Backend, Controls, Kills, LogRequest, Processes, Signals
from kinetic._client import following, futures, killing, notebook
from kinetic._client import result as collecting
from kinetic._client.board import console, shape
from kinetic._client.board.console import Printer
from kinetic._client.board.line_prefix import Prefixer
from kinetic._client.board.reader import JobBoard
from kinetic._client.following import Finished, OnStatus, StatusWatch, Tick, Waiting
from kinetic._core import layout
from kinetic._core.duration import Duration, patience_s
from kinetic._core.events import GangEvent
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import ATTRIBUTES, JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._core.tracebacks import hide_frames
from kinetic._store import attempts
from kinetic._store import index as stored
from kinetic._store.base import Store
from kinetic._store.open import as_existing, open_store
from kinetic.errors import KineticError, NotFound, UsageError, WaitTimeout

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kinetic._client.board.drawing import Picture
    from kinetic._client.debugging import PortForward
    from kinetic._client.explaining import Explanation
    from kinetic._client.metrics import Metrics
    from kinetic._compile.checked import CheckReport
    from kinetic._core.place import Place
    from kinetic._core.state import JobStanding

R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("kinetic.handle")


class JobHandle(Generic[R_co]):
    """A job, running or ended. All methods work from any process.

    Fields of the job's reference are attributes: `job_id`, `place`, `backend`, `accelerator`,
    `func_name`, `display_name`, `project`, `cluster_name`, `zone`, `namespace`, `bucket_name`,
    `k8s_name`, `image_uri`, `group_id`, `debug`, ...

    Example:
        ```python
        job = train.run_async(1000)  # or kinetic.attach("job-1a2b3c4d")
        print(job.status(), job.logs())
        loss = job.result()
        ```
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
        self._store = as_existing(store or open_store(ref.store_uri))
        self._made_backend = backend
        self._clock = clock
        self._collected: tuple[Any] | None = None
        self._own_future: futures.JobFuture | None = None
        self._callbacks: list[tuple[Callable[[Any], object], Callable[[], None]]] = []
        self._is_over = False

    if not TYPE_CHECKING:  # A type checker should report misspelt names.

        def __getattr__(self, name):
            if name in JobRef.__dataclass_fields__:
                return getattr(self.ref, name)
            if name in ATTRIBUTES:
                return self.ref.attributes().get(name, "")
            if name in futures.FUTURE_INTERNALS:  # `concurrent.futures.wait([handle])`
                future = self.future()
                is_list = name == "_waiters"
                return futures.HandleWaiters(future, self) if is_list else getattr(future, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """List the public names and the fields of the reference, for completion in editors."""
        names = {*super().__dir__(), *ATTRIBUTES}
        return sorted(name for name in names if name.startswith("__") or not name.startswith("_"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.ref == self.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobHandle.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobHandle[Any]:
        """Return the handle of a job that was saved as a dictionary.

        Args:
            data: A dictionary that `to_dict` returned. Unknown keys are ignored.

        Example:
            ```python
            text = json.dumps(job.to_dict())
            job = kinetic.JobHandle.from_dict(json.loads(text))
            ```
        """
        return JobHandle(JobRef.from_json(data))

    def __repr__(self) -> str:
        return (
            f"<JobHandle {self.job_id}: {self.display_name} on {self.accelerator} ({self.backend})>"
        )

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        return drawing.html(self.picture())

    @property
    def created_at(self) -> str:
        """The time of submission in UTC, in ISO 8601: "2026-01-31T12:00:00Z"."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.ref.created_at))

    @property
    def output_dir(self) -> str:
        """The folder or bucket for the function's files: its variable `KINETIC_OUTPUT_DIR`."""
        return (
            self.ref.output_dir
            or f"{self.ref.store_uri.rstrip('/')}/{layout.JobKeys(self.ref.job_id).outputs}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the job's reference as a JSON object, which `from_dict` reads."""
        return self.ref.attributes()

    def status(self) -> JobStatus:
        """Return the job's status: PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED or NOT_FOUND."""
        return self._board.read_standing(self.ref).status

    def outcome(self) -> Outcome | None:
        """Return the verdict on the job, with a report of each host; None while the job runs."""
        return self._board.outcome(self.ref)

    def read_standings(self, refs: Sequence[JobRef]) -> dict[str, JobStanding]:
        """Return the states of jobs with the same place and store as this one, by id."""
        return self._board.read_standings(refs)

    def settle(self, refs: Sequence[JobRef]) -> dict[str, Outcome | KineticError | None]:
        """Return the verdicts of jobs with the same place and store as this one, by id: None for a
        running job, an error if the verdict cannot be determined or the records were removed."""
        return self._board.settle(refs)

    def ending_fd(self) -> int | None:
        """Return a file descriptor that becomes readable when the job ends, for the caller to
        close; None if the backend has none."""
        return self._backend.ending_fd(self.ref) if isinstance(self._backend, Signals) else None

    def chunks(
        self, request: LogRequest, tell: Callable[[str], object] | None = None
    ) -> Iterator[LogChunk | None]:
        """Yield the job's output in chunks, as `following.chunks` does."""
        return following.chunks(self._backend, self._store, self.ref, request, tell=tell)

    @hide_frames
    def metrics(
        self,
        host: int = 0,
        all_hosts: bool = False,
        attempt: int | None = None,
        repeats: bool = False,
    ) -> Metrics:
        """Return the metrics logged so far with `kinetic.log`, and measurements of the hosts, such
        as memory in use.

        Args:
            host: The host whose metrics to read; 0 is the leader.
            all_hosts: Read the metrics of all hosts.
            attempt: Read only this attempt, counted from 1; by default all attempts.
            repeats: Keep every value of steps that were repeated after a checkpoint was restored;
                by default only the last value of each step.

        Raises:
            PreflightError: NumPy is not installed on this machine.
        """
        from kinetic._client.metrics import Metrics, MetricsReader

        hosts = None if all_hosts else (shape.check_host(self.ref, host),)
        if attempt is not None:
            attempts.check(self._store, self.job_id, attempt)
        reader = MetricsReader(self._store, self.ref, hosts=hosts, attempt=attempt)
        reader.read_new()
        return Metrics(self.job_id, reader.recording.series(repeats=repeats))

    def events(self) -> list[dict[str, Any]]:
        """Return the job's events with their times as JSON objects, oldest first. Damaged lines,
        and events of newer versions of kinetic, are skipped."""
        return [event.to_json() for event in self._board.events(self.ref)]

    @hide_frames
    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return the Python stacks of all hosts, by index: current ones while the job runs, or
        those stored when it hung.

        Args:
            timeout_s: The longest wait for the hosts' answers, in seconds; on a cluster, the leader
                has 30 s more to notice the request.

        Raises:
            NotFound: The job is not running, and no stacks were stored.
            WaitTimeout: The leader of a job on a cluster does not answer.
        """
        endpoint = self._backend.control(self.ref) if isinstance(self._backend, Controls) else None
        if endpoint is not None:
            from kinetic._rpc.client import ControlClient

            with ControlClient(endpoint, give_up_s=timeout_s) as client:
                return client.dump_stacks(timeout_s)
        outcome = self._read_verdict()
        if outcome is None and self.ref.place.is_cluster and self._has_leader():
            from kinetic._client import asking

            live = asking.stacks(
                self._store,
                self.ref,
                patience_s=timeout_s + asking.ANSWER_S,
                ended=lambda: self._read_verdict() is not None,
            )
            if live:
                return live
            outcome = self._read_verdict()
        stacks = {} if outcome is None else collecting.stacks(outcome)
        if not stacks:
            raise NotFound(
                f"{self.job_id} is not running, and has no stored stacks. Stacks are stored "
                "when hang_timeout= ends a job."
            )
        return stacks

    def _has_leader(self) -> bool:
        """True if the job's leader runs, by the backend's status or by the events in the store: a
        cluster's status is read only every few seconds."""
        status = self.status()
        return status is JobStatus.RUNNING or (
            status is JobStatus.PENDING and self._store.has(layout.JobKeys(self.job_id).events)
        )

    def explain(self) -> Explanation:
        """Return a page about a job that failed, hangs or waits: the cause, the first host to fail
        and its last lines, what the others did, and what to do next. `print` it."""
        from kinetic._client import explaining

        return explaining.explain(
            self._board,
            self.ref,
            read_tail=functools.partial(collecting.read_tail, self.chunks),
            read_stacks=self.stacks,
            now=time.time(),
        )

    def processes(self) -> dict[str, Any]:
        """Return the process ids of a job that runs on this machine, as {"supervisor": pid,
        "agents": {host: pid}}; {} for other jobs."""
        backend = self._backend
        running = backend.processes(self.ref) if isinstance(backend, Processes) else None
        if running is None:
            return {}
        return {"supervisor": running.supervisor, "agents": dict(running.agents)}

    def picture(self, outcome: Outcome | None = None) -> Picture:
        """Return the state of the job and its hosts for a drawing. Errors of the store or the
        backend are not raised: a drawing must not end a wait."""
        from kinetic._client.board import drawing

        state, events = "unknown", list[GangEvent]()
        with contextlib.suppress(KineticError, OSError):
            outcome = outcome or self._read_verdict()
            status = self.status() if outcome is None else status_of_verdict(outcome.verdict)
            state = status.lower()
            events = self._board.events(self.ref) if outcome is None else []
        return drawing.of_job(self.ref, state, events, outcome, time.time())

    # -- output ------------------------------------------------------------------------------------

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

    @hide_frames
    def logs(
        self,
        follow: bool = False,
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> str | None:
        """Return the output of a host so far; or with `follow`, print it until the job ends.

        Args:
            follow: Print to stdout and stderr as the output arrives, and return None.
            host: The host whose output to read; 0 is the leader.
            all_hosts: Read all hosts, each line prefixed with "[host 3] ".
            tail: Read only this many last lines of each host.
            attempt: Read only this attempt, counted from 1; by default all attempts, in order.

        Raises:
            UsageError: The job has no such host or attempt.

        Example:
            ```python
            print(job.logs(tail=20))
            job.logs(follow=True, all_hosts=True)
            ```
        """
        hosts = None if all_hosts else (shape.check_host(self.ref, host),)
        request = LogRequest(hosts=hosts, follow=follow, tail=tail, attempt=attempt)
        if follow:
            with _InterruptNotice(self):
                self._watch(request, Printer(prefixed=all_hosts))
            return None
        mark = Prefixer(hosts=all_hosts).add
        parts = [mark(chunk) for chunk in self.chunks(request) if chunk is not None]
        return b"".join(parts).decode("utf-8", "replace")

    def tail(self, n: int = 100, host: int = 0) -> str:
        """Return the last `n` lines that a host printed."""
        return self.logs(tail=n, host=host)

    @hide_frames
    def debug_attach(self, local_port: int = 5678, working_dir: str | None = None) -> PortForward:
        """Wait until the job's debugger listens, forward a port of this machine to it, and print
        how to attach an editor.

        Args:
            local_port: The port of this machine; 0 for any free port.
            working_dir: The folder of the job's source on this machine; by default the folder from
                which it was sent.

        Returns:
            The port forward, with `poll`, `wait` and `terminate` as in `subprocess.Popen`.

        Raises:
            UsageError: The job was not started with debug=True, or the port is in use.
            NotFound: The job has ended.
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
        console.notice(forward.instructions, repeat=True)
        return forward

    # -- waiting -----------------------------------------------------------------------------------

    @hide_frames
    def wait(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the job has ended, and return the verdict, also for a job that failed.

        Args:
            timeout: The longest wait: seconds, "90s", "1h30m" or a `timedelta`; None waits until
                the job ends.

        Raises:
            WaitTimeout: The time has passed; the job keeps running.

        Example:
            ```python
            outcome = job.wait()
            if not outcome.ok:
                print(outcome.reason)
            ```
        """
        with _InterruptNotice(self):
            return self._watch(LogRequest(hosts=()), timeout=timeout)

    @hide_frames
    def result(  # noqa: PLR0917 - as scripts call it
        self,
        timeout: Duration | None = None,
        cleanup: bool | None = None,
        cleanup_timeout: Duration = 180,
        cleanup_poll_interval: float = 2,
        stream_logs: bool | None = None,
        on_status_change: OnStatus | None = None,
    ) -> R_co:
        """Wait for the job and return the value of JAX's process 0, or raise the function's
        exception. Works any number of times.

        Args:
            timeout: The longest wait: seconds, "90s", "1h30m" or a `timedelta`; None waits until
                the job ends.
            cleanup: None frees the backend's resources and keeps the records; True also removes the
                records and work folder files of a job that succeeded; False leaves everything. The
                records of a failed job always stay.
            cleanup_timeout: Accepted for older scripts and ignored.
            cleanup_poll_interval: Accepted for older scripts and ignored.
            stream_logs: Print the leader's output while waiting.
            on_status_change: Called with each new `JobStatus`.

        Raises:
            Exception: The function's own exception, if it can be unpickled here.
            JobFailed: The job failed for another reason.
            WaitTimeout: The time has passed; the job keeps running.

        Example:
            ```python
            loss = job.result(timeout="1h", stream_logs=True)
            ```
        """
        patience_s(cleanup_timeout)
        return self._result(timeout, cleanup, bool(stream_logs), on_status=on_status_change)

    def call_result(self, abandoned: threading.Event) -> R_co:
        """Do what `result(stream_logs=True)` does. Setting `abandoned` ends the wait and prints how
        to reattach to the job."""
        return self._result(None, None, stream_logs=True, abandoned=abandoned)

    def _result(
        self,
        timeout: Duration | None,
        cleanup: bool | None,
        stream_logs: bool,
        *,
        on_status: OnStatus | None = None,
        abandoned: threading.Event | None = None,
    ) -> R_co:
        if self._collected is not None:
            return cast("R_co", self._collected[0])
        request = LogRequest(hosts=(0,) if stream_logs else (), failures=False)
        printer = Printer() if stream_logs else None
        with _InterruptNotice(self):
            outcome = self._watch(request, printer, timeout, on_status, abandoned)
            if not (cleanup and outcome.ok):
                collecting.name_files(self.job_id, [outcome])
            try:
                if not outcome.ok:
                    raise self._make_error(outcome, is_printed=stream_logs)
                value = collecting.value(self._board, self.ref, outcome)
                if cleanup:
                    self._collected = (value,)
                return cast("R_co", value)
            finally:
                self.free(outcome, cleanup, records=self._collected is not None)

    @hide_frames
    def results(self, timeout: Duration | None = None) -> list[R_co]:
        """Wait for a job with `all_hosts=True`, and return the values of all hosts, by index.

        If any host failed, raise the exception that `result` raises.

        Args:
            timeout: The longest wait, as for `result`.

        Raises:
            UsageError: The job has several hosts, but ran without `all_hosts=True`.
            WaitTimeout: The time has passed; the job keeps running.

        Example:
            ```python
            losses = train.with_options(all_hosts=True).run_async(1000).results()
            ```
        """
        outcome = self.wait(timeout)
        collecting.name_files(self.job_id, [outcome])
        if not outcome.ok:
            raise self._make_error(outcome, is_printed=False)
        return collecting.values(self._board, self.ref, outcome)

    def error(self, *, is_printed: bool = False) -> BaseException | None:
        """Return the exception that `result` raises; None if the job succeeded or is running.

        Args:
            is_printed: Leave the leader's last lines out of the message, because they were printed.
        """
        outcome = self.outcome()
        return (
            None
            if outcome is None or outcome.ok
            else self._make_error(outcome, is_printed=is_printed)
        )

    @hide_frames
    def compile_report(self) -> CheckReport:
        """Wait for a job with `compile_check=True`, then compile its programs with the compiler of
        the real slice.

        The programs are those of the last attempt. Programs compiled by an earlier call are not
        compiled again.

        Returns:
            The report: which programs fit, their memory, communication and bounds.

        Raises:
            UsageError: The job stored no programs.
            PreflightError: The compiler is not installed on this machine.
        """
        from kinetic._client.compiling import check_programs

        tell = functools.partial(console.notice, repeat=True)
        return check_programs(self._board, self.ref, self.wait().attempt, tell)

    # -- as a future -------------------------------------------------------------------------------

    def done(self) -> bool:
        """True if the job has ended, successfully or not."""
        return self.status().ended

    def cancelled(self) -> bool:
        """True if the job was cancelled and has ended."""
        return self.status() is JobStatus.CANCELLED

    @hide_frames
    def exception(self, timeout: Duration | None = None) -> BaseException | None:
        """Wait for the job and return the exception that `result` raises; None if it succeeded.

        Args:
            timeout: The longest wait, as for `result`.

        Raises:
            WaitTimeout: The time has passed; the job keeps running.
        """
        outcome = self.wait(timeout)
        return None if outcome.ok else self._make_error(outcome, is_printed=False)

    def future(self) -> Future[Any]:
        """Return a `concurrent.futures.Future` of the job's value; it is done when the job has
        ended. `concurrent.futures.wait` and `as_completed` also accept the handle itself."""
        if self._own_future is None or self._own_future.pid != os.getpid():
            self._own_future = futures.JobFuture(self)  # A forked process has its own watcher.
        return self._own_future

    def add_done_callback(self, fn: Callable[[JobHandle[R_co]], object]) -> None:
        """Call `fn` with this handle when the job ends; at once if it has ended.

        Callbacks run in the order in which they were added, in a daemon thread, which does not keep
        the process alive. An exception in a callback is logged.

        Example:
            ```python
            job.add_done_callback(lambda job: print(job.job_id, job.status()))
            ```
        """
        call = functools.partial(futures.call_back, fn, self, futures.loop_of(fn))
        if self.done():
            return call()
        self._callbacks.append((fn, call))

        def call_unless_removed(_: object) -> None:
            if any(each is call for _, each in self._callbacks):
                call()

        return self.future().add_done_callback(call_unless_removed)

    def remove_done_callback(self, fn: Callable[[JobHandle[R_co]], object]) -> int:
        """Remove the callback `fn`; return how often it had been added."""
        before = len(self._callbacks)
        self._callbacks = [each for each in self._callbacks if each[0] != fn]
        return before - len(self._callbacks)

    def __await__(self) -> Generator[Any, Any, R_co]:
        """Return the value from async code, as `result()` does: `loss = await job`. Cancelling the
        await leaves the job running."""
        return self._await_result().__await__()

    async def _await_result(self) -> R_co:
        __tracebackhide__ = True
        with hide_frames:
            await futures.wait_for_end(self)
            return await futures.run_in_thread(self.result)

    # -- ending ------------------------------------------------------------------------------------

    @hide_frames
    def cancel(self, cleanup_timeout: Duration = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job. Its records stay. An ended job is not changed.

        Args:
            cleanup_timeout: The longest wait for the job to stop, then a warning is logged; 0 does
                not wait.
            cleanup_poll_interval: Accepted for older scripts and ignored.
        """
        limit_s = patience_s(cleanup_timeout)
        self._backend.cancel(self.ref)
        if not limit_s:
            return
        try:
            self._watch(LogRequest(hosts=()), timeout=limit_s)
        except NotFound:
            pass
        except WaitTimeout:
            _log.warning(
                "%s was cancelled, but has not stopped within %g s. `kinetic jobs status %s` shows "
                "its state.",
                self.job_id,
                limit_s,
                self.job_id,
            )

    @hide_frames
    def kill_hosts(
        self,
        slice: int | None = None,
        host: int | None = None,
        *,
        signal: str | int = "KILL",
        agents: bool = False,
    ) -> tuple[int, ...]:
        """Kill hosts of the running job on purpose, to test how it handles their loss: the job
        fails, or continues in a new attempt.

        Args:
            slice: The index of the slice whose hosts to kill.
            host: Kill only this host of the slice; without `slice`, this host of the job.
            signal: KILL simulates a crash. TERM asks the function to end; with `agents`, it
                simulates preemption. On a cluster, the hosts' pods are deleted: with KILL at once,
                with TERM after their grace period.
            agents: Signal the hosts' agents instead of the processes that run the function.

        Returns:
            The indices of the killed hosts in the job. With a single controller, which is host 0,
            the machines of the slices count from 1.

        Raises:
            UsageError: The slice, the host or the signal does not exist.
            NotFound: The job has ended, or does not run on these hosts now.
        """
        hosts, signum = killing.choose_hosts(self.ref, slice, host), killing.signal_of(signal)
        if self.status().ended:
            raise NotFound(f"{self.job_id} has ended, so it has no hosts to kill.")
        if not isinstance(self._backend, Kills):
            raise UsageError(
                f"Hosts of {self.job_id} cannot be killed: its backend, {self._backend.name!r}, "
                "does not support that."
            )
        killed = self._backend.kill(self.ref, hosts, signum, agents=agents)
        if not killed:
            names = killing.name_machines(self.ref, hosts, of_all=True)
            raise NotFound(
                f"{self.job_id} does not run on {names} at present: the job is starting or has "
                "ended. Nothing was killed."
            )
        return killed

    @hide_frames
    def cleanup(
        self,
        k8s: bool = True,
        gcs: bool = True,
        cleanup_timeout: Duration = 180,
        cleanup_poll_interval: float = 2,
    ) -> None:
        """Remove the job, after stopping it if it runs.

        Args:
            k8s: Remove the backend's resources: pods, processes, Ray jobs.
            gcs: Remove the records in the store: logs, result, events.
            cleanup_timeout: The longest wait for a running job to stop.
            cleanup_poll_interval: Accepted for older scripts and ignored.

        Raises:
            UsageError: The job is running, and `k8s` is False.
            WaitTimeout: The job did not stop in time.
        """
        if not self.status().ended:
            if not k8s:
                raise UsageError(
                    f"{self.job_id} is still running. Cancel it first, or clean up without "
                    "k8s=False (--no-k8s): that cancels it, too."
                )
            self.cancel(cleanup_timeout=0)
            with contextlib.suppress(NotFound):
                self._watch(LogRequest(hosts=()), timeout=cleanup_timeout)
        self.remove(k8s=k8s, gcs=gcs)

    # -- for batches, which have the verdict already -----------------------------------------------

    def fetch_value(self, outcome: Outcome) -> bytes:
        """Return the pickled value of a job that succeeded. Raises the errors of `result`."""
        return b"" if self._collected else collecting.fetch(self._store, self.ref, outcome)

    def load_value(self, data: bytes, *, keeps: bool) -> Any:
        """Unpickle a value that `fetch_value` returned; with `keeps`, cache it for `result`."""
        if self._collected is None:
            value = collecting.load(self._board, self.ref, data)
            self._collected = (value,) if keeps else None
            return value
        return self._collected[0]

    def free(self, outcome: Outcome, cleanup: bool | None, *, records: bool) -> None:
        """Free an ended job's resources on the backend, as `cleanup` of `result` says; with
        `records`, also remove its records. Errors are logged: the caller still gets the value."""
        if not (not self.debug if cleanup is None else cleanup):
            return
        try:
            self.remove(k8s=True, gcs=records)
        except (KineticError, OSError) as error:
            _log.warning(
                "%s has ended, but could not be cleaned up; `kinetic jobs cleanup %s` tries again. "
                "The error: %s",
                self.job_id,
                self.job_id,
                error,
            )

    def remove(self, *, k8s: bool, gcs: bool) -> None:
        """Remove an ended job's resources on the backend (`k8s`), its records (`gcs`), or both."""
        if k8s:
            self._backend.cleanup(self.ref)
        if gcs:
            stored.remove(self._store, self.job_id)

    # -- inside ------------------------------------------------------------------------------------

    def _make_error(self, outcome: Outcome, *, is_printed: bool) -> BaseException:
        return collecting.error(
            self._board,
            self.ref,
            self._board.explain(self.ref, outcome),
            lambda host: (
                ""
                if is_printed and host == 0
                else collecting.read_tail(self.chunks, host, outcome.attempt)
            ),
        )

    def _watch(
        self,
        request: LogRequest,
        printer: Printer | None = None,
        timeout: Duration | None = None,
        on_status: OnStatus | None = None,
        abandoned: threading.Event | None = None,
    ) -> Outcome:
        patience = math.inf if timeout is None else patience_s(timeout)
        deadline = self._clock() + patience
        report_status = StatusWatch(self.status, on_status, self._clock)
        show = notebook.open_display(
            lambda outcome: notebook.draw_picture(self.picture(outcome)), self._clock
        )
        with show or contextlib.nullcontext():
            for event in following.follow(self._backend, self._store, self.ref, request):
                if isinstance(event, Finished):
                    self._is_over = True
                    report_status(event.outcome)
                    if show is not None:
                        show(event.outcome)
                    return event.outcome
                if isinstance(event, Waiting) and printer is not None:
                    console.notice(event.line_for(self.ref))
                if isinstance(event, LogChunk) and printer is not None:
                    if show is not None:
                        show.before(event.data)
                    printer.write(event)
                report_status()
                if show is not None:
                    show()
                fault = event.fault if isinstance(event, Tick) else ""
                if abandoned is not None and abandoned.is_set():
                    console.notice(f"\n{self._describe_interrupted()}", repeat=True)
                    raise WaitTimeout(
                        f"The wait for {self.job_id} was cancelled. The job keeps running."
                    )
                if self._clock() >= deadline and not self._has_ended():
                    why = f"{self.job_id} has not ended within {patience:g} s."
                    raise WaitTimeout(f"{why} {console.describe_timeout(self.job_id, fault)}")
        raise NotFound(f"{self.job_id} ended without an outcome. Run the job again.")

    def _has_ended(self) -> bool:
        with contextlib.suppress(KineticError, OSError):
            return self._read_verdict() is not None or not self._store.has(
                layout.JobKeys(self.job_id).ref
            )
        return False

    def _describe_interrupted(self) -> str:
        has_value = self._collected is not None
        return console.describe_interrupted(self.job_id, ended=self._is_over, has_value=has_value)

    @property
    def _backend(self) -> Backend:
        if self._made_backend is None:
            self._made_backend = registry.make(self.ref.place, self._store)
        return self._made_backend

    @property
    def _board(self) -> JobBoard:
        return JobBoard(self._store, lambda _: self._backend, time.time)

    def _read_verdict(self) -> Outcome | None:
        return self._board.verdict(self.ref)


class _InterruptNotice:
    """Prints, as the last line, how to reattach to the job if Ctrl-C ends the `with` block.

    This is a class because `contextlib.contextmanager` sets `__traceback__` of every exception that
    passes, which exceptions that are frozen dataclasses refuse.
    """

    def __init__(self, handle: JobHandle[Any]) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt) and not getattr(error, "__notes__", ()):
            handle = self._handle
            console.print_last(error, handle._describe_interrupted(), handle._has_ended)
