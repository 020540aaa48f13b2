"""What another process has done for a batch since the last poll.

In: a manifest. Out: entries in the ledger, handles of new jobs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kinetic._client.batch.ledger import InputState, Ledger
from kinetic._client.batch.manifest import LEFT, SILENT_S, BatchSnapshot, Manifest
from kinetic._client.handle import JobHandle
from kinetic._core.ref import JobRef
from kinetic._store.lease import Owner
from kinetic.errors import SubmitError

FIRST_PAUSE_S = 0.1
SLOWER = 1.3


class BatchUpdates:
    """Reads the manifest: often while inputs are being submitted, otherwise less and less often.
    It keeps its own time: `JobWaiter` waits for jobs, and these are not there yet."""

    def __init__(
        self,
        manifest: Manifest,
        open_job: Callable[[JobRef], JobHandle[Any]],
        *,
        slowest_s: float = 10.0,
        patience_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = manifest
        self._open_job = open_job
        self._slowest_s = slowest_s
        self._patience_s = SILENT_S if manifest.batch.counts else patience_s
        self._owner: Owner | None = None
        self._clock = clock
        self._every_s = min(FIRST_PAUSE_S, slowest_s)
        self._due = -math.inf
        self._last = clock()

    def pause_s(self, ledger: Ledger) -> float:
        """How long until the next poll is due."""
        return max(self._due - self._clock(), 0.0) if ledger.waiting else math.inf

    def is_due(self, ledger: Ledger) -> bool:
        """Whether a poll is due."""
        return self.pause_s(ledger) == 0.0

    def read(self, ledger: Ledger) -> BatchSnapshot:
        """Poll."""
        beyond = {
            i: task.tries
            for i, task in enumerate(ledger.tasks)
            if task.state is not InputState.WAITING or task.tries
        }
        snapshot = self._manifest.snapshot(beyond)
        owner = self._manifest.owner.read()[0] if snapshot.is_left is None else None
        now = self._clock()
        if owner != self._owner:
            self._last, self._owner = now, owner
        if snapshot.jobs or snapshot.refused:
            self._last, self._every_s = now, min(FIRST_PAUSE_S, self._slowest_s)
        self._every_s = min(self._every_s * SLOWER, self._slowest_s)
        self._due = now + self._every_s
        if snapshot.is_left is None:
            return replace(snapshot, is_left=now - self._last > self._patience_s)
        return snapshot

    def enter(
        self, snapshot: BatchSnapshot, ledger: Ledger
    ) -> Iterator[tuple[int, JobHandle[Any]]]:
        """Enter what was read into the ledger; yield the new jobs, each before it is entered: after
        a Ctrl-C in between it is found again."""
        for index, (tries, ref) in snapshot.jobs.items():
            if ledger.tasks[index].state is InputState.WAITING:
                yield index, self._open_job(ref)
                ledger.mark_found(index, ref, tries)
        for index, why in snapshot.refused.items():
            if ledger.tasks[index].state is InputState.WAITING:
                ledger.refuse_waiting(index, SubmitError(why))
        if snapshot.over:
            self._close(snapshot, ledger)

    def _close(self, snapshot: BatchSnapshot, ledger: Ledger) -> None:
        """Nothing more will come: an input that still waits here was skipped, was removed, or its
        submitter died."""
        or_silent = ", or has not answered for too long" if self._manifest.batch.counts else ""
        for index in ledger.list_unsubmitted():
            state = snapshot.state_of(index)
            if state is InputState.GONE:
                job_id = snapshot.unreadable.get(index, self._planned_job_id(index))
                ledger.miss_waiting(index, job_id)
            elif state is InputState.REFUSED:
                what = f"Input {index} of {self._manifest.batch.group_id}"
                why = f"it was not submitted: {LEFT}{or_silent}."
                ledger.refuse_waiting(index, SubmitError(f"{what}: {why}"))
        ledger.stop(snapshot.stopped or "nothing more is submitted")

    def _planned_job_id(self, index: int) -> str:
        jobs = self._manifest.batch.jobs
        return jobs[index][0] if jobs else ""
