"""The handle of a batch, in the process that submits it or in any other."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from kinetic._client import notebook
from kinetic._client.batch.failures import batch_error, error_of
from kinetic._client.batch.inputs import InputState
from kinetic._client.batch.progress import BatchProgress, progress_line, stream_for
from kinetic._client.batch.records import BatchRecords
from kinetic._client.batch.run import AttachedView, BatchView
from kinetic._client.board import console
from kinetic._client.futures import ask_alike
from kinetic._client.handle import JobHandle
from kinetic._client.result import name_files
from kinetic._config import settings
from kinetic._core.duration import Duration, patience_s
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._core.tracebacks import hide_frames
from kinetic._store.base import Store
from kinetic._store.many import at_once
from kinetic._store.open import open_store
from kinetic.errors import KineticError, UsageError, WaitTimeout

R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("kinetic.batch")
_FOR_EVER_S = 3600.0
_STOPPING_S = 180.0
_READ_AT_ONCE = 256
"""Maximum number of inputs whose values are fetched together."""


class BatchHandle(Generic[R_co]):
    """A batch: one function over many inputs, a job for each. All methods work from any process,
    also after the batch has ended.

    Attributes:
        group_id: The batch's id, "grp-" and 8 hex digits.
        name: The batch's name for users.
        tags: The caller's notes.

    Example:
        ```python
        batch = train.run_async_map([{"lr": 1e-3}, {"lr": 1e-4}])
        losses = batch.results()
        ```
    """

    def __init__(self, view: BatchView) -> None:
        self._own_view, self._pid = view, os.getpid()
        batch = view.records.batch
        self.group_id, self.name, self.tags = batch.group_id, batch.name, batch.tags
        self._reported = len(view.finished)

    def __repr__(self) -> str:
        limit, total = self._view.rules.max_concurrent, len(self)
        at_once = f", {limit} at a time" if limit is not None and limit < total else ""
        return (
            f"<BatchHandle {self.group_id}: {self.name}, {total} "
            f"{'input' if total == 1 else 'inputs'}{at_once}>"
        )

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        self._view.catch_up()
        states = [str(state) for state in self._view.states]
        return drawing.batch_html(self.name, (self.group_id,), states)

    def __len__(self) -> int:
        return self._own_view.records.batch.total

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen_batch, (self._own_view.records.store.uri, self.group_id)

    # -- state -------------------------------------------------------------------------------------

    @property
    def jobs(self) -> list[JobHandle[R_co] | None]:
        """The jobs in the order of the inputs; None for an input without a job."""
        self._view.catch_up()
        return list(self._view.handles)

    @hide_frames
    def statuses(self) -> list[tuple[int, JobStatus]]:
        """Return (index, status) of each input that has a job, in order."""
        view = self._view
        view.catch_up()
        with view.changes:
            running, outcomes = view.list_running(), dict(view.outcomes)
        standings = ask_alike(running, lambda job, refs: job.read_standings(refs))
        statuses = {
            job.ref.group_index or 0: standing.status
            for job, standing in zip(running, standings, strict=True)
        }
        statuses |= {i: status_of_verdict(outcome.verdict) for i, outcome in outcomes.items()}
        statuses |= {
            i: JobStatus.NOT_FOUND for i in view.list_inputs(InputState.REMOVED) if view.handles[i]
        }
        return sorted(statuses.items())

    def status_counts(self) -> dict[str, int]:
        """Return the number of jobs by status."""
        return dict(Counter(str(status) for _, status in self.statuses()))

    def failures(self) -> list[JobHandle[R_co]]:
        """Return the jobs that failed or were cancelled, in the order of the inputs.

        Example:
            ```python
            for job in batch.failures():
                print(job.group_index, job.error())
            ```
        """
        failed = (JobStatus.FAILED, JobStatus.CANCELLED)
        jobs = (self._view.handles[i] for i, status in self.statuses() if status in failed)
        return [job for job in jobs if job is not None]

    @property
    def submission_failures(self) -> dict[int, Exception]:
        """The errors of inputs that could not be submitted, by index."""
        self._view.catch_up()
        return {i: self._view.errors[i] for i in self._view.list_inputs(InputState.REFUSED)}

    @property
    def unavailable_children(self) -> dict[int, str]:
        """Ids of jobs whose records were removed, by index."""
        self._view.catch_up()
        batch = self._view.records.batch
        return {i: batch.job_id(i) for i in self._view.list_inputs(InputState.REMOVED)}

    # -- waiting -----------------------------------------------------------------------------------

    @hide_frames
    def wait(self, timeout: Duration | None = None, *, progress: bool = True) -> None:
        """Wait until every input has ended, whether or not its job succeeded.

        Args:
            timeout: The longest wait: seconds, "90s", "1h30m" or a `timedelta`; None waits until
                all have ended.
            progress: Show the progress: a bar on a terminal, a drawing in a notebook, elsewhere a
                line on stderr for each input that ends.

        Raises:
            WaitTimeout: The time has passed; the batch keeps running.
        """
        with self._interruptible():
            for _ in self._iterate_ends(timeout, progress):
                pass

    def as_completed(
        self, poll_interval: float = 5, timeout: Duration | None = None
    ) -> Iterator[JobHandle[R_co]]:
        """Yield jobs in the order in which they end, also while the batch still submits jobs.

        Args:
            poll_interval: Accepted for older scripts and ignored: a job is yielded as soon as it
                has ended.
            timeout: The longest wait for all jobs, as for `wait`.

        Raises:
            WaitTimeout: The time has passed; the batch keeps running.

        Example:
            ```python
            for job in batch.as_completed():
                print(job.group_index, job.result())
            ```
        """
        patience_s(poll_interval)
        ends = self._iterate_ends(timeout, progress=False)
        while True:
            with hide_frames, self._interruptible():
                indices = next(ends, None)
            if indices is None:
                return
            for index in indices:
                job = self._view.handles[index]
                if job is not None and self._view.states[index] is not InputState.REMOVED:
                    yield job

    @overload
    def results(
        self,
        timeout: Duration | None = None,
        ordered: bool = True,
        cleanup: bool | None = None,
        return_exceptions: Literal[False] = False,
        *,
        progress: bool = True,
    ) -> list[R_co]: ...

    @overload
    def results(
        self,
        timeout: Duration | None = None,
        ordered: bool = True,
        cleanup: bool | None = None,
        *,
        return_exceptions: bool,
        progress: bool = True,
    ) -> list[R_co | BaseException]: ...

    @hide_frames
    def results(
        self,
        timeout: Duration | None = None,
        ordered: bool = True,
        cleanup: bool | None = None,
        return_exceptions: bool = False,
        *,
        progress: bool = True,
    ) -> list[Any]:
        """Wait for all inputs and return their values. Works any number of times.

        Args:
            timeout: The longest wait, as for `wait`.
            ordered: Return values in the order of the inputs; otherwise in the order in which the
                inputs ended.
            cleanup: None frees the backend's resources and keeps the records; True also removes the
                records of jobs that succeeded; False leaves everything. The records of failed jobs,
                and of the batch itself, always stay.
            return_exceptions: Return the exception of a failed input in place of its value.
            progress: Show the progress, as for `wait`.

        Raises:
            BatchError: Inputs have no value, and `return_exceptions` is False.
            WaitTimeout: The time has passed; the batch keeps running.
        """
        values: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        with self._interruptible():
            for indices in self._iterate_ends(timeout, progress):
                for at in range(0, len(indices), _READ_AT_ONCE):
                    self._read(indices[at : at + _READ_AT_ONCE], cleanup, values, failed)
            if not cleanup:
                name_files(self.group_id, [*self._view.outcomes.values()])
            if failed and not return_exceptions:
                raise batch_error(self._view, values, failed)
        return [values[index] for index in (range(len(values)) if ordered else values)]

    def _read(
        self,
        indices: Sequence[int],
        cleanup: bool | None,
        values: dict[int, Any],
        failed: dict[int, BaseException],
    ) -> None:
        """Read the values and errors of ended inputs in parallel, and free their jobs' resources as
        `cleanup` says. An input's error is stored in both `values` and `failed`."""
        view, threads = self._view, self._view.records.store.calls_at_once

        def fetch(index: int) -> bytes | BaseException | None:
            try:
                job, error = view.handles[index], error_of(view, index)
                return (
                    error
                    if error is not None or job is None
                    else job.fetch_value(view.outcomes[index])
                )
            except KineticError as unreadable:  # The value or the records were removed.
                return unreadable

        def free(job: JobHandle[Any]) -> None:
            is_read = cleanup is True and job.group_index not in failed
            job.free(view.outcomes[job.group_index or 0], cleanup, records=is_read)

        for index, answer in zip(indices, at_once(fetch, indices, threads), strict=True):
            job = view.handles[index]
            try:
                if isinstance(answer, BaseException):
                    values[index] = failed[index] = answer
                elif job is not None and answer is not None:
                    values[index] = job.load_value(answer, keeps=cleanup is True)
            except KineticError as unreadable:  # The value cannot be unpickled here.
                values[index] = failed[index] = unreadable
        jobs = [view.handles[index] for index in indices if index in view.outcomes]
        at_once(free, [job for job in jobs if job is not None], threads)

    # -- ending ------------------------------------------------------------------------------------

    @hide_frames
    def cancel(self) -> None:
        """Submit nothing more, and stop the running jobs. An ended batch is not changed.

        Waits up to three minutes for the jobs to stop, then logs a warning.
        """
        try:
            self._stop()
        except WaitTimeout as error:
            _log.warning("%s was cancelled, but has not ended yet. %s", self.group_id, error)

    def _stop(self) -> None:
        view = self._view
        view.cancel("the batch was cancelled")
        try:
            self.wait(_STOPPING_S, progress=False)
        except WaitTimeout as error:
            if view.is_submitting or not view.list_inputs(InputState.WAITING):
                raise
            raise WaitTimeout(
                f"{self._describe_ends()}. The batch is cancelled, but the process that submits "
                f"its inputs ({view.records.read_stamp() or 'not this one'}) does not answer and "
                "may be suspended. Resume or end that process: it submits no more inputs."
            ) from error

    @hide_frames
    def cleanup(self, k8s: bool = True, gcs: bool = True) -> None:
        """Remove the batch and its jobs, after stopping running jobs.

        Args:
            k8s: Remove the backend's resources: pods, processes, Ray jobs.
            gcs: Remove the records of the batch and its jobs in the store.

        Raises:
            UsageError: The batch is running, and `k8s` is False.
            WaitTimeout: The jobs did not stop within three minutes.
        """
        view = self._view
        view.settle()
        if not view.is_done:
            if not k8s:
                raise UsageError(
                    f"{self.group_id} is still running. Cancel it first, or clean up without "
                    "k8s=False (--no-k8s): that cancels it, too."
                )
            self._stop()
        jobs = [job for job in view.handles if job is not None]
        at_once(lambda job: job.remove(k8s=k8s, gcs=gcs), jobs, view.records.store.calls_at_once)
        if gcs:
            view.records.remove()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _view(self) -> BatchView:
        """The state of the inputs. A fork of the submitting process reads it from the store."""
        if self._pid != os.getpid():
            self._own_view, self._pid = AttachedView(self._own_view.records), os.getpid()
        return self._own_view

    def _iterate_ends(self, timeout: Duration | None, progress: bool) -> Iterator[list[int]]:
        """Yield lists of inputs as they end; the first list has those that have already ended."""
        patience = math.inf if timeout is None else patience_s(timeout)
        deadline = time.monotonic() + patience
        view, yielded = self._view, 0
        drawing = None
        if progress:
            drawing = notebook.open_display(
                lambda _: {"text/html": self._repr_html_(), "text/plain": progress_line(view)},
                time.monotonic,
            )
        bar = BatchProgress(view, stream_for(progress), time.monotonic)
        with drawing or contextlib.nullcontext(), bar, view.watch_jobs():
            while True:
                with view.changes:
                    known_events, ended = view.events, view.finished[yielded:]
                for number, index in enumerate(ended, yielded + 1):
                    # Do not show inputs again that ended in an earlier wait, or before attaching.
                    if number > self._reported:
                        bar.show_end(index)
                        self._reported = number
                yielded += len(ended)
                if ended:
                    yield ended
                with view.changes:
                    is_over = view.is_done and yielded == len(view.finished)
                if drawing is not None:
                    drawing(over=is_over)
                if is_over:
                    return
                bar.show_wait()
                rest_s = min(deadline - time.monotonic(), _FOR_EVER_S)
                if rest_s <= 0:
                    raise WaitTimeout(
                        f"After {patience:g} s, {self._describe_ends()}. The batch keeps running; "
                        f"{describe_reattaching(self.group_id)}"
                    )
                view.wait_for_event(
                    min(rest_s, notebook.QUICK_S) if drawing is not None else rest_s, known_events
                )

    def _describe_ends(self) -> str:
        done = len(self._view.finished)
        return (
            f"{done} of {len(self)} inputs of {self.group_id} {'has' if done == 1 else 'have'} "
            "ended"
        )

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """On Ctrl-C in the `with` block, print what keeps running and how to reattach."""
        try:
            yield
        except KeyboardInterrupt:
            rest = "; this process still submits the rest" * self._view.is_submitting
            console.notice(
                f"\nkinetic: {self._describe_ends()}, the other inputs keep running{rest}; "
                f"{describe_reattaching(self.group_id)}",
                repeat=True,
            )
            raise


def describe_reattaching(group_id: str) -> str:
    """Return instructions for reattaching to a batch and for stopping it."""
    return (
        f'reattach with kinetic.attach_batch("{group_id}").results(), '
        f'or stop it with kinetic.attach_batch("{group_id}").cancel().'
    )


@hide_frames
def attach_batch(
    group_id: str,
    project: str | None = None,
    cluster: str | None = None,
    poll_interval: Duration = 10,
    poll_timeout: Duration = 1800,
) -> BatchHandle[Any]:
    """Return the handle of a batch that this or any other process submits, or has submitted.

    Args:
        group_id: The batch's id.
        project: The project whose batches to search, instead of the configured one.
        cluster: The cluster whose batches to search, instead of the configured one.
        poll_interval: The longest time between two reads of newly submitted jobs.
        poll_timeout: Accepted for older scripts and ignored. The death of the submitting process is
            noticed at once on its own machine, and after two minutes on other machines.

    Raises:
        NotFound: No batch has this id.
        UsageError: `group_id` is not a batch's id.

    Example:
        ```python
        losses = kinetic.attach_batch("grp-1a2b3c4d").results()
        ```
    """
    if not isinstance(group_id, str) or not group_id.startswith("grp-") or "/" in group_id:
        raise UsageError(f"{group_id!r} is not a batch id. Ids look like grp-1a2b3c4d.")
    patience_s(poll_timeout)
    chosen = settings.load(flags={"project": project, "cluster": cluster})
    return _attach(open_store(chosen.store), group_id, slowest_s=patience_s(poll_interval))


def _attach(store: Store, group_id: str, *, slowest_s: float = 10.0) -> BatchHandle[Any]:
    return BatchHandle(AttachedView(BatchRecords.open(store, group_id), slowest_s))


def reopen_batch(store_uri: str, group_id: str) -> BatchHandle[Any]:
    """Return the handle of a batch in a store, for unpickling."""
    return _attach(open_store(store_uri), group_id)
