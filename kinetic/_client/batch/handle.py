"""A batch as its caller sees it, from any process.

In: an executor. Out: statuses, jobs as they end, results in the order of the inputs, or one error
with everything that went wrong.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from kinetic._client import notebook
from kinetic._client.batch import interruption
from kinetic._client.batch.executor import BatchExecutor, attach_executor, open_job
from kinetic._client.batch.failures import batch_error, error_of
from kinetic._client.batch.ledger import InputState, Task
from kinetic._client.batch.manifest import Manifest
from kinetic._client.batch.progress import BatchProgress, progress_line, stream_for
from kinetic._client.board import console
from kinetic._client.handle import JobHandle
from kinetic._client.waiter import ask_alike
from kinetic._config import settings
from kinetic._core.duration import Duration, patience_s
from kinetic._core.state import JobStatus
from kinetic._core.tracebacks import own_frames_hidden, waiting_hidden
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic.errors import (
    KineticError,
    NotFound,
    UsageError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome

R_co = TypeVar("R_co", covariant=True)
_log = logging.getLogger("kinetic.batch")
_FOR_EVER_S = 3600.0
_STOPPING_S = 180.0
_UNSUCCESSFUL = (JobStatus.FAILED, JobStatus.CANCELLED)
_KNOWN = {InputState.SUCCEEDED: JobStatus.SUCCEEDED, InputState.GONE: JobStatus.NOT_FOUND}
"""What need not be asked; a job that failed may also have been cancelled."""


class BatchHandle(Generic[R_co]):
    """One function over many inputs. All methods work from any process, and again after everything
    has ended.

    Attributes:
        group_id: "grp-" and 8 hex digits.
        name: as shown to users.
        tags: the caller's notes.
    """

    def __init__(self, executor: BatchExecutor) -> None:
        self._run_by, self._pid = executor, os.getpid()
        batch = executor.manifest.batch
        self.group_id, self.name, self.tags = batch.group_id, batch.name, batch.tags
        self._shown = len(executor.ledger.finished)

    def __repr__(self) -> str:
        limit, total = self._executor.ledger.rules.max_concurrent, len(self.jobs)
        at_once = f", {limit} at a time" if limit is not None and limit < total else ""
        return (
            f"<BatchHandle {self.group_id}: {self.name}, {total} "
            f"{'input' if total == 1 else 'inputs'}{at_once}>"
        )

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        states = [str(task.state) for task in self._tasks()]
        return drawing.batch_html(self.name, (self.group_id,), states)

    def __len__(self) -> int:
        return len(self.jobs)

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen_batch, (self._executor.manifest.store.uri, self.group_id)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def jobs(self) -> list[JobHandle[R_co] | None]:
        """The latest job of each input, in order; None for an input that has
        none."""
        self._executor.catch_up()
        return list(self._executor.handles)

    def statuses(self) -> list[tuple[int, JobStatus]]:
        """Return (index, status) of each input that has a job."""
        tasks = self._tasks()
        jobs = {i: job for i, job in enumerate(self._executor.handles) if job is not None}
        found = _list_statuses([(tasks[index], job) for index, job in jobs.items()])
        return list(zip(jobs, found, strict=True))

    def status_counts(self) -> dict[str, int]:
        """Return the number of jobs by status."""
        counts: dict[str, int] = {}
        for _, status in self.statuses():
            counts[str(status)] = counts.get(str(status), 0) + 1
        return counts

    def failures(self) -> list[JobHandle[R_co]]:
        """Return the jobs that failed or were cancelled and will not be tried again, in the order
        of the inputs."""
        tasks, last = self._tasks(), self._executor.ledger.rules.retries + 1
        pairs = [
            (task, job)
            for task, job in zip(tasks, self._executor.handles, strict=True)
            if job is not None
        ]
        live = [
            pair for pair in pairs if pair[0].state is InputState.LIVE and pair[0].tries >= last
        ]
        found = zip(live, _list_statuses(live), strict=True)
        failed = {job for (_, job), status in found if status in _UNSUCCESSFUL}
        return [job for task, job in pairs if task.state is InputState.FAILED or job in failed]

    @property
    def submission_failures(self) -> dict[int, Exception]:
        """Why inputs could not be submitted, by index."""
        refused = {
            index: task.error
            for index, task in enumerate(self._tasks())
            if task.state is InputState.REFUSED
        }
        return {index: error for index, error in refused.items() if error is not None}

    @property
    def unavailable_children(self) -> dict[int, str]:
        """Ids of jobs whose records are missing, by index."""
        tasks = enumerate(self._tasks())
        return {index: task.job_id for index, task in tasks if task.state is InputState.GONE}

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, timeout: Duration | None = None, *, progress: bool = True) -> None:
        """Wait until every input has ended; raises nothing for inputs that failed.

        Args:
            timeout: the longest wait, in seconds.
            progress: show how far the batch is: a bar on a terminal, a drawing in a notebook,
                elsewhere a line on stderr for each input that ends.

        Raises:
            WaitTimeout: the time has passed; the batch keeps running.
        """
        with waiting_hidden, self.interruptible():
            for _ in self._ends(timeout, progress):
                pass

    def as_completed(
        self, poll_interval: float = 5, timeout: Duration | None = None
    ) -> Iterator[JobHandle[R_co]]:
        """Yield the jobs as they end; for an input that is tried again, only the last job.

        Args:
            poll_interval: accepted for older scripts and ignored: a job is yielded as soon as it
                has ended.
            timeout: the longest wait, in seconds.

        Raises:
            WaitTimeout: the time has passed; the batch keeps running.
        """
        patience_s(poll_interval)
        ends = self._ends(timeout, progress=False)
        while True:
            with waiting_hidden, self.interruptible():
                index = next(ends, None)
            if index is None:
                return
            job = self._executor.handles[index]
            if job is not None and self._executor.ledger.tasks[index].state is not InputState.GONE:
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

    def results(
        self,
        timeout: Duration | None = None,
        ordered: bool = True,
        cleanup: bool | None = None,
        return_exceptions: bool = False,
        *,
        progress: bool = True,
    ) -> list[Any]:
        """Wait for all inputs and return their values. Can be called again.

        Args:
            timeout: the longest wait, in seconds.
            ordered: in the order of the inputs; otherwise as they ended.
            cleanup: None frees what backends hold and keeps the records; True also removes the
                records of jobs that succeeded; False leaves everything. Records of jobs that
                failed, and of the batch itself, always stay.
            return_exceptions: put what an input raised in its place.
            progress: show how far the batch is: a bar on a terminal, a drawing in a notebook,
                elsewhere a line on stderr for each input that ends.

        Raises:
            BatchError: inputs have no value, and `return_exceptions` is False.
            WaitTimeout: the time has passed; the batch keeps running.
        """
        found: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        with waiting_hidden, self.interruptible():
            for index in self._ends(timeout, progress):
                try:
                    error = self._failure(index, cleanup)
                    found[index] = self._value(index, cleanup) if error is None else error
                except KineticError as unreadable:
                    # The value or its records were removed, or it cannot be rebuilt here.
                    found[index] = error = unreadable
                if error is not None:
                    failed[index] = error
            if failed and not return_exceptions:
                raise batch_error(self._executor, found, failed)
        return [found[index] for index in (range(len(found)) if ordered else found)]

    # -- ending ------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Submit nothing more, and stop the running jobs. Cancelling a batch that has ended does
        nothing.

        Waits up to three minutes until they have stopped; after that they are left to stop, with a
        warning.
        """
        try:
            with waiting_hidden:
                self._stop()
        except WaitTimeout as error:
            _log.warning("%s was cancelled: %s", self.group_id, error)

    def _stop(self) -> None:
        executor = self._executor
        executor.cancel("the batch was cancelled")
        try:
            self.wait(_STOPPING_S, progress=False)
        except WaitTimeout as error:
            if executor.submits or not executor.ledger.list_unsubmitted():
                raise
            owner, _ = executor.manifest.owner.read()
            raise WaitTimeout(
                f"{self._stand()}. What submits it has not answered, and may be stopped: "
                f"{owner or 'another process'}. It submits nothing more once it goes on."
            ) from error

    def cleanup(self, k8s: bool = True, gcs: bool = True) -> None:
        """Remove the jobs of the batch: what their backends hold (`k8s`), and their records and
        that of the batch (`gcs`).

        Raises:
            UsageError: only records were to be removed, and jobs are running.
            WaitTimeout: the jobs did not stop within three minutes.
        """
        with waiting_hidden:
            if k8s and (self._executor.submits or not self._executor.ledger.done):
                self._stop()
            manifest, jobs = self._executor.manifest, {job.job_id: job for job in self.jobs if job}
            for ref in manifest.refs():  # Also of tries that others have followed.
                jobs.setdefault(ref.job_id, open_job(manifest, ref))
            for job in jobs.values():
                with contextlib.suppress(NotFound):
                    job.cleanup(k8s=k8s, gcs=gcs)
            if gcs:
                manifest.remove()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _executor(self) -> BatchExecutor:
        """In a fork of the process that submits: one of its own, which only looks."""
        if self._pid != os.getpid():
            self._run_by, self._pid = attach_executor(self._run_by.manifest), os.getpid()
        return self._run_by

    def _tasks(self) -> list[Task]:
        self._executor.catch_up()
        return self._executor.ledger.tasks

    def _ends(self, timeout: Duration | None, progress: bool) -> Iterator[int]:
        """Yield each input as it ends, those that have ended first."""
        patience = math.inf if timeout is None else patience_s(timeout)
        deadline = time.monotonic() + patience
        executor, told = self._executor, 0
        drawing = notebook.open_display(self._draw_progress, time.monotonic) if progress else None
        progress_shown = BatchProgress(
            self.group_id, executor.ledger, executor.changes, stream_for(progress), time.monotonic
        )
        with drawing or contextlib.nullcontext(), progress_shown as shown, executor.watch_jobs():
            while True:
                seen = executor.events
                while told < len(executor.ledger.finished):
                    index = executor.ledger.finished[told]
                    told += 1
                    # Show each end once, and none from before this process attached.
                    if told > self._shown:
                        shown.show_end(index)
                        self._shown = told
                    yield index
                over = executor.ledger.done and not executor.submits
                if drawing is not None:
                    drawing(over=over)
                if over:
                    return
                shown.waits()
                left_s = min(deadline - time.monotonic(), _FOR_EVER_S)
                if left_s <= 0:
                    raise WaitTimeout(
                        f"{self._stand()} within {patience:g} s. It keeps running; "
                        f"{way_back(self.group_id)}"
                    )
                executor.look(
                    min(left_s, notebook.QUICK_S) if drawing is not None else left_s, seen
                )

    def _draw_progress(self, _: Outcome | None) -> dict[str, str]:
        return {
            "text/html": self._repr_html_(),
            "text/plain": progress_line(self.group_id, self._executor.ledger),
        }

    def _failure(self, index: int, cleanup: bool | None) -> BaseException | None:
        """Why an input that has ended has no value; what its job holds is freed."""
        error = error_of(self._executor, index)
        job = self._executor.handles[index]
        if (
            self._executor.ledger.tasks[index].state is InputState.FAILED
            and job
            and cleanup is not False
        ):
            try:
                job.cleanup(k8s=True, gcs=False)
            except (KineticError, OSError) as fault:  # It must not cost the values of the others.
                _log.warning("%s could not be cleaned up: %s", job.job_id, fault)
        return error

    def _value(self, index: int, cleanup: bool | None) -> R_co:
        job = self._executor.handles[index]
        assert job is not None, "an input has succeeded, so it has a job"
        return cast("R_co", job.result(cleanup=cleanup))

    def _stand(self) -> str:
        done = len(self._executor.ledger.finished)
        return (
            f"{done} of {len(self._executor.handles)} inputs of {self.group_id} "
            f"{'has' if done == 1 else 'have'} ended"
        )

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """On Ctrl-C, say what keeps running and how to come back to it."""
        try:
            yield
        except KeyboardInterrupt:
            console.notice(
                f"\nkinetic: {self._stand()}, the others go on{self._rest()}; "
                f"{way_back(self.group_id)}",
                once=False,
            )
            raise

    def _rest(self) -> str:
        if not self._executor.submits:
            return ""
        ends = interruption.stop_on_another(self._submit_no_more)
        return "; this process goes on submitting the rest" + (
            ", another Ctrl-C ends that" if ends else ""
        )

    def _submit_no_more(self) -> None:
        if self._executor.submits:
            self._executor.stop("the process that submitted the batch was interrupted")
            console.notice(
                f"\nkinetic: nothing more of {self.group_id} is submitted; running jobs keep "
                "running.",
                once=False,
            )


def way_back(group_id: str) -> str:
    """Return how to come back to a batch, and how to stop it."""
    return (
        f'come back to it with kinetic.attach_batch("{group_id}").results(), '
        f'stop it with kinetic.attach_batch("{group_id}").cancel().'
    )


def attach_batch(
    group_id: str,
    project: str | None = None,
    cluster: str | None = None,
    poll_interval: Duration = 10,
    poll_timeout: Duration = 1800,
) -> BatchHandle[Any]:
    """Find a batch again, from any process, also while another one still submits it; also on a
    cluster that only a decorator has named.

    Args:
        group_id: its id.
        project: the project to look in, instead of the configured one.
        cluster: the cluster to look in, instead of the configured one.
        poll_interval: the longest time between two looks for newly submitted jobs.
        poll_timeout: after this time without a new job, a batch that is submitted on another
            machine is taken to be complete.

    Raises:
        NotFound: there is no such batch.
    """
    with own_frames_hidden:
        if not isinstance(group_id, str) or not group_id.startswith("grp-") or "/" in group_id:
            raise UsageError(f"{group_id!r} is not a batch id. Ids look like grp-1a2b3c4d.")
        slowest_s, patience = patience_s(poll_interval), patience_s(poll_timeout)
        chosen = settings.load(flags={"project": project, "cluster": cluster})
        store = open_store(chosen.store)
        return _attach(store, group_id, slowest_s=slowest_s, patience_s=patience)


def _attach(
    store: Store, group_id: str, *, slowest_s: float = 10.0, patience_s: float = 1800.0
) -> BatchHandle[Any]:
    try:
        manifest = Manifest.open(store, group_id)
    except NotFound as error:
        raise NotFound(
            f"There is no batch {group_id} in the store {store.uri}. `kinetic jobs list --all "
            "--json` names the batch of each job."
        ) from error
    return BatchHandle(attach_executor(manifest, slowest_s, patience_s))


def reopen_batch(store_uri: str, group_id: str) -> BatchHandle[Any]:
    """Return a batch of one store."""
    return _attach(open_store(store_uri), group_id)


def _list_statuses(pairs: Sequence[tuple[Task, JobHandle[Any]]]) -> list[JobStatus]:
    asked = [job for task, job in pairs if task.state not in _KNOWN]
    found = iter(ask_alike(asked, lambda job, refs: job.look(refs)))
    return [_KNOWN.get(task.state) or next(found).status for task, _ in pairs]
