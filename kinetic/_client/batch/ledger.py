"""The state of each input of a batch, and what may be done next.

In: what happened to jobs. Out: which input to submit, which inputs have ended. Pure: no clock, no
lock, no I/O.

    WAITING ──take──> SUBMITTING ──submitted──> LIVE ──ended──> SUCCEEDED | FAILED | GONE
       │  └──stop──> SKIPPED  └──refused──> REFUSED  └──failed, tries left──> WAITING
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass


class InputState(StrEnum):
    """The state of one input."""

    WAITING = "waiting"
    SUBMITTING = "submitting"
    LIVE = "live"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"
    REFUSED = "refused"
    SKIPPED = "skipped"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to the input."""
        return self not in (InputState.WAITING, InputState.SUBMITTING, InputState.LIVE)


@dataclass(frozen=True)
class Task:
    """One input.

    Attributes:
        state: its state.
        tries: how often it was submitted.
        ref: its latest job, or None before the first.
        error: why it never became a job.
        lost_id: of a job whose records were missing when it was first looked for; "" if unknown.
    """

    state: InputState = InputState.WAITING
    tries: int = 0
    ref: JobRef | None = None
    error: Exception | None = None
    lost_id: str = ""

    @property
    def job_id(self) -> str:
        """The id of its latest job, "" if it is not known."""
        return self.lost_id if self.ref is None else self.ref.job_id


@dataclass(frozen=True)
class BatchRules:
    """How a batch is run.

    Attributes:
        max_concurrent: jobs at a time; None for all.
        fitted: whether `max_concurrent` is still to be chosen to fit the machine.
        retries: how often an input whose job failed is submitted again.
        fail_fast: submit nothing more after the first failure.
        cancel_running_on_fail: with `fail_fast`, also cancel running jobs.
    """

    max_concurrent: int | None = None
    fitted: bool = False
    retries: int = 0
    fail_fast: bool = False
    cancel_running_on_fail: bool = False

    @property
    def cancels(self) -> bool:
        """Whether a failure cancels the running jobs."""
        return self.fail_fast and self.cancel_running_on_fail


class Ledger:
    """The inputs of one batch.

    Promises: (1) every input ends in exactly one final state; (2) no more than `max_concurrent` are
    SUBMITTING or LIVE at a time; (3) inputs are first submitted in their order, and a retry comes
    before the next new input; (4) after `stop` nothing is taken.
    """

    def __init__(self, total: int, rules: BatchRules) -> None:
        self.rules = rules
        self.tasks = [Task() for _ in range(total)]
        self.finished: list[int] = []
        """Inputs in the order in which they reached their final state."""
        self.stopped = ""
        self._waiting = deque(range(total))
        self._again: deque[int] = deque()
        self._submitting = 0
        self._busy = 0  # submitting or live

    # -- looking -----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every input has ended."""
        return len(self.finished) == len(self.tasks)

    @property
    def submits(self) -> bool:
        """Whether the batch may still have something to submit or cancel."""
        if self.waiting or self._submitting:
            return True
        may_act = not self.stopped and (self.rules.retries > 0 or self.rules.cancels)
        return may_act and self._busy > 0

    @property
    def waiting(self) -> bool:
        """Whether an input waits to be submitted."""
        return bool(self._waiting or self._again)

    @property
    def free(self) -> bool:
        """Whether another job may run."""
        limit = self.rules.max_concurrent
        return limit is None or self._busy < limit

    def live(self) -> Iterator[int]:
        """Yield the inputs whose job runs."""
        return (index for index, task in enumerate(self.tasks) if task.state is InputState.LIVE)

    def counts(self) -> dict[InputState, int]:
        """Return the number of inputs by state."""
        found: dict[InputState, int] = {}
        for task in self.tasks:
            found[task.state] = found.get(task.state, 0) + 1
        return found

    # -- what happens ------------------------------------------------------------------------------

    def take(self) -> int | None:
        """Return the input to submit now, or None when none may be."""
        queue = self._again or self._waiting
        if not queue or not self.free:
            return None
        index = queue.popleft()
        self._busy += 1
        self._submitting += 1
        self._set_state(index, InputState.SUBMITTING)
        return index

    def give_back(self, index: int) -> None:
        """An input that was taken cannot be submitted at present."""
        self._busy -= 1
        self._submitting -= 1
        if self.stopped:
            self._end(index, InputState.FAILED if self.tasks[index].ref else InputState.SKIPPED)
            return
        self._set_state(index, InputState.WAITING)
        (self._again if self.tasks[index].tries else self._waiting).appendleft(index)

    def mark_submitted(self, index: int, ref: JobRef) -> None:
        """An input that was taken has a job."""
        self._submitting -= 1
        self.tasks[index] = replace(
            self.tasks[index], state=InputState.LIVE, tries=self.tasks[index].tries + 1, ref=ref
        )

    def mark_found(self, index: int, ref: JobRef, tries: int) -> None:
        """Another process submitted an input that waits here."""
        self._unqueue(index)
        self._busy += 1
        self.tasks[index] = Task(InputState.LIVE, tries, ref)

    def mark_refused(self, index: int, error: Exception) -> None:
        """An input that was taken could not be submitted, and will not be."""
        self._busy -= 1
        self._submitting -= 1
        self.tasks[index] = replace(self.tasks[index], error=error)
        self._end(index, InputState.FAILED if self.tasks[index].ref else InputState.REFUSED)
        self._on_failure()

    def mark_ended(self, index: int, *, ok: bool, again: bool = True) -> None:
        """A job has ended; `again` says whether another try could help (it was not cancelled)."""
        self._busy -= 1
        if ok:
            self._end(index, InputState.SUCCEEDED)
        elif again and not self.stopped and self.tasks[index].tries <= self.rules.retries:
            self._set_state(index, InputState.WAITING)
            self._again.append(index)
        else:
            self._end(index, InputState.FAILED)
            self._on_failure()

    def mark_gone(self, index: int) -> None:
        """The records of a job were removed."""
        self._busy -= 1
        self._end(index, InputState.GONE)

    def list_unsubmitted(self) -> list[int]:
        """Return the inputs that wait for their first job."""
        return list(self._waiting)

    def refuse_waiting(self, index: int, error: Exception) -> None:
        """Another process could not submit an input that waits here."""
        self._unqueue(index)
        self.tasks[index] = replace(self.tasks[index], error=error)
        self._end(index, InputState.REFUSED)

    def miss_waiting(self, index: int, job_id: str) -> None:
        """Another process submitted an input that waits here, but its job cannot be read."""
        self._unqueue(index)
        self.tasks[index] = replace(self.tasks[index], lost_id=job_id)
        self._end(index, InputState.GONE)

    def stop(self, why: str) -> None:
        """Submit nothing more: inputs that wait for their first job are skipped, those that wait
        for another try have failed."""
        self.stopped = self.stopped or why
        for index in (*self._again, *self._waiting):
            self._end(index, InputState.FAILED if self.tasks[index].ref else InputState.SKIPPED)
        self._again.clear()
        self._waiting.clear()

    def _on_failure(self) -> None:
        if self.rules.fail_fast:
            self.stop("an input failed")

    def _unqueue(self, index: int) -> None:
        (self._again if self.tasks[index].tries else self._waiting).remove(index)

    def _set_state(self, index: int, state: InputState) -> None:
        self.tasks[index] = replace(self.tasks[index], state=state)

    def _end(self, index: int, state: InputState) -> None:
        self._set_state(index, state)
        self.finished.append(index)
