"""The story of a job for its users: events, and for an elastic job also events of its slices and
lines in the log.

Lines go to the log of host 0 in the last attempt, and only while no agent writes to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.gang.policy import (
    MOST_FAULTS,
    AttemptPolicy,
    Failure,
    Form,
    SliceState,
    count_slices,
    describe_returned,
    name_slices,
)
from kinetic._host import verdicts
from kinetic._host.agent.log_writer import open_log
from kinetic._store import log_segments
from kinetic._store.base import Store, folder_of
from kinetic._store.event_log import EventLog
from kinetic.errors import KineticError


class Story:
    """Writes events at once, and lines of the log when `flush` is called.

    Attributes:
        attempt: number of the current attempt, or the last.
        lost_at: monotonic time of the failure that the next attempt recovers from; 0.0 for none.
    """

    def __init__(
        self, store: Store, job_id: str, policy: AttemptPolicy, hosts_per_slice: int
    ) -> None:
        self._store = store
        self._hosts_per_slice = hosts_per_slice
        self._job_id = job_id
        self._policy = policy
        self._events = EventLog(store, layout.JobKeys(job_id).events)
        self._lines: list[str] = []
        self._is_elastic = not policy.is_fixed
        self.attempt = policy.attempt
        self.lost_at = self._failed_at = 0.0
        self._reported_losses, self._reported_faults = len(policy.failures), len(policy.faults)

    def resume(self, events: bytes) -> None:
        """Write after these events, which the store has."""
        self._events.resume(events)

    def write(self, event: GangEvent) -> None:
        """Write an event of the current attempt."""
        if event.kind is EventKind.FAILURE:
            self._failed_at = self._failed_at or time.monotonic()
        self._events.write(verdicts.line_of(self.attempt, event))

    def close(self) -> None:
        """Close the events."""
        self._events.close()

    # -- slices and attempts -----------------------------------------------------------------------

    def tell_of_form(self) -> None:
        """Write that an attempt begins on the policy's slices."""
        self._failed_at = 0.0
        slices = self._policy.slices
        self._tell(EventKind.FORMED, slices, hosts=indices_of(slices, self._hosts_per_slice))

    def tell_of_return(self, which: int) -> None:
        """Write that a slice is back, if it was lost before: all its hosts are ready."""
        if self._policy.state_of(which) is SliceState.AWAY:
            self._tell(EventKind.SLICE_BACK, (which,))

    def tell_news(self) -> Sequence[Failure]:
        """Write the losses and faults that the policy has counted since the last call; return the
        losses."""
        policy = self._policy
        losses = policy.failures[self._reported_losses :]
        for number, failure in enumerate(losses, self._reported_losses + 1):
            self._tell_of_failure(failure, number)
        faults = policy.faults[self._reported_faults :]
        for number, fault in enumerate(faults, self._reported_faults + 1):
            self._tell_of_fault(fault, number)
        self._reported_losses, self._reported_faults = len(policy.failures), len(policy.faults)
        return losses

    def _tell_of_failure(self, failure: Failure, number: int) -> None:
        self._note_loss(failure)
        none = "the attempt failed, with all slices alive"
        what = f"{name_slices(failure.slices)} lost" if failure.slices else none
        most = self._policy.rules.max_failures
        limit = f"of at most {most}" if number <= most else f"and max_failures is {most}"
        self._say(f"{what} (failure {number} {limit}): {failure.why}")

    def tell_of_repeat(self, why: str) -> None:
        """Write that the function has failed and is called again."""
        retries = self._policy.retries_left
        more = f"{retries} {'retry' if retries == 1 else 'retries'} left after the next attempt"
        if self._is_elastic:  # In any other job the hosts log it when the next attempt begins.
            self._say(f"attempt {self.attempt} failed: {why.rstrip('.')} ({more}).")

    def _tell_of_fault(self, fault: Failure, number: int) -> None:
        """Write that one of kinetic's own processes has failed."""
        self._note_loss(fault)
        self._say(
            f"{fault.why}: a fault of kinetic, not counted by max_failures ({number} of at most "
            f"{MOST_FAULTS} such "
            f"faults){'; the hosts start again' if number < MOST_FAULTS else ''}."
        )

    def _note_loss(self, failure: Failure) -> None:
        # Count from the failure: until the other hosts have ended, seconds may pass.
        self.lost_at = self.lost_at or self._failed_at or time.monotonic()
        self._tell(EventKind.SLICE_LOST, failure.slices, failure.why)

    def tell_of_waiting(self) -> None:
        """Write for which slices the next attempt waits, unless it goes on without them."""
        policy, rules = self._policy, self._policy.rules
        away = tuple(one for one in policy.missing if policy.state_of(one) is SliceState.AWAY)
        is_over = len(policy.failures) > rules.max_failures
        if is_over or not away or (rules.shrinks and rules.most - len(away) >= rules.least):
            return
        limit = f"{rules.slice_timeout_s:g} s (slice_timeout)"
        self._tell(EventKind.AWAITED, away, f"for at most {limit}")
        self._say(f"waiting for {name_slices(away)} to return, for at most {limit}.")

    def tell_what_is_back(self) -> None:
        """Write which slices are back, after the function has ended its attempt to take them in."""
        policy = self._policy
        back = [s for s in range(policy.rules.most) if policy.state_of(s) is SliceState.READY]
        self._say(describe_returned(back))

    def tell_of_next(self, form: Form, before: int) -> None:
        """Write that the next attempt has fewer slices than the last one, which had `before`."""
        if len(form.slices) < before:
            self._say(f"continuing on {count_slices(len(form.slices))} until lost slices return.")

    def tell_of_recovery(self) -> None:
        """Write that all hosts are ready again, if a slice was lost."""
        if self.lost_at:
            self._tell(EventKind.RECOVERED, (), f"after {time.monotonic() - self.lost_at:.1f} s")
            self.lost_at = 0.0

    def _tell(
        self,
        kind: EventKind,
        slices: tuple[int, ...],
        detail: str = "",
        hosts: tuple[int, ...] = (),
    ) -> None:
        """Write an event of slices, in elastic jobs only: no other job loses single slices."""
        if self._is_elastic:
            self.write(GangEvent(kind, detail=detail, hosts=hosts, slices=slices))

    # -- the log -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._lines.append(f"kinetic: {text}")

    def flush(self) -> None:
        """Add the lines to the log of the last attempt, because users read that log now."""
        if not self._lines:
            return
        key, text = layout.HostKeys(self._job_id, self.attempt, 0).log, "\n".join(self._lines)
        self._lines.clear()
        if (folder := folder_of(self._store)) is None:
            with contextlib.suppress(KineticError):  # The events have the same information.
                log_segments.add_lines(self._store, key, text, time.time_ns())
            return
        files = folder / key, folder / layout.log_index(key)
        with contextlib.closing(open_log(self._store, key, files)) as log:
            log.say(text)


def indices_of(slices: Sequence[int], per_slice: int) -> tuple[int, ...]:
    """Return the indices of these slices' hosts among all hosts of a job."""
    return tuple(
        index for which in slices for index in range(which * per_slice, (which + 1) * per_slice)
    )
