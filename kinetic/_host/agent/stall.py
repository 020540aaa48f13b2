"""Detects a worker that makes no progress, from outside, by its processor time and its output.

In: samples of counters; time is an argument. Out: seconds for which the worker has been stalled.

A worker is stalled while all of this holds: it prints and logs nothing, and begins or ends no save;
its process and its children use less than `BUSY_SHARE` of one processor, and wait for one for less
than `STARVED_SHARE` of the time; its main thread uses less than `MAIN_SHARE` of one, and waits less
than `MAIN_WAITING_SHARE` of the time. A host that sleeps or waits in a broken collective uses no
processor time at all, or wakes up five times a second (`jax.block_until_ready`). A loop that feeds
an accelerator returns to Python at every step, and so always uses some.
"""

from __future__ import annotations

from kinetic._core.values import dataclass

BUSY_SHARE = 0.10
MAIN_SHARE = 0.0003
MAIN_WAITING_SHARE = 0.05
STARVED_SHARE = 0.5
"""Share of waiting for a processor above which a worker is starved; idle threads wait less."""
_MAIN_FLOOR_NS = 1_000_000
_BUSY_FLOOR_S = 0.1
MISSED_S = 3.5
"""Longest gap between two samples that counts. In a longer one the agent itself did not run (the
machine was suspended, or the whole gang was stopped), or the coordinator delayed it: heartbeats are
sent every second and take two at most."""


@dataclass(frozen=True)
class Sample:
    """Counters of a worker.

    Attributes:
        time_s: monotonic time of the sample.
        cpu_s: processor time of the worker and its children.
        main_ns: time for which its main thread has run, and time for which it has waited for a
            processor, in nanoseconds; None if unknown.
        log_bytes: output so far.
        row_bytes: rows of metrics logged so far.
        saving_step: step of the checkpoint that it is saving; None for none.
        starved_s: time for which its threads and its children's have waited for a processor.
    """

    time_s: float
    cpu_s: float
    main_ns: tuple[int, int] | None
    log_bytes: int
    row_bytes: int = 0
    saving_step: int | None = None
    starved_s: float = 0.0


def has_moved(since: Sample, now: Sample) -> bool:
    """True if the worker made progress between two samples."""
    elapsed = max(now.time_s - since.time_s, 0.0)
    if now.log_bytes > since.log_bytes or now.row_bytes > since.row_bytes:
        return True
    if now.saving_step != since.saving_step:
        return True
    if now.cpu_s < since.cpu_s:  # A child has ended, and its time is no longer counted.
        return True
    if now.cpu_s - since.cpu_s > _BUSY_FLOOR_S + BUSY_SHARE * elapsed:
        return True
    if measure_starvation(since, now) > _BUSY_FLOOR_S:
        return True
    if now.main_ns is None or since.main_ns is None:
        return False
    ran, waited = (after - before for before, after in zip(since.main_ns, now.main_ns, strict=True))
    return (
        ran > _MAIN_FLOOR_NS + MAIN_SHARE * elapsed * 1e9
        or waited > (_BUSY_FLOOR_S + MAIN_WAITING_SHARE * elapsed) * 1e9
    )


def measure_starvation(before: Sample, now: Sample) -> float:
    """Return how many seconds the worker waited for a processor between two samples. If waits of
    idle threads could explain all of it, return 0.0."""
    elapsed, starved_s = now.time_s - before.time_s, now.starved_s - before.starved_s
    return min(starved_s, elapsed) if starved_s > STARVED_SHARE * elapsed else 0.0


class StallDetector:
    """Measures for how long a worker has been stalled. A gap of more than `MISSED_S` between two
    samples restarts the measurement."""

    def __init__(self, now: Sample) -> None:
        self._since = self._last = now

    def observe(self, now: Sample) -> float:
        """Take a new sample; return the seconds since the worker last made progress."""
        missed = now.time_s - self._last.time_s > MISSED_S
        self._last = now
        if missed or has_moved(self._since, now):
            self._since = now
        return now.time_s - self._since.time_s
