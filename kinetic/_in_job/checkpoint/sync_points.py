"""Points at which all hosts do the same: what one requests, all do at one call of `save`.

In: requests (a host is about to be taken away, time for a persistent checkpoint), calls of
`save`. Out: at one call, the same on all hosts, the request.

Asking the others at every step would cost a collective each. Instead a thread of each host waits
for a request in the coordination service. Then all hosts say how many calls they have begun, and
`save` waits meanwhile; the point is the call after the furthest of them.
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
_ASKED_EVERY_S = 10.0
_LIMIT_S = 60.0
"""How long the hosts may take to say where they are: a host that is lost must not hold the others
for longer."""


class SyncRequest(StrEnum):
    """What a host requests. Of several in one round the last one counts; the others are made again
    in the next."""

    TIME = "time"
    """Enough time has passed for a persistent checkpoint."""
    PREEMPTED = "preempted"
    """A host will be taken away: save, then leave."""
    REFORM = "reform"
    """A slice of an elastic job is back: save, then begin again on all slices."""


def find_request() -> SyncRequest | None:
    """Return what makes this host's function leave, as far as it knows by itself."""
    if preemption.preempted():
        return SyncRequest.PREEMPTED
    return SyncRequest.REFORM if elastic.is_asked() else None


class SyncPoints:
    """Agrees on the calls at which requests are fulfilled.

    Args:
        peers: the hosts.
        find_request: what this host knows of that makes the hosts leave, or None; asked at every
            call.
        every_s: the leader requests a checkpoint when none was made for so long; None for never.
        clock: seconds, monotonic.
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
        """Count a call of `save`; return what all hosts do at this one."""
        wanted = self._find_request()
        if wanted is not None and wanted not in self._past_requests:
            if self._peers.count == 1:
                self._past_requests.add(wanted)
                return wanted
            self._tell(wanted)
        with self._lock:
            self._calls += 1
            if self._agreed is None or self._calls < self._agreed[0]:
                return None
            what = self._agreed[1]
            self._agreed = None
            if what is not SyncRequest.TIME:
                self._past_requests.add(what)
            self._fulfilled.set()
            return what

    def _tell(self, what: SyncRequest) -> None:
        """Tell the others, once in each round: one request may come too late for it."""
        round_ = self._round
        if self._announcement != (what, round_):
            self._peers.set(f"request/{round_}", what)
            self._announcement = (what, round_)

    def note_save(self) -> None:
        """A persistent checkpoint was made: the time counts from now."""
        self._saved_at = self._clock()

    def close(self) -> None:
        """End the thread as soon as it looks up. Idempotent."""
        self._closed.set()
        self._fulfilled.set()

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                self._run_round()
        except Exception as error:  # noqa: BLE001 - the world has ended, or is about to
            if not self._closed.is_set():
                _log.debug("no more requests are heard: %s", error)
            # Nobody must wait for an agreement that will not come.
            self._agreed = None

    def _run_round(self) -> None:
        heard = self._peers.get(f"request/{self._round}", self._patience_s())
        if self._closed.is_set():
            return
        if heard is None:
            if self._every_s is not None and self._clock() - self._saved_at >= self._every_s:
                self._tell(SyncRequest.TIME)
            return
        with self._lock:
            round_, self._round = self._round, self._round + 1
            try:
                self._agreed = self._agree(round_)
            except TimeoutError as error:
                _log.warning(
                    "a checkpoint was requested (%s), but not all hosts have answered: %s",
                    heard,
                    error,
                )
                return
            self._fulfilled.clear()
        if self._peers.index == 0 and round_ > 0:
            for key in ("request", "calls", "point"):
                self._peers.forget(f"{key}/{round_ - 1}")
        self._fulfilled.wait()

    def _agree(self, round_: int) -> tuple[int, SyncRequest]:
        """The call, and what is done at it: the leader decides, because hosts may
        request different things at once."""
        folder = f"calls/{round_}"
        self._peers.set(f"{folder}/{self._peers.index}", str(self._calls))
        self._peers.wait_at_barrier(folder, _LIMIT_S)
        if self._peers.index == 0:
            begun = [int(calls) for calls in self._peers.get_all(folder).values()]
            what = self._peers.get(f"request/{round_}", _LIMIT_S)
            self._peers.set(f"point/{round_}", f"{max(begun) + 1} {what}")
        decided = self._peers.get(f"point/{round_}", _LIMIT_S)
        if decided is None:
            raise TimeoutError("the leader does not answer")
        call, what = decided.split()
        return int(call), SyncRequest(what)

    def _patience_s(self) -> float:
        if self._every_s is None:
            return _ASKED_EVERY_S
        left_s = self._saved_at + self._every_s - self._clock()
        return min(max(left_s, 0.001), _ASKED_EVERY_S)
