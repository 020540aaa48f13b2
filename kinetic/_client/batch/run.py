"""The inputs of a batch as this process knows them, and the thread that submits them.

The submitting thread is not a daemon, so that a script that ends after starting a batch still
submits all of it. The thread that watches for the ends of jobs also enters them in the `BatchView`:
if the main thread did so, Ctrl-C could lose an end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kinetic._client import futures
from kinetic._client.batch.inputs import BatchEnd, InputState, inputs_of
from kinetic._client.batch.records import (
    SUBMITTER_ENDED,
    BatchReading,
    BatchRecords,
    SubmitterWatch,
)
from kinetic._client.batch.sources import JobSource
from kinetic._client.futures import AwaitedJob
from kinetic._client.handle import JobHandle
from kinetic._core.outcome import Outcome
from kinetic._core.values import dataclass
from kinetic._store.many import at_once
from kinetic.errors import InsufficientMemory, KineticError, NotFound, SubmitError, text_of

_log = logging.getLogger("kinetic.batch")
IDLE_S = 1.0
"""Seconds between two checks for a stop request from another process."""
FIRST_PAUSE_S = 0.1
SLOWER = 1.3


@dataclass(frozen=True)
class BatchRules:
    """The rules by which a batch is submitted.

    Attributes:
        max_concurrent: the most jobs at the same time; None for no limit.
        fitted: True if `max_concurrent` will be the number of jobs that fit the backend.
        fail_fast: submit nothing more after the first failure.
        cancel_running_on_fail: with `fail_fast`, also cancel running jobs.
    """

    max_concurrent: int | None = None
    fitted: bool = False
    fail_fast: bool = False
    cancel_running_on_fail: bool = False

    @property
    def cancels(self) -> bool:
        """True if a failure cancels the running jobs."""
        return self.fail_fast and self.cancel_running_on_fail


class BatchView:
    """The inputs of one batch, as this process knows them. The submitting process enters the
    changes itself; other processes use `AttachedView`, which reads them from the store.

    Attributes:
        states, handles: the state and the job of each input.
        outcomes: verdicts of ended jobs, by input.
        errors: errors of inputs that have no job, by input.
        finished: inputs in the order in which they reached their final state.
        stopped: why nothing more is submitted; "" while inputs are submitted.
        changes: the lock for changing, or reading, several attributes; notified after each event.
        events: the number of events so far.
        is_submitting: True while this process submits.
        has_failed: True if an input has failed or could not be submitted.
    """

    def __init__(self, records: BatchRecords, rules: BatchRules | None = None) -> None:
        total = records.batch.total
        self.records = records
        self.rules = rules or BatchRules()
        self.states = [InputState.WAITING] * total
        self.handles: list[JobHandle[Any] | None] = [None] * total
        self.outcomes: dict[int, Outcome] = {}
        self.errors: dict[int, Exception] = {}
        self.finished: list[int] = []
        self.stopped = ""
        self.changes = threading.Condition(threading.RLock())
        self.events = 0
        self.is_submitting = False
        self.has_failed = False
        self._live: set[int] = set()
        self._waiters = 0
        self._broken: BaseException | None = None
        self._is_cancelled = False

    @property
    def is_done(self) -> bool:
        """True if every input has ended, and this process submits nothing more."""
        return len(self.finished) == len(self.states) and not self.is_submitting

    @property
    def live(self) -> int:
        """The number of jobs that have not ended, as far as this view knows."""
        return len(self._live)

    def list_inputs(self, state: InputState) -> list[int]:
        """Return the inputs in this state."""
        return [index for index, own in enumerate(self.states) if own is state]

    def counts(self) -> Counter[InputState]:
        """Return the number of inputs by state."""
        return Counter(self.states)

    def count_submitted(self) -> int:
        """Return the number of inputs whose job exists or is being submitted."""
        jobs = zip(self.states, self.handles, strict=True)
        return sum(state is InputState.SUBMITTING or job is not None for state, job in jobs)

    # -- events of inputs --------------------------------------------------------------------------

    def enter_job(self, index: int, handle: JobHandle[Any]) -> None:
        """Enter the job of an input; cancel it if the batch was cancelled meanwhile."""
        with self.changes:
            self.handles[index] = handle
            self.states[index] = InputState.LIVE
            self._live.add(index)
            if self._waiters:
                futures.watcher().add(handle, self._enter_end)
            self._notify()
            is_unwanted = self._is_cancelled
        if is_unwanted:
            self._cancel_jobs([handle])

    def end_input(self, index: int, state: InputState, error: Exception | None = None) -> None:
        """Enter the final state of an input. Duplicate calls are ignored."""
        with self.changes:
            if self.states[index].final:
                return  # Duplicate notification: its job was added again while one was in flight.
            self.states[index] = state
            self._live.discard(index)
            self.has_failed |= state in (InputState.FAILED, InputState.REFUSED)
            if error is not None:
                self.errors[index] = error
            self.finished.append(index)
            self._notify()

    def _enter_end(self, job: AwaitedJob, end: Outcome | BaseException) -> None:
        index = job.ref.group_index
        assert index is not None
        if isinstance(end, Outcome):
            with self.changes:
                self.outcomes[index] = end
                self.end_input(index, InputState.SUCCEEDED if end.ok else InputState.FAILED)
        elif isinstance(end, NotFound):
            self.end_input(index, InputState.REMOVED)
        else:
            with self.changes:
                self._broken = end
                self._notify()

    def stop(self, why: str) -> None:
        """Submit nothing more; running jobs keep running."""
        with self.changes:
            self.stopped = self.stopped or why
            for index in self.list_inputs(InputState.WAITING):
                self.end_input(index, InputState.SKIPPED)
            self._notify()

    def cancel(self, why: str) -> None:
        """Submit nothing more, and cancel running jobs."""
        self.stop(why)
        with self.changes:
            self._is_cancelled = True
            running = self.list_running()
        self._cancel_jobs(running)

    def _cancel_jobs(self, jobs: Sequence[JobHandle[Any]]) -> None:
        def cancel(job: JobHandle[Any]) -> None:
            with logged(f"{job.job_id} could not be cancelled"):
                job.cancel(cleanup_timeout=0)

        at_once(cancel, jobs, self.records.store.calls_at_once)

    def list_running(self) -> list[JobHandle[Any]]:
        """Return the jobs that have not ended, as far as this view knows."""
        with self.changes:
            jobs = (self.handles[index] for index in sorted(self._live))
            return [job for job in jobs if job is not None]

    # -- waiting -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch_jobs(self) -> Iterator[None]:
        """Watch for the ends of jobs in the `with` block, also of jobs submitted in the block.
        Outside of such blocks the view does not notice ends, except by `settle`."""
        with self.changes:
            self._waiters += 1
            is_first = self._waiters == 1 or self._broken is not None
            self._broken = None  # Forget the error of an earlier wait.
            for job in self.list_running() if is_first else ():
                futures.watcher().add(job, self._enter_end)
        try:
            yield
        finally:
            with self.changes:
                self._waiters -= 1
                for job in () if self._waiters else self.list_running():
                    futures.watcher().drop(job, self._enter_end)

    def wait_for_event(self, timeout_s: float, known_events: int) -> None:
        """Wait until there are more than `known_events` events, or `timeout_s` has passed. Call it
        only inside `watch_jobs`. If watching has failed, raise its error."""
        with self.changes:
            self.changes.wait_for(lambda: self.events != known_events or self._broken, timeout_s)
            if self._broken is not None:
                raise self._broken

    def catch_up(self, *, now: bool = False) -> None:
        """Read what other processes have changed, if a read is due or `now` is true. Does nothing
        in the submitting process."""

    def settle(self) -> None:
        """Read the verdicts of all running jobs in one call, and enter their ends."""
        self.catch_up()
        running = self.list_running()
        for job, answer in zip(running, futures.settle(running), strict=True):
            if isinstance(answer, Outcome | NotFound):
                self._enter_end(job, answer)

    def _notify(self) -> None:
        self.events += 1
        self.changes.notify_all()


class AttachedView(BatchView):
    """The inputs of a batch that another process submits, or has submitted. Reads the records often
    while new jobs appear, otherwise less and less often, up to every `slowest_s` seconds."""

    def __init__(
        self,
        records: BatchRecords,
        slowest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(records)
        self._slowest_s = slowest_s
        self._clock = clock
        self._submitter = SubmitterWatch(clock)
        self._pause_s = min(FIRST_PAUSE_S, slowest_s)
        self._due = -math.inf
        self.catch_up()

    def cancel(self, why: str) -> None:
        """Ask the submitting process to stop, and cancel the running jobs."""
        if not self.is_done:
            self.records.ask_to_stop()
            self.catch_up(now=True)
        with self.changes:
            self._is_cancelled = True  # From now on, new jobs are cancelled too.
            running = self.list_running()
        self._cancel_jobs(running)

    def wait_for_event(self, timeout_s: float, known_events: int) -> None:
        """Wait like `BatchView.wait_for_event`, and read the records whenever that is due."""
        deadline = self._clock() + timeout_s
        while True:
            rest_s = max(deadline - self._clock(), 0.0)
            due_s = max(self._due - self._clock(), 0.0) if self._has_waiting else rest_s
            super().wait_for_event(min(rest_s, due_s), known_events)
            self.catch_up()
            if self.events != known_events or rest_s == 0.0:
                return

    @property
    def _has_waiting(self) -> bool:
        return InputState.WAITING in self.states

    def catch_up(self, *, now: bool = False) -> None:
        """Read what other processes have changed, if a read is due or `now` is true."""
        if not self._has_waiting or (not now and self._clock() < self._due):
            return
        entered = [index for index, own in enumerate(self.states) if own is not InputState.WAITING]
        reading = self.records.read(self._submitter, set(entered))
        if reading.refs or reading.refusals:
            self._pause_s = min(FIRST_PAUSE_S, self._slowest_s)
        self._pause_s = min(self._pause_s * SLOWER, self._slowest_s)
        self._due = self._clock() + self._pause_s
        self._enter(reading)

    def _enter(self, reading: BatchReading) -> None:
        batch = self.records.batch
        states = inputs_of(
            batch.total,
            reading.refs,
            reading.refusals,
            reading.end,
            is_abandoned=reading.is_abandoned,
        )
        with self.changes:
            self._enter_states(states, reading)
            if reading.end is not None or reading.is_abandoned:
                stopped = reading.end.stopped if reading.end else ""
                self.stopped = stopped or "the batch was stopped"

    def _enter_states(self, states: Sequence[InputState], reading: BatchReading) -> None:
        batch, store = self.records.batch, self.records.store
        for index in self.list_inputs(InputState.WAITING):
            if states[index] is InputState.LIVE:
                # If Ctrl-C comes before `enter_job`, the next read enters this job.
                ref = reading.refs[index]
                is_own = ref.store_uri == store.uri
                self.enter_job(index, JobHandle(ref, store=store if is_own else None))
            elif states[index] is InputState.REFUSED:
                why = reading.refusals.get(index) or (
                    f"Input {index} of {batch.group_id} was not submitted, because "
                    f"{SUBMITTER_ENDED}. To run this input, submit it again."
                )
                self.end_input(index, InputState.REFUSED, SubmitError(why))
            elif states[index].final:
                self.end_input(index, states[index])


class BatchSubmitter:
    """Submits the inputs of a batch in order, by the batch's `BatchRules`."""

    def __init__(self, view: BatchView, source: JobSource) -> None:
        self._view = view
        self._records = view.records
        self._source: JobSource | None = source
        self._next = 0
        self._refusals = 0
        self._is_blocking = self._has_begun = self._is_given_up = False
        self._stop_checked_at = -math.inf
        self._finished_at_check = 0

    def start(self, *, blocking: bool) -> None:
        """Submit all inputs, in this thread if `blocking`, else in a new one."""
        self._is_blocking = blocking
        futures.watcher().start()
        self._view.is_submitting = True
        if blocking:
            return self._work()
        name = f"kinetic-{self._records.batch.group_id}"
        threading.Thread(target=self._work, name=name, daemon=False).start()
        return None

    def give_up(self, why: str, patience_s: float) -> None:
        """Submit nothing more after `start` was interrupted. Wait up to `patience_s` seconds for
        the submission in progress."""
        view = self._view
        view.stop(why)
        with view.changes:
            self._is_given_up = True
            is_ours = self._is_blocking or not self._has_begun
        if is_ours:
            self._finish()
        with view.changes:
            view.changes.wait_for(lambda: not view.is_submitting, patience_s)

    def _work(self) -> None:
        with self._view.changes:
            if self._is_given_up:
                return
            self._has_begun = True
        try:
            with self._view.watch_jobs():
                while self._step():
                    pass
        except BaseException as error:
            self._view.stop(f"submitting failed: {type(error).__name__}: {text_of(error)}")
            raise
        finally:
            self._finish()

    def _step(self) -> bool:
        """Submit an input, or wait for an event that may allow it; return True if more is to do."""
        view, rules = self._view, self._view.rules
        with view.changes:
            known_events = view.events
            if rules.fail_fast and view.has_failed:
                view.stop("another input failed")
            index = self._take()
            is_over = index is None and self._next == len(view.states)
            may_cancel = rules.cancels and not view.stopped and view.live > 0
        if is_over and not may_cancel:
            if rules.cancels and view.has_failed:
                view.cancel(view.stopped)
            return False
        # Check for a stop request after taking an input: a slot may be free because another process
        # cancelled the batch.
        self._obey_stop_request()
        if index is not None:
            self._submit(index)
        else:
            view.wait_for_event(IDLE_S, known_events)
        return True

    def _take(self) -> int | None:
        """Return the next input if another job may run, and mark it as being submitted."""
        view, limit = self._view, self._view.rules.max_concurrent
        states, total = view.states, len(view.states)
        while self._next < total and states[self._next] is not InputState.WAITING:
            self._next += 1
        if self._next == total or (limit is not None and view.live >= limit):
            return None
        states[self._next] = InputState.SUBMITTING
        return self._next

    def _obey_stop_request(self) -> None:
        view, now = self._view, time.monotonic()
        has_freed = len(view.finished) > self._finished_at_check
        if view.stopped or (now - self._stop_checked_at < IDLE_S and not has_freed):
            return
        self._stop_checked_at, self._finished_at_check = now, len(view.finished)
        with logged("the store cannot be checked for a request to stop the batch"):
            if self._records.is_to_stop():
                view.cancel("another process cancelled the batch")

    def _submit(self, index: int) -> None:
        assert self._source is not None
        view, group_id = self._view, self._records.batch.group_id
        if view.stopped:
            return view.end_input(index, InputState.SKIPPED)
        try:
            handle = self._source.submit(group_id, index)
        except InsufficientMemory as error:
            with view.changes:
                known_events, is_alone = view.events, view.live == 0
                if not is_alone:  # Retry the input when another job has ended.
                    stopped = bool(view.stopped)
                    view.states[index] = InputState.WAITING
                    self._next = min(self._next, index)
            if is_alone:
                self._refuse(index, error)
            elif stopped:
                view.end_input(index, InputState.SKIPPED)
            else:
                view.wait_for_event(IDLE_S, known_events)
        except Exception as error:  # noqa: BLE001 - packing runs the user's code; one input must not end the others
            self._refuse(index, error)
        except BaseException as error:
            why = f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
            self._refuse(
                index,
                SubmitError(
                    f"Input {index} of {group_id} was not submitted, because {why} interrupted the "
                    "submission. Submit the input again."
                ),
            )
            if not isinstance(error, SystemExit):
                raise
        else:
            view.enter_job(index, handle)
        return None

    def _refuse(self, index: int, error: Exception) -> None:
        # Inputs are usually refused for the same reason: log only the first as a warning.
        _log.log(
            logging.INFO if self._refusals else logging.WARNING,
            "kinetic: input %d of %s was not submitted: %s",
            index,
            self._records.batch.group_id,
            text_of(error),
        )
        self._refusals += 1
        with logged(f"the error of input {index} could not be recorded"):
            self._records.note_refused(index, error)
        self._view.end_input(index, InputState.REFUSED, error)

    def _finish(self) -> None:
        view = self._view
        with view.changes:
            if self._source is None or not view.is_submitting:
                return  # The batch has finished already, or was never started.
            self._source = None  # Free the copies of the inputs.
            skipped = frozenset(view.list_inputs(InputState.SKIPPED))
        with logged("the end of the batch could not be recorded"):
            self._records.note_end(BatchEnd(view.stopped, skipped))
        with view.changes:
            view.is_submitting = False
            view._notify()


class logged(contextlib.suppress):  # noqa: N801 - reads as a statement
    """Suppresses errors of the store and the backends in the `with` block. Each error is logged
    after the text `failure`."""

    def __init__(self, failure: str) -> None:
        super().__init__(KineticError, OSError)
        self._failure = failure

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        handled = super().__exit__(kind, error, trace)
        if handled and error is not None:
            _log.warning("%s: %s", self._failure, error)
        return handled
