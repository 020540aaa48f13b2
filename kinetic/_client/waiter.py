"""Waiting for the first of many jobs to end, without asking for each of them all the time.

In: handles of running jobs. Out: verdicts.

A backend that can signal ends (`Signals`) is asked only now and then, in case a signal was missed.
With others, each job is asked for less and less often, down to once in `slowest_s`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from kinetic._core.outcome import Outcome
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic.errors import KineticError, NotFound

_log = logging.getLogger("kinetic.batch")
FIRST_LOOK_S = 0.01
SIGNALLED_LOOK_S = 2.0
SLOWER = 1.5
MOST_SIGNALS = 256
"""A process may have a thousand open files, and needs some of them elsewhere."""


Answer = Outcome | KineticError | None
J = TypeVar("J", bound="AwaitedJob")
R = TypeVar("R")


class AwaitedJob(Protocol):
    """The part of a handle that waiting needs."""

    @property
    def ref(self) -> JobRef:
        """The job."""
        ...

    def settle(self, refs: Sequence[JobRef]) -> Mapping[str, Answer]:
        """Return the verdicts of jobs with the same place and store as this one, by id; None while
        they run, an error if it cannot be determined or the records were removed."""
        ...

    def ending_fd(self) -> int | None:
        """Return a descriptor that becomes readable when the job has ended; None if there is
        none."""
        ...


def look(jobs: Sequence[AwaitedJob]) -> list[Answer]:
    """Return the verdict of each job."""
    return ask_alike(jobs, lambda job, refs: job.settle(refs))


def ask_alike(jobs: Sequence[J], ask: Callable[[J, Sequence[JobRef]], Mapping[str, R]]) -> list[R]:
    """Return what is answered for each job: all jobs of one place are asked for in one call."""
    alike: dict[tuple[Place, str], list[J]] = {}
    for job in jobs:
        alike.setdefault((job.ref.place, job.ref.store_uri), []).append(job)
    found: dict[JobRef, R] = {}
    for several in alike.values():
        refs = [job.ref for job in several]
        answers = ask(several[0], refs)
        found |= {ref: answers[ref.job_id] for ref in refs}
    return [found[job.ref] for job in jobs]


@dataclasses.dataclass
class _RunningJob:
    """One running job: when to ask next, and the descriptor that signals its end before."""

    look_at: float
    pause_s: float = FIRST_LOOK_S
    fd: int = -1


class JobWaiter:
    """The running jobs that one caller waits for. One thread may add jobs while another one
    waits."""

    def __init__(
        self,
        slowest_s: float = 5.0,
        *,
        first_look_s: float = FIRST_LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slowest_s = slowest_s
        self._first_look_s = first_look_s
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[AwaitedJob, _RunningJob] = {}
        self._signals = 0
        self._bell, self._ringer = os.pipe()
        for end in (self._bell, self._ringer):
            os.set_blocking(end, False)
        closing = weakref.finalize(self, _close, self._watched, self._bell, self._ringer)
        closing.atexit = False  # A daemon thread may still wait when the process ends.

    def add(self, job: AwaitedJob) -> None:
        """Watch a job."""
        with self._lock:
            self._watched.setdefault(job, _RunningJob(self._clock() + self._first_look_s))
        self.ring()

    def ring(self) -> None:
        """Wake the thread that waits."""
        with suppress(BlockingIOError):  # A wake-up is already pending.
            os.write(self._ringer, b"!")

    def wait(self, timeout_s: float) -> list[tuple[AwaitedJob, Outcome | NotFound]]:
        """Return the jobs that have ended, and how; [] if the time is up or `ring` was called."""
        deadline = self._clock() + timeout_s
        while True:
            ended = self._look()
            now = self._clock()
            if ended or now >= deadline:
                return ended
            if self._sleep(min(deadline, self._next_look()) - now):
                return self._look()

    def _look(self) -> list[tuple[AwaitedJob, Outcome | NotFound]]:
        """Ask for the jobs that are due."""
        with self._lock:
            now = self._clock()
            due = [job for job, watch in self._watched.items() if watch.look_at <= now]
        ended = []
        for job, found in zip(due, look(due), strict=True):
            if isinstance(found, Outcome | NotFound):
                self._forget(job)
                ended.append((job, found))
                continue
            if found is not None:
                _log.warning("%s cannot be read at present: %s", job.ref.job_id, found)
            self._look_later(job, self._watched[job])
        return ended

    def _look_later(self, job: AwaitedJob, watch: _RunningJob) -> None:
        if watch.fd < 0 and self._signals < MOST_SIGNALS and (fd := job.ending_fd()) is not None:
            watch.fd = fd
            self._signals += 1
        watch.pause_s = min(watch.pause_s * SLOWER, self._slowest_s)
        watch.look_at = self._clock() + (
            max(watch.pause_s, SIGNALLED_LOOK_S) if watch.fd >= 0 else watch.pause_s
        )

    def _forget(self, job: AwaitedJob) -> None:
        with self._lock:
            watch = self._watched.pop(job)
        if watch.fd >= 0:
            self._signals -= 1
            os.close(watch.fd)

    def _next_look(self) -> float:
        with self._lock:
            return min((job.look_at for job in self._watched.values()), default=math.inf)

    def _sleep(self, pause_s: float) -> bool:
        """Sleep until a job signals its end, or `ring`; return whether it was `ring`."""
        with self._lock:
            by_fd = {job.fd: job for job in self._watched.values() if job.fd >= 0}
        poll = select.poll()
        for fd in (self._bell, *by_fd):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(max(math.ceil(pause_s * 1000), 0))]
        for fd in ready:
            if fd in by_fd:
                self._drop_signal(by_fd[fd])
        if self._bell in ready:
            os.read(self._bell, 4096)
        return self._bell in ready

    def _drop_signal(self, job: _RunningJob) -> None:
        """A signal comes once: ask now, and from then on as for a job without signals."""
        self._signals -= 1
        os.close(job.fd)
        job.fd, job.look_at, job.pause_s = -1, self._clock(), FIRST_LOOK_S


def _close(watched: dict[Any, _RunningJob], *fds: int) -> None:
    for fd in (*fds, *(job.fd for job in watched.values() if job.fd >= 0)):
        with suppress(OSError):
            os.close(fd)
