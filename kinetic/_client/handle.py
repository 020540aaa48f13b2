"""Step 5, outcome: a job as its caller sees it, from any process.

In: `JobRef`, later the hosts' reports. Out: output, the value or the error. A handle holds only the
reference: the store and the backend know the rest. Methods that never wait are in `view`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from kinetic._backends.base import Backend, Kills, LogRequest
from kinetic._client import following, futures, killing, notebook
from kinetic._client import result as collecting
from kinetic._client.board import console
from kinetic._client.board.console import Printer, hide_frames
from kinetic._client.board.line_prefix import Prefixer
from kinetic._client.following import Finished, OnStatus, StatusWatch, Tick, Waiting
from kinetic._client.view import JobView
from kinetic._core import layout
from kinetic._core.duration import Duration, patience_s
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.tracebacks import waiting_hidden
from kinetic._store import index as stored
from kinetic._store.base import Store
from kinetic.errors import KineticError, NotFound, StoreError, UsageError, WaitTimeout

if TYPE_CHECKING:
    from kinetic._client.debugging import PortForward
    from kinetic._compile.checked import CheckReport

R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("kinetic.handle")


class JobHandle(JobView, Generic[R_co]):
    """One job. All methods work from any process, and again after the job has ended.

    The fields of the reference are attributes: `job_id`, `place`, `backend`, `accelerator`,
    `func_name`, `display_name`, `project`, `cluster_name`, `zone`, `namespace`,
    `bucket_name`, `k8s_name`, `image_uri`, `group_id`, `debug`, ...
    """

    def __init__(
        self,
        ref: JobRef,
        backend: Backend | None = None,
        store: Store | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ref, backend, store)
        self._clock = clock
        self._collected: tuple[Any] | None = None
        self._callbacks = futures.Callbacks(self)
        self._left = self._is_over = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.ref == self.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __reduce__(self) -> tuple[Any, ...]:
        return JobHandle.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobHandle[Any]:
        """Rebuild a handle from `to_dict`; unknown keys are ignored."""
        return JobHandle(JobRef.from_json(data))

    # -- output ------------------------------------------------------------------------------------

    def add_to_batch(self, group_id: str, index: int) -> JobHandle[R_co]:
        """Make the job a member of a batch; return a handle that says so."""
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

    @hide_frames
    def logs(
        self,
        follow: bool = False,
        host: int = 0,
        all_hosts: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> str | None:
        """Return what a host printed so far; with `follow`, print it as it arrives until the job
        ends, and return None.

        Args:
            follow: stream to stdout and stderr instead.
            host: which host; 0 is the leader.
            all_hosts: all of them, each line with "[host 3] " in front.
            tail: only the last lines of each host, this many.
            attempt: only this attempt, from 1; by default all of them, in order.
        """
        hosts = None if all_hosts else (self._check_host(host),)
        request = LogRequest(hosts=hosts, follow=follow, tail=tail, attempt=attempt)
        if follow:
            self._watch(request, Printer(prefixed=all_hosts))
            return None
        mark = Prefixer(hosts=all_hosts).add
        shown = [mark(chunk) for chunk in self.chunks(request) if chunk is not None]
        return b"".join(shown).decode("utf-8", "replace")

    def tail(self, n: int = 100, host: int = 0) -> str:
        """Return the last n lines that a host printed."""
        return self.logs(tail=n, host=host)

    @hide_frames
    def debug_attach(self, local_port: int = 5678, working_dir: str | None = None) -> PortForward:
        """Wait until the debugger of a debug job listens, bring it to a port of this machine, and
        say how to attach.

        Args:
            local_port: the port; 0 takes any free one.
            working_dir: where the job's source is on this machine; by default where it was sent
                from.

        Returns:
            An object that forwards the port, with `poll`, `wait` and `terminate` like a
            `subprocess.Popen`.

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

    # -- waiting -----------------------------------------------------------------------------------

    @hide_frames
    def wait(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the job has ended and return the verdict; raises nothing for a job that
        failed.

        Raises:
            WaitTimeout: `timeout` seconds have passed; the job keeps running.
        """
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
        """Wait for the job and return the leader's value, or raise what the function raised. Can be
        called again.

        Args:
            timeout: the longest wait: seconds, "90s", "1h30m" or a timedelta; None waits until the
                job ends.
            cleanup: None frees what the backend holds and keeps the records; True also removes the
                records of a job that succeeded; False leaves everything. Records of a job that
                failed always stay.
            cleanup_timeout: seconds that freeing may take.
            cleanup_poll_interval: accepted for older scripts and ignored.
            stream_logs: print the leader's output while waiting.
            on_status_change: called with each new status.

        Raises:
            WaitTimeout: the time has passed; the job keeps running.
            JobFailed: the job failed, but not with an exception of the function that can be rebuilt
                here.
        """
        __tracebackhide__ = True  # Notebooks and pytest hide this frame.
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
            value = collecting.value(self._board, self.ref, outcome)
            if cleanup:
                self._collected = (value,)
            return cast("R_co", value)
        finally:
            if free:
                self._free(records=self._collected is not None, timeout=cleanup_timeout)

    @hide_frames
    def results(self, timeout: Duration | None = None) -> list[R_co]:
        """Wait for the job and return the values of all hosts, by index; for jobs that were run
        with `all_hosts=True`.

        The first of them is what `result` returns. Raises what `result` raises if the job failed on
        any host.

        Args:
            timeout: the longest wait, as for `result`.

        Raises:
            UsageError: the job has several hosts, and only the leader's value was kept.
            WaitTimeout: the time has passed; the job keeps running.
        """
        outcome = self.wait(timeout)
        if not outcome.ok:
            raise self._error(outcome, seen=False)
        return collecting.values(self._board, self.ref, outcome)

    def error(self, *, seen: bool = False) -> BaseException | None:
        """Return what `result` raises for this job, or None if it succeeded or is running.

        Args:
            seen: the leader's output has been shown, so the message does not repeat its last lines.
        """
        outcome = self.outcome()
        return None if outcome is None or outcome.ok else self._error(outcome, seen=seen)

    @hide_frames
    def compile_report(self) -> CheckReport:
        """Wait for a job with `compile_check=True`; compile the programs of its last attempt with
        the compiler of the real slice, and return what that says. What was compiled before is not
        compiled again.

        Raises:
            UsageError: the job kept no programs.
            PreflightError: the compiler is not installed here.
        """
        from kinetic._client.compiling import check_programs

        tell = functools.partial(console.notice, once=False)
        return check_programs(self._board, self.ref, self.wait().attempt, tell)

    # -- as a future -------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        return self.status().ended

    def cancelled(self) -> bool:
        """Return whether the job has ended because it was cancelled."""
        return self.status() is JobStatus.CANCELLED

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
        keep the process alive. An exception in one is logged and has no other effect.
        """
        self._callbacks.add(fn)

    def remove_done_callback(self, fn: Callable[[JobHandle[R_co]], object]) -> int:
        """Do not call `fn` any more; return how often it had been added."""
        return self._callbacks.remove(fn)

    def __await__(self) -> Generator[Any, Any, R_co]:
        """Wait as `result()` does, without blocking the asyncio event loop. Cancelling the wait
        leaves the job running."""
        return self._await_result().__await__()

    async def _await_result(self) -> R_co:
        __tracebackhide__ = True
        await futures.wait_for_end(self)
        return await futures.beside(self.result, daemon=True)

    def leave(self) -> None:
        """End the wait in another thread, and say how to come back to the job."""
        self._left = True
        self._is_over = self._is_over or futures.ask_briefly(self._is_known_to_be_over)
        console.notice(f"\n{self._parting_words()}", once=False)

    # -- ending ------------------------------------------------------------------------------------

    def cancel(self, cleanup_timeout: Duration = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job. Its records stay; cancelling a job that has ended does nothing.

        Waits up to `cleanup_timeout` seconds until it has stopped; after that it is left to stop,
        with a warning. With 0 it does not wait.
        """
        limit_s = patience_s(cleanup_timeout)
        with waiting_hidden:
            self._backend.cancel(self.ref)
            if limit_s:
                self._wait_for_the_end(limit_s)

    def kill_hosts(
        self,
        slice: int | None = None,
        host: int | None = None,
        *,
        signal: str | int = "KILL",
        agents: bool = False,
    ) -> tuple[int, ...]:
        """Kill hosts of the running job on purpose, to see what it does when it loses them. It
        fails, or goes on with another attempt, as if a machine had failed.

        Args:
            slice: the slice whose hosts to kill, from 0.
            host: only this one of the slice; without `slice`, this one of the job.
            signal: KILL is a crash; TERM asks the function to end, and with `agents` takes the
                host away as preemption does. On a cluster the pods are deleted: with KILL at once,
                with TERM they have their time to end.
            agents: signal the agents of the hosts instead of the processes that run the function.

        Returns:
            The hosts that were sent the signal, by index in the job. Where a single controller has
            all slices, their machines count from 1: it is host 0.

        Raises:
            UsageError: there is no such slice, host or signal.
            NotFound: the job has ended, or nothing of it runs on these hosts now.
        """
        hosts, signum = killing.choose_hosts(self.ref, slice, host), killing.signal_of(signal)
        if self.status().ended:
            raise NotFound(f"{self.job_id} has ended: it has no hosts to kill any more.")
        if not isinstance(self._backend, Kills):
            raise UsageError(f"Hosts of the backend {self._backend.name!r} cannot be killed.")
        killed = self._backend.kill(self.ref, hosts, signum, agents=agents)
        if not killed:
            where = killing.name_machines(self.ref, hosts, of_all=True)
            raise NotFound(
                f"Nothing of {self.job_id} runs on {where} at present: it is starting, or has "
                "ended. Nothing was killed."
            )
        return killed

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
            UsageError: only records were to be removed, and the job is running.
            WaitTimeout: the job did not stop within `cleanup_timeout` seconds.
        """
        with waiting_hidden:
            if not self.status().ended:
                if not k8s:
                    raise UsageError(
                        f"{self.job_id} is running and needs its records. Cancel it first, or "
                        "clean up with k8s=True."
                    )
                self.cancel(cleanup_timeout=0)
                with contextlib.suppress(NotFound):
                    self._watch(LogRequest(hosts=()), timeout=cleanup_timeout)
            if k8s:
                self._backend.cleanup(self.ref)
            if gcs:
                stored.remove(self._store, self.job_id)

    # -- inside ------------------------------------------------------------------------------------

    def _error(self, outcome: Outcome, *, seen: bool) -> BaseException:
        return collecting.error(
            self._board,
            self.ref,
            self._board.explain(self.ref, outcome),
            lambda host: (
                ""
                if seen and host == 0
                else collecting.read_tail(self.chunks, host, outcome.attempt)
            ),
        )

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
        show = notebook.open_display(self._draw_progress, self._clock)
        with waiting_hidden, show or contextlib.nullcontext():
            for event in following.follow(self._backend, self._store, self.ref, request):
                if isinstance(event, Finished):
                    self._is_over = True
                    look(event.outcome)
                    if show is not None:
                        show(event.outcome)
                    return event.outcome
                if isinstance(event, Waiting) and printer is not None:
                    console.notice(event.line_for(self.ref))
                if isinstance(event, LogChunk) and printer is not None:
                    if show is not None:
                        show.before(event.data)
                    printer.write(event)
                look()
                if show is not None:
                    show()
                fault = event.fault if isinstance(event, Tick) else ""
                if self._left:
                    why = f"The wait for {self.job_id} was given up."
                    raise WaitTimeout(f"{why} {console.say_it_goes_on(self.job_id, fault)}")
                if self._clock() >= deadline and not self._has_verdict():
                    why = f"{self.job_id} has not ended within {patience:g} s."
                    raise WaitTimeout(f"{why} {console.say_it_goes_on(self.job_id, fault)}")
        raise NotFound(f"{self.job_id} ended without a verdict.")

    def _draw_progress(self, outcome: Outcome | None) -> dict[str, str]:
        return notebook.draw_picture(self.picture(outcome))

    def _has_verdict(self) -> bool:
        with contextlib.suppress(StoreError):  # The time is up all the same.
            return self._read_verdict() is not None
        return False

    def _is_known_to_be_over(self) -> bool:
        with contextlib.suppress(KineticError, OSError):
            return self._read_verdict() is not None or not self._store.has(
                layout.JobKeys(self.job_id).ref
            )
        return False

    def _free(self, *, records: bool, timeout: Duration) -> None:
        """Clean up after the value was fetched; a failure must not cost the value."""
        try:
            self.cleanup(k8s=True, gcs=records, cleanup_timeout=timeout)
        except (KineticError, OSError) as error:
            _log.warning("%s could not be cleaned up: %s", self.job_id, error)

    def _parting_words(self) -> str:
        has_value = self._collected is not None
        return console.say_how_it_is(self.job_id, ended=self._is_over, is_here=has_value)
