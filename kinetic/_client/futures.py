"""Waiting for the ends of jobs: one daemon thread per process polls them all, for futures, `await`,
`as_completed` and batches.

Jobs of one place and store share a call to the backend. The thread polls each job less and less
often; where the backend signals ends (`ending_fd`), it polls only in case a signal was missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kinetic._client.board import console
from kinetic._core.duration import Duration, patience_s
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._core.tracebacks import hide_frames
from kinetic._core.values import dataclass
from kinetic._system import pipes
from kinetic.errors import KineticError, NotFound, UsageTypeError, WaitTimeout, a_type, name_some

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from kinetic._core.place import Place

_log = logging.getLogger("kinetic.futures")
FIRST_POLL_S = 0.01
SLOWEST_POLL_S = 5.0
SIGNALLED_POLL_S = 2.0
SLOWER = 1.5
MOST_SIGNALS = 256
"""Most descriptors that signal a job's end to have open: a process may open about 1000 files."""
_NAMED = 5
_BATCHES = "For the jobs of a batch, use its as_completed() method."
FUTURE_INTERNALS = ("_condition", "_state", "_waiters")
"""The private attributes of a future that `concurrent.futures.wait` and `as_completed` use."""

T = TypeVar("T")
R = TypeVar("R")
Answer = Outcome | KineticError | None


class AwaitedJob(Protocol):
    """The part of a `JobHandle` that the watcher uses."""

    @property
    def ref(self) -> JobRef:
        """The job."""
        ...

    def settle(self, refs: Sequence[JobRef]) -> Mapping[str, Answer]:
        """Return the verdicts of jobs with the same place and store as this one, by id: None for a
        running job, an error if the verdict cannot be determined or the records were removed."""
        ...

    def ending_fd(self) -> int | None:
        """Return a descriptor that becomes readable when the job has ended, or None."""
        ...


J = TypeVar("J", bound=AwaitedJob)
OnEnd = Callable[[AwaitedJob, Outcome | BaseException], object]
"""A callback for the end of a job. Its second argument is the job's verdict, `NotFound` if the
records were removed, or another error if the job can no longer be watched."""


def ask_alike(jobs: Sequence[J], ask: Callable[[J, Sequence[JobRef]], Mapping[str, R]]) -> list[R]:
    """Call `ask` once for each place and store, with one of its jobs and the references of all of
    them. Return the answer for each job, in the order of `jobs`."""
    groups: dict[tuple[Place, str], list[J]] = {}
    for job in jobs:
        groups.setdefault((job.ref.place, job.ref.store_uri), []).append(job)
    answers: dict[JobRef, R] = {}
    for group in groups.values():
        refs = [job.ref for job in group]
        by_id = ask(group[0], refs)
        answers |= {ref: by_id[ref.job_id] for ref in refs}
    return [answers[job.ref] for job in jobs]


def settle(jobs: Sequence[AwaitedJob]) -> list[Answer]:
    """Return the verdict of each job, as `AwaitedJob.settle` does."""
    return ask_alike(jobs, lambda job, refs: job.settle(refs))


@dataclasses.dataclass
class _Watched:
    """A watched job: the time of its next poll, the callbacks for its end, and the descriptor that
    signals its end (-1 for none)."""

    due: float
    calls: list[OnEnd] = dataclasses.field(default_factory=list)
    pause_s: float = FIRST_POLL_S
    fd: int = -1

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # The program may have closed it.
                os.close(self.fd)
            self.fd = -1


class EndWatcher:
    """The thread that watches jobs for all callers in this process. A job with several callers is
    polled once for all of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[AwaitedJob, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._bell = self._ringer = self._inode = -1

    def start(self) -> None:
        """Start the thread unless it runs. Call this early if jobs may be added after the main
        thread has ended: from Python 3.12 on, no thread can start after that."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kinetic-futures", daemon=True
                )
                self._thread.start()

    def add(self, job: AwaitedJob, call: OnEnd) -> None:
        """Register `call` for the job's end. It runs in the watching thread, so must be quick."""
        with self._lock:
            watched = self._jobs.setdefault(job, _Watched(self._clock() + FIRST_POLL_S))
            watched.calls.append(call)
        self.start()
        self._ring()

    def drop(self, job: AwaitedJob, call: OnEnd) -> None:
        """Remove a callback that `add` registered. A job without callbacks is not watched."""
        with self._lock:
            watched = self._jobs.get(job)
            if watched is None or call not in watched.calls:
                return
            watched.calls.remove(call)
            if not watched.calls:
                del self._jobs[job]
                watched.close()
        self._ring()

    def poll(self) -> None:
        """Read the verdicts of the jobs that are due, and call the callbacks of ended jobs."""
        with self._lock:
            now = self._clock()
            due = [job for job, watched in self._jobs.items() if watched.due <= now]
            free_signals = MOST_SIGNALS - sum(each.fd >= 0 for each in self._jobs.values())
        for job, answer in zip(due, settle(due), strict=True):
            if not isinstance(answer, Outcome | NotFound):
                if answer is not None:
                    _log.warning(
                        "the state of %s cannot be read at present; kinetic keeps trying. The "
                        "error: %s",
                        job.ref.job_id,
                        answer,
                    )
                free_signals -= self._postpone(job, wants_signal=free_signals > 0)
                continue
            with self._lock:
                watched = self._jobs.pop(job, None)
                if watched is not None:
                    watched.close()
            for call in () if watched is None else watched.calls:
                call(job, answer)

    def _postpone(self, job: AwaitedJob, *, wants_signal: bool) -> bool:
        """Set the time of a running job's next poll. With `wants_signal`, open the descriptor that
        signals its end, if the backend has one; return True if one was opened."""
        with self._lock:
            watched = self._jobs.get(job)
        if watched is None:
            return False
        fd = job.ending_fd() if wants_signal and watched.fd < 0 else None
        with self._lock:
            if fd is not None:
                watched.fd = fd
                if self._jobs.get(job) is not watched:  # The job was dropped meanwhile.
                    watched.close()
            watched.pause_s = min(watched.pause_s * SLOWER, SLOWEST_POLL_S)
            least_s = SIGNALLED_POLL_S if watched.fd >= 0 else 0.0
            watched.due = self._clock() + max(watched.pause_s, least_s)
        return fd is not None

    def _run(self) -> None:
        while True:
            try:
                self.poll()
            except BaseException as error:  # noqa: BLE001 - every waiting caller gets the error
                _log.exception("jobs cannot be watched any more")
                with self._lock:
                    jobs, self._jobs = self._jobs, {}
                for job, watched in jobs.items():
                    watched.close()
                    for call in watched.calls:
                        call(job, error)
            self.sleep()

    def sleep(self) -> None:
        """Sleep until a job's poll is due, a job signals its end, or jobs were added or dropped."""
        with self._lock:
            self._check_bell()
            bell = self._bell
            by_fd = {watched.fd: watched for watched in self._jobs.values() if watched.fd >= 0}
            due = min((watched.due for watched in self._jobs.values()), default=math.inf)
            pause_s = max(due - self._clock(), 0.0)
        poll = select.poll()
        for fd in (bell, *by_fd):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if due == math.inf else math.ceil(pause_s * 1000))]
        with self._lock:
            for watched in (by_fd[fd] for fd in ready if fd in by_fd and by_fd[fd].fd == fd):
                # A descriptor signals once: poll now, and later as if the job had no descriptor.
                watched.close()
                watched.due, watched.pause_s = self._clock(), FIRST_POLL_S
        if bell in ready and pipes.is_same(bell, self._inode):
            os.read(bell, 4096)

    def _ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # A wake-up is already pending.
            self._check_bell()
            os.write(self._ringer, b"!")

    def _check_bell(self) -> None:
        """Open the wake-up pipe, or reopen it if the program has closed it."""
        if not all(pipes.is_same(end, self._inode) for end in (self._bell, self._ringer)):
            self._bell, self._ringer = os.pipe()
            self._inode = os.fstat(self._bell).st_ino
            for end in (self._bell, self._ringer):
                os.set_blocking(end, False)


@functools.cache
def _watcher_of(pid: int) -> EndWatcher:
    """Return the watcher of a process: after a fork, the child needs its own thread."""
    return EndWatcher()


def watcher() -> EndWatcher:
    """Return the watcher of this process."""
    return _watcher_of(os.getpid())


class FutureJob(AwaitedJob, Protocol):
    """The part of a `JobHandle` that its future uses."""

    def result(self) -> Any:
        """Wait for the job and return its value."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for the job; return its error, or None if it succeeded."""
        ...


class JobFuture(Future[Any]):
    """A `concurrent.futures.Future` that is done when the job has ended. Each call of `result()`
    reads the value from the store. `cancel()` returns False and does not stop the job."""

    def __init__(self, job: FutureJob) -> None:
        super().__init__()
        self.pid = os.getpid()
        self._job = job
        self._has_callbacks = False
        self.set_running_or_notify_cancel()
        watcher().add(job, self._end)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job; return its value or raise its error."""
        super().exception(timeout)
        return self._job.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job; return its error, or None if it succeeded."""
        super().exception(timeout)
        return self._job.exception()

    def _end(self, job: AwaitedJob, end: Outcome | BaseException) -> None:
        act = functools.partial(self._resolve, end)
        if not self._has_callbacks:
            return act()
        # In a thread, so that a slow callback does not delay other jobs.
        with contextlib.suppress(RuntimeError):  # The interpreter is shutting down.
            threading.Thread(target=act, name=f"kinetic-done-{job.ref.job_id}", daemon=True).start()
        return None

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call `fn` with this future in a daemon thread when the job has ended."""
        self._has_callbacks = True
        super().add_done_callback(fn)

    def _resolve(self, end: Outcome | BaseException) -> None:
        if isinstance(end, BaseException):
            self.set_exception(end)
        elif end.ok:
            self.set_result(None)
        else:
            self.set_exception(RuntimeError(end.reason))


class HandleWaiters:
    """The `_waiters` of a handle that was passed to `concurrent.futures.wait`. Waiters get the
    handle instead of its future, so that `wait` returns handles."""

    def __init__(self, future: JobFuture, handle: object) -> None:
        self._own: Any = future._waiters
        self._handle = handle

    def append(self, waiter: Any) -> None:
        """Add a waiter; the caller holds the future's lock."""
        self._own.append(_HandleWaiter(waiter, self._handle))

    def remove(self, waiter: Any) -> None:
        """Remove a waiter; the caller holds the future's lock."""
        self._own.remove(_HandleWaiter(waiter, self._handle))


@dataclass(frozen=True)
class _HandleWaiter:
    waiter: Any
    handle: object

    def add_result(self, _: object) -> None:
        self.waiter.add_result(self.handle)

    def add_exception(self, _: object) -> None:
        self.waiter.add_exception(self.handle)


def loop_of(call: Callable[..., object]) -> AbstractEventLoop | None:
    """Return the running event loop if `call` is asyncio's own callback, which must run in it:
    `asyncio.wait` treats a job's handle as a future of the loop. None for any other callback."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or not str(getattr(call, "__module__", "")).startswith("asyncio."):
        return None
    loop: AbstractEventLoop | None = asyncio._get_running_loop()
    return loop


async def wait_for_end(job: AwaitedJob) -> None:
    """Wait for the job's end without blocking the event loop. A cancelled wait cancels no job."""
    import asyncio

    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()  # A cancelled wait must not cancel this future.

    def resolve(job: AwaitedJob, end: object) -> None:
        ended.set_result(None)

    watcher().add(job, resolve)
    try:
        await asyncio.wrap_future(ended)
    finally:
        watcher().drop(job, resolve)


async def run_in_thread(work: Callable[[], T], *, is_daemon: bool = False) -> T:
    """Run `work` in a new thread, without blocking the event loop. The loop's executor has too few
    threads: each call would occupy one until its job has ended."""
    __tracebackhide__ = True
    import asyncio

    loop, context = asyncio.get_running_loop(), copy_context()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def resolve(value: T | None, error: BaseException | None) -> None:
        if not done.done():  # The wait may have been cancelled.
            done.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(work)
        except BaseException as raised:  # noqa: BLE001 - raised by the await below; a future cannot hold StopIteration
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(resolve, value, error)

    threading.Thread(target=run, name="kinetic-await", daemon=is_daemon).start()
    value, error = await done
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


@hide_frames
def as_completed(handles: Iterable[J], timeout: Duration | None = None) -> Iterator[J]:
    """Yield handles in the order in which their jobs end, ended jobs first; each handle once.

    The jobs may come from different functions and batches. Failed jobs are yielded too; their
    `result()` raises. For a batch that still submits jobs, use `BatchHandle.as_completed`.

    Args:
        handles: The jobs to wait for.
        timeout: The longest wait for all jobs: seconds, "90s", "1h30m" or a `timedelta`; None
            waits until all have ended.

    Raises:
        UsageTypeError: An item is not a job handle.
        WaitTimeout: The time has passed; the jobs keep running.

    Example:
        ```python
        jobs = [train.run_async(lr) for lr in (1e-2, 1e-3)]
        for job in kinetic.as_completed(jobs):
            print(job.job_id, job.result())
        ```
    """
    if not isinstance(handles, Iterable):
        raise UsageTypeError(
            f"as_completed must be given a list of job handles; got {a_type(handles)}. {_BATCHES}"
        )
    jobs = dict.fromkeys(handles)
    for index, job in enumerate(jobs):
        if not hasattr(job, "ending_fd"):
            raise UsageTypeError(
                f"as_completed: handles[{index}] must be a job handle; got {a_type(job)}. "
                f"{_BATCHES}"
            )
    return _yield_ended(list(jobs), None if timeout is None else patience_s(timeout))


def _yield_ended(jobs: list[J], limit_s: float | None) -> Iterator[J]:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    ended: queue.SimpleQueue[AwaitedJob] = queue.SimpleQueue()
    running: dict[AwaitedJob, J] = {job: job for job in jobs}

    def tell(job: AwaitedJob, end: object) -> None:
        ended.put(job)

    try:
        for job, answer in zip(jobs, settle(jobs), strict=True):
            if isinstance(answer, Outcome | NotFound):
                del running[job]
                yield job
        for job in running.values():
            watcher().add(job, tell)
        while running:
            try:
                job_ended = ended.get(
                    timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0)
                )
            except queue.Empty:
                late = f"After {limit_s:g} s, {len(running)} of {len(jobs)} jobs had not ended"
                with hide_frames:
                    raise WaitTimeout(
                        f"{late}: {_name_jobs(running)}. They keep running."
                    ) from None
            yield running.pop(job_ended)
    except KeyboardInterrupt as interrupt:
        interrupt.__traceback__ = None
        keep = "keeps" if len(running) == 1 else "keep"
        words = f"{_name_jobs(running)} {keep} running; see `kinetic jobs list`."
        console.notice(f"\nkinetic: {words}", repeat=True)
        raise
    finally:
        for job in running.values():
            watcher().drop(job, tell)


def _name_jobs(jobs: Iterable[AwaitedJob]) -> str:
    return name_some([job.ref.job_id for job in jobs], _NAMED)


def call_back(fn: Callable[[Any], object], handle: Any, loop: AbstractEventLoop | None) -> None:
    """Call `fn` with a job's handle, in `loop` if that is not None. If `fn` raises, log that."""
    if loop is not None:
        with contextlib.suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(fn, handle)
        return
    try:
        fn(handle)
    except BaseException:  # noqa: BLE001 - the user's code may raise anything, even SystemExit
        _log.exception("a callback of %s failed", handle.job_id)
