"""Runs a batch as its ledger says: submits inputs, waits for their jobs to end, cancels them.

In: a ledger, a manifest, a submitter. Out: jobs, and in the end a ledger in which every input
has ended.

The submitting thread is no daemon: a script that ends after beginning a batch still submits all of
it. The ends of jobs are entered by the thread that watches for all callers, so that Ctrl-C, which
is raised in the main thread, cannot lose one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from kinetic._client import futures
from kinetic._client.batch.ledger import BatchRules, InputState, Ledger
from kinetic._client.batch.manifest import Manifest
from kinetic._client.batch.poller import BatchUpdates
from kinetic._client.batch.submitters import Submitter
from kinetic._client.handle import JobHandle
from kinetic._client.waiter import AwaitedJob
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.ref import JobRef
from kinetic._store.lease import Lease
from kinetic.errors import InsufficientMemory, KineticError, NotFound, SubmitError, text_of

_log = logging.getLogger("kinetic.batch")
IDLE_S = 1.0
"""The longest sleep of a thread before it checks whether another process asked to stop."""


class BatchExecutor:
    """The running of one batch in this process: one that submits it (`submitter`), or one that
    attached to it (`updates`)."""

    def __init__(
        self,
        ledger: Ledger,
        manifest: Manifest,
        submitter: Submitter | None = None,
        updates: BatchUpdates | None = None,
    ) -> None:
        self.ledger = ledger
        self.manifest = manifest
        self.handles: list[JobHandle[Any] | None] = [None] * len(ledger.tasks)
        self.events = 0
        """Grows with every event."""
        self._submitter = submitter
        self.updates = updates
        self.changes = threading.Condition(threading.RLock())
        self._broken: BaseException | None = None
        self._interested = 0
        self._is_at_work = False
        """From `start` until the end of the batch is recorded."""
        self._is_here = self._has_begun = self._is_given_up = False
        self._cancelling = False
        self._refusals = 0
        self._lease: Lease | None = None

    # -- submitting --------------------------------------------------------------------------------

    def start(self, *, here: bool) -> None:
        """Submit everything: in this thread, or in one of its own."""
        assert self._submitter is not None
        self._is_here = here
        self._lease = self.manifest.hold()
        futures.watcher().hold()
        self._is_at_work = True
        if here:
            return self._work()
        name = f"kinetic-{self.manifest.batch.group_id}"
        threading.Thread(target=self._work, name=name, daemon=False).start()
        return None

    def give_up(self, why: str, patience_s: float) -> None:
        """Submit nothing more after `start` was interrupted, and wait until nothing is being
        submitted."""
        self.stop(why)
        with self.changes:
            self._is_given_up = True
            is_ours = self._is_here or not self._has_begun
        if is_ours and self._submitter is not None:
            self._end_submitting()
        with self.changes:
            self.changes.wait_for(lambda: not self._is_at_work, patience_s)

    def _work(self) -> None:
        with self.changes:
            if self._is_given_up:
                return
            self._has_begun = True
        try:
            with self.watch_jobs():
                while self._step():
                    pass
        except BaseException as error:
            # Wake all waiters.
            self.stop(f"submitting failed: {type(error).__name__}: {text_of(error)}")
            raise
        finally:
            self._end_submitting()

    def _step(self) -> bool:
        """Submit one input, or wait until that is possible; return whether there is more to do."""
        with self.changes:
            seen, index = self.events, self.ledger.take()
        # Only now: what made room may have been cancelled by another process, after it asked.
        self._obey()
        if index is not None:
            self._submit(index)
            return True
        with self.changes:
            submits = self.ledger.submits
        if submits:
            self.look(IDLE_S, seen)
        return submits

    def _submit(self, index: int) -> None:
        assert self._submitter is not None
        with self.changes:
            if self.ledger.stopped:
                self.ledger.give_back(index)
                return self._tell()
        batch, tries = self.manifest.batch, self.ledger.tasks[index].tries
        try:
            handle = self._submitter.submit(
                batch.group_id, index, batch.jobs[index][tries] if batch.jobs else ""
            )
            if not self._submitter.known_ids:
                self.manifest.note_job(index, tries + 1, handle.ref)
        except InsufficientMemory as error:
            self._wait_or_refuse(index, error)
        except Exception as error:  # noqa: BLE001 - packing runs the user's code; one input must not end the others
            self._refuse(index, error)
        except BaseException as error:
            self._refuse(
                index,
                SubmitError(
                    f"Input {index} was not submitted: {type(error).__name__}: {text_of(error)}"
                ),
            )
            if not isinstance(error, SystemExit):
                raise
        else:
            self._take_up(index, handle)

    def _take_up(self, index: int, handle: JobHandle[Any]) -> None:
        with self.changes:
            self.handles[index] = handle
            self.ledger.mark_submitted(index, handle.ref)
            futures.watcher().add(handle, self._enter)
            self._tell()
            unwanted = self._cancelling
        if unwanted:
            _cancel(handle)

    def _wait_or_refuse(self, index: int, error: InsufficientMemory) -> None:
        """If the machine is full, the input waits until another job has ended."""
        with self.changes:
            seen, others = self.events, any(True for _ in self.ledger.live())
            if others:
                self.ledger.give_back(index)
        if others:
            self.look(IDLE_S, seen)
        else:
            self._refuse(index, error)

    def _refuse(self, index: int, error: Exception) -> None:
        # Usually all have the same reason: warn only of the first.
        level = logging.INFO if self._refusals else logging.WARNING
        self._refusals += 1
        _log.log(
            level,
            "kinetic: input %d of %s was not submitted: %s",
            index,
            self.manifest.batch.group_id,
            text_of(error),
        )
        with _logged("the reason could not be kept"):
            self.manifest.note_refused(index, error)
        with self.changes:
            self.ledger.mark_refused(index, error)
            self._tell()
        self._cancel_after_failure()

    def _obey(self) -> None:
        """Stop if another process asked for it."""
        with _logged("whether to stop cannot be seen"):
            if not self.ledger.stopped and self.manifest.is_to_stop():
                self.cancel("another process cancelled the batch")

    def _end_submitting(self) -> None:
        with self.changes:
            if self._lease is None:
                return  # Nothing was begun.
            skipped = [
                i for i, task in enumerate(self.ledger.tasks) if task.state is InputState.SKIPPED
            ]
        with _logged("the end of the batch could not be kept"):
            self.manifest.note_end(self.ledger.stopped, skipped)
        self._lease.release()
        futures.watcher().release()
        with self.changes:
            self._is_at_work = False
            self._submitter = None  # with the inputs that it keeps
            self._tell()

    def count_submitted(self) -> int:
        """Return the number of inputs that have a job, or are about to have one."""
        with self.changes:
            tasks = self.ledger.tasks
            return sum(1 for each in tasks if each.ref or each.state is InputState.SUBMITTING)

    # -- ending ------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Submit nothing more; running jobs keep running."""
        with self.changes:
            self.ledger.stop(why)
            self._tell()

    def cancel(self, why: str) -> None:
        """Submit nothing more, and cancel running jobs."""
        if self.updates is None:
            self.stop(why)
        elif not self.ledger.done:
            self.manifest.ask_to_stop()
            self.catch_up(now=True)
        with self.changes:
            self._cancelling = True
            running = self._list_running()
        for handle in running:
            _cancel(handle)

    @property
    def submits(self) -> bool:
        """Whether this process has not finished submitting."""
        return self._is_at_work

    def _cancel_after_failure(self) -> None:
        if self.ledger.stopped and self.ledger.rules.cancels and not self._cancelling:
            self.cancel(self.ledger.stopped)

    # -- watching ----------------------------------------------------------------------------------

    @contextmanager
    def watch_jobs(self) -> Iterator[None]:
        """Watch the jobs, now and as they come; otherwise nobody asks for their ends."""
        with self.changes:
            self._interested += 1
            is_new = self._interested == 1 or self._broken is not None
            self._broken = None  # for an earlier call; since then nobody watches
            for handle in self._list_running() if is_new else ():
                futures.watcher().add(handle, self._enter)
        try:
            yield
        finally:
            with self.changes:
                self._interested -= 1
                for handle in () if self._interested else self._list_running():
                    futures.watcher().drop(handle, self._enter)

    def look(self, timeout_s: float, seen: int) -> None:
        """Wait until there are more events than the caller has `seen`, or the time is up; to be
        called within `watch_jobs`."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            left_s = max(give_up_at - time.monotonic(), 0.0)
            pause_s = left_s
            if self.updates is not None:
                pause_s = min(self.updates.pause_s(self.ledger), IDLE_S, left_s)
            with self.changes:
                self.changes.wait_for(lambda: self.events != seen or self._broken, pause_s)
                if self._broken is not None:
                    raise self._broken
            self.catch_up()
            self._cancel_after_failure()
            if self.events != seen or left_s == 0.0:
                return

    def _enter(self, job: AwaitedJob, end: Outcome | BaseException) -> None:
        """Enter the end of a job; called by the thread that watches."""
        with self.changes:
            index = job.ref.group_index
            if index is None or self.ledger.tasks[index].ref != job.ref:
                return  # Another try runs by now.
            if self.ledger.tasks[index].state is not InputState.LIVE:
                return  # Told twice: it was dropped and added again while it was being told.
            if isinstance(end, Outcome):
                again = end.verdict is not Verdict.CANCELLED
                self.ledger.mark_ended(index, ok=end.ok, again=again)
            elif isinstance(end, NotFound):
                self.ledger.mark_gone(index)
            else:
                self._broken = end
            self._tell()

    def _list_running(self) -> list[JobHandle[Any]]:
        found = (self.handles[index] for index in self.ledger.live())
        return [handle for handle in found if handle is not None]

    def catch_up(self, *, now: bool = False) -> None:
        """Take over what another process has submitted, unless that was checked a moment ago."""
        if self.updates is None or not (now or self.updates.is_due(self.ledger)):
            return
        snapshot = self.updates.read(self.ledger)
        with self.changes:
            for index, handle in self.updates.enter(snapshot, self.ledger):
                self.handles[index] = handle
                if self._interested:
                    futures.watcher().add(handle, self._enter)
            self._tell()

    def _tell(self) -> None:
        self.events += 1
        self.changes.notify_all()


def open_job(manifest: Manifest, ref: JobRef) -> JobHandle[Any]:
    """Return the handle of a job of a batch."""
    store = manifest.store
    return JobHandle(ref, store=store if ref.store_uri == store.uri else None)


def attach_executor(
    manifest: Manifest, slowest_s: float = 10.0, patience_s: float = 1800.0
) -> BatchExecutor:
    """Return one that follows a batch which another process submits, or has submitted; for the
    times see `BatchUpdates`."""
    rules = BatchRules(max_concurrent=None, retries=manifest.batch.retries)
    open_own = partial(open_job, manifest)
    updates = BatchUpdates(manifest, open_own, slowest_s=slowest_s, patience_s=patience_s)
    executor = BatchExecutor(Ledger(manifest.batch.total, rules), manifest, updates=updates)
    executor.catch_up()
    return executor


def _cancel(handle: JobHandle[Any]) -> None:
    with _logged(f"{handle.job_id} could not be cancelled"):
        handle.cancel(cleanup_timeout=0)


class _logged(suppress):  # noqa: N801 - reads as a statement
    """Log errors of the store and of backends, and go on."""

    def __init__(self, what: str) -> None:
        super().__init__(KineticError, OSError)
        self._what = what

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        handled = super().__exit__(kind, error, trace)
        if handled and error is not None:
            _log.warning("%s: %s", self._what, error)
        return handled
