"""Agreement between hosts to act at the same call of `save`, after one of them has requested it.

A collective at every step would be too slow. Instead a thread of each host waits for a request in
JAX's coordination service. On a request, `save` blocks while all hosts publish how often it was
called. All hosts fulfil the request at the call after the highest of these numbers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from kinetic._in_job import elastic, preemption
from kinetic._in_job.peers import Peers

_log = logging.getLogger(__name__)
_POLL_S = 10.0
_LIMIT_S = 60.0
"""Seconds in which all hosts must publish how often they have called `save`. A lost host blocks the
others for this long."""


class SyncRequest(StrEnum):
    """A host's request to all hosts. If several hosts make requests at once, the last one counts,
    and the others are made again later."""

    TIME = "time"
    """Save to the persistent tier: `every` or `at_least_every` has passed."""
    PREEMPTED = "preempted"
    """A host will be taken away: save, then end."""
    REFORM = "reform"
    """A slice of an elastic job is back: save, then restart on all slices."""


def find_request() -> SyncRequest | None:
    """Return this host's request to end the attempt, because of a preemption or a slice that is
    back; None if there is none."""
    if preemption.preempted():
        return SyncRequest.PREEMPTED
    return SyncRequest.REFORM if elastic.is_slice_back() else None


class SyncPoints:
    """Lets all hosts fulfil a request at the same call of `save`.

    Args:
        peers: The hosts.
        find_request: Returns this host's request, or None; called at every call of `save`.
        every_s: Host 0 requests a persistent checkpoint after so many seconds without one; None for
            never.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        peers: Peers,
        find_request: Callable[[], SyncRequest | None],
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._find_request = find_request
        self._every_s = every_s if peers.index == 0 else None
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = 0
        self._agreed: tuple[int, SyncRequest] | None = None
        self._round = 0
        self._saved_at = clock()
        self._fulfilled = threading.Event()
        self._closed = threading.Event()
        self._past_requests: set[SyncRequest] = set()
        self._announcement: tuple[SyncRequest, int] | None = None
        self._thread = threading.Thread(
            target=self._watch, name="kinetic-checkpoint-sync", daemon=True
        )
        self._thread.start()

    def call(self) -> SyncRequest | None:
        """Count a call of `save`; return the request that all hosts fulfil at it, or None."""
        wanted = self._find_request()
        if wanted is not None and wanted not in self._past_requests:
            if self._peers.count == 1:
                self._past_requests.add(wanted)
                return wanted
            self._publish(wanted)
        with self._lock:
            self._calls += 1
            if self._agreed is None or self._calls < self._agreed[0]:
                return None
            request = self._agreed[1]
            self._agreed = None
            if request is not SyncRequest.TIME:
                self._past_requests.add(request)
            self._fulfilled.set()
            return request

    def _publish(self, request: SyncRequest) -> None:
        """Publish a request, at most once per round; the current round may already be over."""
        round_ = self._round
        if self._announcement != (request, round_):
            self._peers.set(f"request/{round_}", request)
            self._announcement = (request, round_)

    def note_save(self) -> None:
        """Restart the clock: a persistent checkpoint was made."""
        self._saved_at = self._clock()

    def close(self) -> None:
        """Tell the thread to end. Idempotent."""
        self._closed.set()
        self._fulfilled.set()

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                self._run_round()
        except Exception as error:  # noqa: BLE001 - the world has ended, or is about to
            if not self._closed.is_set():
                _log.debug("requests of other hosts are no longer received: %s", error)
            self._agreed = None  # No agreement will come: `save` must not wait for it.

    def _run_round(self) -> None:
        request = self._peers.get(f"request/{self._round}", self._patience_s())
        if self._closed.is_set():
            return
        if request is None:
            if self._every_s is not None and self._clock() - self._saved_at >= self._every_s:
                self._publish(SyncRequest.TIME)
            return
        with self._lock:
            round_, self._round = self._round, self._round + 1
            try:
                self._agreed = self._agree(round_)
            except TimeoutError as error:
                _log.warning(
                    "the requested checkpoint (%s) is not saved, because the hosts did not agree "
                    "on a step in time: %s",
                    request,
                    error,
                )
                return
            self._fulfilled.clear()
        if self._peers.index == 0 and round_ > 0:
            for key in ("request", "calls", "point"):
                self._peers.forget(f"{key}/{round_ - 1}")
        self._fulfilled.wait()

    def _agree(self, round_: int) -> tuple[int, SyncRequest]:
        """Return the number of the call at which all hosts act, and the request to fulfil then.
        Host 0 chooses the request, since hosts may make different ones at once."""
        folder = f"calls/{round_}"
        self._peers.set(f"{folder}/{self._peers.index}", str(self._calls))
        self._peers.wait_at_barrier(folder, _LIMIT_S)
        if self._peers.index == 0:
            begun = [int(calls) for calls in self._peers.get_all(folder).values()]
            request = self._peers.get(f"request/{round_}", _LIMIT_S)
            self._peers.set(f"point/{round_}", f"{max(begun) + 1} {request}")
        decision = self._peers.get(f"point/{round_}", _LIMIT_S)
        if decision is None:
            raise TimeoutError("host 0 does not answer")
        call, request = decision.split()
        return int(call), SyncRequest(request)

    def _patience_s(self) -> float:
        if self._every_s is None:
            return _POLL_S
        remaining_s = self._saved_at + self._every_s - self._clock()
        return min(max(remaining_s, 0.001), _POLL_S)
