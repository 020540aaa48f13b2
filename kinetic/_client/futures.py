"""Jobs as futures: callbacks, `await`, and the first of many to end.

In: handles of jobs. Out: calls, values, handles as their jobs end.

One daemon thread per process watches all jobs that are waited for here. It runs no user code, and
ends when there is nothing left to wait for.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from kinetic._client import waiter
from kinetic._client.board import console
from kinetic._client.waiter import AwaitedJob, JobWaiter
from kinetic._core.duration import Duration, patience_s
from kinetic._core.outcome import Outcome
from kinetic._core.tracebacks import drop_frames, own_frames_hidden
from kinetic.errors import NotFound, UsageTypeError, WaitTimeout, a_type, name_some

if TYPE_CHECKING:
    import asyncio
    from asyncio import AbstractEventLoop
    from types import CodeType

_log = logging.getLogger("kinetic.futures")
_LONG_S = 3600.0
_NAMED = 5
_BRIEFLY_S = 1.0

T = TypeVar("T")


class JobFuture(AwaitedJob, Protocol):
    """The part of a handle that a future needs."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...


J = TypeVar("J", bound=JobFuture)
Callback = Callable[[Any], object]
Tell = Callable[[AwaitedJob, Outcome | BaseException], object]
"""Takes a job and how it ended: `NotFound` if its records were removed, another error if it cannot
be watched any more."""


class FutureWatcher:
    """Watches the jobs that callers in this process wait for: each job once, however many callers
    wait for it."""

    def __init__(self) -> None:
        self._waiter = JobWaiter()
        self._lock = threading.Lock()
        self._tells: dict[AwaitedJob, list[Tell]] = {}
        self._thread: threading.Thread | None = None
        self._holds = 0

    def hold(self) -> None:
        """Start the thread, and keep it until `release`: from Python 3.12 on nobody can start one
        once the main thread has ended."""
        with self._lock:
            self._holds += 1
            self._start()

    def release(self) -> None:
        """Let the thread end when nobody waits; once for each `hold`."""
        with self._lock:
            self._holds -= 1
        self._waiter.ring()

    def add(self, job: AwaitedJob, tell: Tell) -> None:
        """Call `tell` once when the job has ended, from the thread that watches: it must be
        quick."""
        with self._lock:
            if job not in self._tells:
                self._tells[job] = []
                self._waiter.add(job)
            self._tells[job].append(tell)
            self._start()

    def drop(self, job: AwaitedJob, tell: Tell) -> None:
        """Remove a callback."""
        with self._lock, suppress(KeyError, ValueError):
            self._tells[job].remove(tell)
        self._waiter.ring()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="kinetic-futures", daemon=True)
            thread.start()
            self._thread = thread

    def _watch(self) -> None:
        try:
            while self._is_wanted():
                for job, end in self._waiter.wait(_LONG_S):
                    with self._lock:
                        tells = self._tells.pop(job, [])
                    for tell in tells:
                        tell(job, end)
        except BaseException as error:  # noqa: BLE001 - all who wait are told
            _log.exception("jobs cannot be watched any more")
            with self._lock:
                left, self._tells, self._thread = self._tells, {}, None
            for job, tells in left.items():
                for tell in tells:
                    tell(job, error)

    def _is_wanted(self) -> bool:
        with self._lock:
            wanted = self._holds > 0 or any(self._tells.values())
            self._thread = self._thread if wanted else None
            return wanted


@functools.cache
def _watcher_of(pid: int) -> FutureWatcher:
    """A forked process needs a thread of its own."""
    return FutureWatcher()


def watcher() -> FutureWatcher:
    """Return the watcher of this process."""
    return _watcher_of(os.getpid())


class Callbacks:
    """The callbacks of one job, called in the order in which they were added: each once, in one
    daemon thread."""

    def __init__(self, job: JobFuture) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callback, AbstractEventLoop | None]] = []
        self._watching = False
        self._pid = os.getpid()

    def add(self, call: Callback) -> None:
        """Call it with the job when that has ended, at once if it has."""
        loop = _loop_of(call)
        if self._job.done():
            _invoke(call, loop, self._job)
            return
        with self._lock:
            if self._pid != os.getpid():  # The callbacks of the process that forked are its own.
                self._waiting, self._watching, self._pid = [], False, os.getpid()
            self._waiting.append((call, loop))
            is_watched, self._watching = self._watching, True
        if not is_watched:
            watcher().add(self._job, self._begin)

    def remove(self, call: Callback) -> int:
        """Do not call it any more; return how often it was to be called."""
        with self._lock:
            before = len(self._waiting)
            self._waiting = [each for each in self._waiting if each[0] != call]
            return before - len(self._waiting)

    def _begin(self, job: AwaitedJob, end: object) -> None:
        with suppress(RuntimeError):  # No thread can be started while the interpreter shuts down.
            threading.Thread(
                target=self._call_all, name=f"kinetic-done-{self._job.ref.job_id}", daemon=True
            ).start()

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._watching = False
                    return
                call, loop = self._waiting.pop(0)
            try:
                _invoke(call, loop, self._job)
            except BaseException as error:  # noqa: BLE001 - `sys.exit()`, for example: the others are still called
                _log.warning("a callback of %s raised %r", self._job.ref.job_id, error)


def _loop_of(call: Callback) -> AbstractEventLoop | None:
    """Return the event loop in which a callback of asyncio's own belongs: `asyncio.wait` takes a
    handle for a future of its loop, and would not be woken by another thread."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or not str(getattr(call, "__module__", "")).startswith("asyncio."):
        return None
    return cast("AbstractEventLoop | None", asyncio._get_running_loop())


def _invoke(call: Callback, loop: AbstractEventLoop | None, job: JobFuture) -> None:
    if loop is not None:
        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(call, job)
        return
    try:
        call(job)
    except Exception:  # noqa: BLE001 - a user's own code
        _log.exception("a callback of %s failed", job.ref.job_id)


async def wait_for_end(job: JobFuture) -> None:
    """Wait until the job has ended, without blocking the event loop. Cancelling this does not
    affect the job."""
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(job: AwaitedJob, end: object) -> None:
        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(_resolve, done, None)

    watching = watcher()
    watching.add(job, tell)
    try:
        await done
    finally:
        watching.drop(job, tell)


async def beside(
    work: Callable[[], T],
    *,
    abandoned: Callable[[], object] = lambda: None,
    late: Callable[[T], object] = lambda value: None,
    daemon: bool,
) -> T:
    """Run something in a thread of its own, without blocking the event loop.

    Args:
        work: what to run.
        abandoned: called when the wait is cancelled; the thread keeps running.
        late: called with the value if the wait was cancelled before it had it.
        daemon: whether the process may end before the thread does.
    """
    __tracebackhide__ = True  # Notebooks and pytest hide this frame.
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context, lock, is_left = copy_context(), threading.Lock(), False
    values: list[T] = []

    def run() -> None:
        end: tuple[T | None, BaseException | None]
        try:
            value = context.run(work)
            end = (value, None)
            with lock:
                values.append(value)
                is_late = is_left
            if is_late:
                late(value)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited; a future cannot hold StopIteration
            passed = (run.__code__, _code_of(work))
            end = (None, error.with_traceback(drop_frames(error.__traceback__, passed)))
        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(_resolve, done, end)

    threading.Thread(target=run, name="kinetic-await", daemon=daemon).start()
    try:
        value, error = await done
    except asyncio.CancelledError:
        abandoned()
        with lock:
            is_left, there = True, tuple(values)
        for value in there:  # This loop had not heard of it.
            late(value)
        raise
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _code_of(work: Callable[[], object]) -> CodeType | None:
    function = work.func if isinstance(work, functools.partial) else work
    return getattr(function, "__code__", None)


def ask_briefly(question: Callable[[], bool]) -> bool:
    """Return the answer; False if it takes longer than an event loop should be blocked."""
    answers: list[bool] = []
    asking = threading.Thread(
        target=lambda: answers.append(question()), name="kinetic-ask", daemon=True
    )
    asking.start()
    asking.join(_BRIEFLY_S)
    return any(answers)


def _resolve(done: asyncio.Future[Any], end: Any) -> None:
    if not done.done():  # The wait may have been cancelled.
        done.set_result(end)


def as_completed(handles: Iterable[J], timeout: Duration | None = None) -> Iterator[J]:
    """Yield handles as their jobs end, those that have ended already first; each once.

    The jobs may be of different functions and batches. A failed job is yielded like the others, and
    its `result()` raises. A batch that still submits jobs, or tries failed inputs again, has its
    own `as_completed()`.

    Args:
        handles: of the jobs.
        timeout: the longest wait: seconds, "90s", "1h30m" or a `timedelta`; None waits until all
            have ended.

    Raises:
        UsageTypeError: something other than handles was passed.
        WaitTimeout: the time has passed; the jobs keep running.
    """
    if not isinstance(handles, Iterable):
        raise UsageTypeError(
            "as_completed takes a list of job handles; it is "
            f"{_name_kind(handles)}.{_of_batch(handles)}"
        )
    jobs = dict.fromkeys(handles)
    for index, job in enumerate(jobs):
        if not hasattr(job, "ending_fd"):
            raise UsageTypeError(
                f"as_completed takes job handles; handles[{index}] is "
                f"{_name_kind(job)}.{_of_batch(job)}"
            )
    return _as_completed(list(jobs), None if timeout is None else patience_s(timeout))


def _as_completed(jobs: list[J], limit_s: float | None) -> Iterator[J]:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    over: queue.SimpleQueue[AwaitedJob] = queue.SimpleQueue()
    left: dict[AwaitedJob, J] = {job: job for job in jobs}

    def tell(job: AwaitedJob, end: object) -> None:
        over.put(job)

    try:
        for job, found in zip(jobs, waiter.look(jobs), strict=True):
            if isinstance(found, Outcome | NotFound):
                del left[job]
                yield job
        for job in left.values():
            watcher().add(job, tell)
        while left:
            try:
                ended = over.get(
                    timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0)
                )
            except queue.Empty:
                late = f"{len(left)} of {len(jobs)} jobs have not ended within {limit_s:g} s"
                with own_frames_hidden:
                    raise WaitTimeout(f"{late}: {_name_jobs(left)}. They go on.") from None
            yield left.pop(ended)
    except KeyboardInterrupt as interrupt:
        interrupt.__traceback__ = None
        go = "goes" if len(left) == 1 else "go"
        words = f"{_name_jobs(left)} {go} on; see `kinetic jobs list`."
        console.notice(f"\nkinetic: {words}", once=False)
        raise
    finally:
        for job in left.values():
            watcher().drop(job, tell)


def _name_jobs(jobs: Iterable[AwaitedJob]) -> str:
    return name_some([job.ref.job_id for job in jobs], _NAMED)


def _name_kind(value: object) -> str:
    return "None" if value is None else a_type(value)


def _of_batch(value: object) -> str:
    if value is None:
        return (
            " An input of a batch has no job before it is submitted: use the batch's own "
            "as_completed()."
        )
    return " A batch has an as_completed() of its own." if hasattr(value, "as_completed") else ""
