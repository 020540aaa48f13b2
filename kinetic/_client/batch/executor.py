"""Runs a batch as its ledger says: submits inputs, waits for their jobs to end, cancels them.

In: a ledger, a manifest, a submitter. Out: jobs, and in the end a ledger in which every input
has ended.

Submitting threads are not daemons: a script that ends after beginning a batch still submits all of
it. A separate thread watches the jobs, so that Ctrl-C, which is raised in the main thread, cannot
lose one.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

from kinetic._client.batch.ledger import InputState, Ledger
from kinetic._client.batch.manifest import Lock, Manifest
from kinetic._client.batch.poller import BatchUpdates
from kinetic._client.batch.submitters import Submitter
from kinetic._client.handle import JobHandle
from kinetic._client.waiter import EndedJob, JobWaiter
from kinetic._core.outcome import Verdict
from kinetic.errors import InsufficientMemory, KineticError, SubmitError, text_of

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
        *,
        waiter: JobWaiter[int] | None = None,
    ) -> None:
        self.ledger = ledger
        self.manifest = manifest
        self.handles: list[JobHandle[Any] | None] = [None] * len(ledger.tasks)
        self.events = 0
        """Grows with every event."""
        self._submitter = submitter
        self._updates = updates
        self._waiter = waiter or JobWaiter[int]()
        self._changed = threading.Condition(threading.RLock())
        self._watcher: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._interested = 0
        self._at_work = 0
        self._cancelling = False
        self._refusals = 0
        self._lock: Lock | None = None

    # -- submitting --------------------------------------------------------------------------------

    def start(self, *, here: bool) -> None:
        """Submit everything: in this thread, or in threads of its own."""
        assert self._submitter is not None
        self._lock = self.manifest.hold()
        self._at_work = 1 if here else self._submitter.threads
        with self._changed:
            self._watch()
        if here:
            return self._work()
        name = f"kinetic-{self.manifest.batch.group_id}"
        for _ in range(self._at_work):
            threading.Thread(target=self._work, name=name, daemon=False).start()
        return None

    def _work(self) -> None:
        try:
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
        with self._changed:
            seen, index = self.events, self.ledger.take()
        # Only now: what made room may have been cancelled by another process, after it asked.
        self._obey()
        if index is not None:
            self._submit(index)
            return True
        with self._changed:
            submits = self.ledger.submits
        if submits:
            self.look(IDLE_S, seen)
        return submits

    def _submit(self, index: int) -> None:
        assert self._submitter is not None
        with self._changed:
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
        with self._changed:
            self.handles[index] = handle
            self.ledger.mark_submitted(index, handle.ref)
            self._waiter.add(index, handle)
            self._tell()
            unwanted = self._cancelling
        if unwanted:
            _cancel(handle)

    def _wait_or_refuse(self, index: int, error: InsufficientMemory) -> None:
        """If the machine is full, the input waits until another job has ended."""
        with self._changed:
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
            "input %d of %s was not submitted: %s",
            index,
            self.manifest.batch.group_id,
            text_of(error),
        )
        with _logged("the reason could not be kept"):
            self.manifest.note_refused(index, error)
        with self._changed:
            self.ledger.mark_refused(index, error)
            self._tell()
        self._cancel_after_failure()

    def _obey(self) -> None:
        """Stop if another process asked for it."""
        with _logged("whether to stop cannot be seen"):
            if not self.ledger.stopped and self.manifest.is_to_stop():
                self.cancel("another process cancelled the batch")

    def _end_submitting(self) -> None:
        with self._changed:
            if self._at_work > 1 or self._lock is None:
                self._at_work -= 1
                return  # Only the last thread records the end of the batch.
            skipped = [
                i for i, task in enumerate(self.ledger.tasks) if task.state is InputState.SKIPPED
            ]
        with _logged("the end of the batch could not be kept"):
            self.manifest.note_end(self.ledger.stopped, skipped)
        self._lock.release()
        with self._changed:
            self._at_work -= 1
            self._tell()

    # -- ending ------------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Submit nothing more; running jobs keep running."""
        with self._changed:
            self.ledger.stop(why)
            self._tell()

    def cancel(self, why: str) -> None:
        """Submit nothing more, and cancel running jobs."""
        if self._updates is None:
            self.stop(why)
        elif not self.ledger.done:
            self.manifest.ask_to_stop()
            self.catch_up(now=True)
        with self._changed:
            self._cancelling = True
            running = [
                handle
                for index in self.ledger.live()
                if (handle := self.handles[index]) is not None
            ]
        for handle in running:
            _cancel(handle)

    @property
    def submits(self) -> bool:
        """Whether this process has not finished submitting."""
        return self._at_work > 0

    def _cancel_after_failure(self) -> None:
        if self.ledger.stopped and self.ledger.rules.cancels and not self._cancelling:
            self.cancel(self.ledger.stopped)

    # -- watching ----------------------------------------------------------------------------------

    def look(self, timeout_s: float, seen: int) -> None:
        """Wait until there are more events than the caller has `seen`, or the time is up."""
        with self._changed:
            self._interested += 1
            try:
                self._watch()
                self._changed.wait_for(
                    lambda: self.events != seen or self._broken, max(timeout_s, 0.0)
                )
            finally:
                self._interested -= 1
            if self._broken is not None:
                raise self._broken

    def _watch(self) -> None:
        """Start the watching thread unless there is one."""
        if self._watcher is None and not self.ledger.done:
            self._watcher = threading.Thread(
                target=self._keep_watch, name="kinetic-watch", daemon=True
            )
            self._watcher.start()

    def _keep_watch(self) -> None:
        try:
            while self._is_watched():
                pause_s = (
                    IDLE_S
                    if self._updates is None
                    else min(self._updates.pause_s(self.ledger), IDLE_S)
                )
                self._enter(self._waiter.wait(pause_s))
                self.catch_up()
        except BaseException as error:  # noqa: BLE001 - raised again in `look`
            with self._changed:
                self._broken = error
                self._tell()

    def _is_watched(self) -> bool:
        with self._changed:
            wanted = not self.ledger.done and bool(self._interested or self._at_work)
            self._watcher = self._watcher if wanted else None
            return wanted

    def _enter(self, ended: list[EndedJob[int]]) -> None:
        if not ended:
            return
        with self._changed:
            for each in ended:
                if each.outcome is None:
                    self.ledger.mark_gone(each.key)
                else:
                    self.ledger.mark_ended(
                        each.key,
                        ok=each.outcome.ok,
                        again=each.outcome.verdict is not Verdict.CANCELLED,
                    )
            self._tell()
        self._cancel_after_failure()

    def catch_up(self, *, now: bool = False) -> None:
        """Take over what another process has submitted, unless that was checked a moment ago."""
        if self._updates is None or not (now or self._updates.is_due(self.ledger)):
            return
        updates = self._updates.read(self.ledger)
        with self._changed:
            for index, handle in self._updates.enter(updates, self.ledger):
                self.handles[index] = handle
                self._waiter.add(index, handle)
            self._tell()

    def _tell(self) -> None:
        self.events += 1
        self._changed.notify_all()


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
