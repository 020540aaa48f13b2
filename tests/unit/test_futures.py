"""Jobs as futures: callbacks run once and in order, `await` blocks no loop, `as_completed` yields
the first of many to end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import traceback
from pathlib import Path

import pytest
from batch_fakes import Scripted
from laptop_fakes import put_outcome, put_ref, raised, ref

import kinetic
from kinetic import errors
from kinetic._client import futures
from kinetic._client.futures import EndWatcher, as_completed
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._store.local import LocalStore

PATIENCE_S = 200.0


@pytest.fixture
def source(tmp_path):
    scripted = Scripted(LocalStore(tmp_path), ["hang"] * 100)
    yield scripted
    for index in list(scripted.hanging):
        scripted.release(index)


@pytest.fixture
def job(source):
    return source.submit("grp-00000001", 0, "job-00000000")


def jobs(source, count):
    return [source.submit("grp-00000001", index, f"job-{index:08x}") for index in range(count)]


# -- done, exception -------------------------------------------------------------------------------


def test_a_job_is_done_when_it_has_ended(source, job):
    assert not job.done()
    source.release(0)
    assert job.done()
    assert job.exception() is None


@pytest.mark.parametrize(
    "until",
    [
        concurrent.futures.ALL_COMPLETED,
        concurrent.futures.FIRST_COMPLETED,
        concurrent.futures.FIRST_EXCEPTION,
    ],
)
def test_the_standard_library_waits_for_handles(source, until):
    handles = jobs(source, 3)
    source.release(0)

    def end_others():
        source.release(1)
        handles[2].cancel(cleanup_timeout=0)

    ending = threading.Timer(0.05, end_others)
    ending.start()
    done, others = concurrent.futures.wait(handles, PATIENCE_S, return_when=until)
    ending.join()
    assert done | others == set(handles)
    assert all(handle.done() for handle in done)
    if until == concurrent.futures.ALL_COMPLETED:
        assert done == set(handles)
    elif until == concurrent.futures.FIRST_EXCEPTION:
        assert handles[2] in done


def test_the_standard_library_yields_handles_as_they_end(source):
    handles = jobs(source, 3)
    ends = concurrent.futures.as_completed(handles, PATIENCE_S)
    for index in (2, 0, 1):
        source.release(index)
        assert next(ends) is handles[index]


def test_a_real_future(source):
    handle, failed = jobs(source, 2)
    future = handle.future()
    assert isinstance(future, concurrent.futures.Future)
    assert future is handle.future()
    assert not future.cancel()
    source.release(0)
    assert future.result(PATIENCE_S) == (0, 1)
    assert future.exception() is None
    failed.cancel()
    with pytest.raises(errors.JobCancelled):
        failed.future().result(PATIENCE_S)
    with pytest.raises(TimeoutError):
        source.submit("grp-00000001", 5).future().result(0.01)


def test_many_jobs_are_asked_for_at_once(source):
    several = jobs(source, 20)
    source.asked.clear()
    first = as_completed(several)
    for index in range(20):
        source.release(index)
    assert set(first) == set(several)
    assert all(len(ids) > 1 for ids in source.asked)


def test_the_exception_of_a_job_that_failed(source):
    failed = put_ref(source.store, ref())
    put_outcome(source.store, failed, raised(source.store, failed, 1, ValueError("no")))
    handle = kinetic.JobHandle(failed, source, source.store)
    assert handle.done()
    assert isinstance(handle.exception(), ValueError)


def test_a_cancelled_job_has_an_exception_too(source, job):
    job.cancel()
    assert isinstance(job.exception(), errors.JobCancelled)


def test_waiting_for_the_exception_can_end(job):
    with pytest.raises(errors.WaitTimeout, match=r"job-00000000 has not ended within 0\.01 s"):
        job.exception(timeout="10ms")


@pytest.mark.parametrize(
    "wait",
    [lambda job: job.result(timeout=0.01), lambda job: next(as_completed([job], timeout=0.01))],
)
def test_a_wait_that_is_over_is_shown_at_the_callers_line(job, wait):
    with pytest.raises(errors.WaitTimeout) as caught:
        wait(job)
    visible = [entry for entry in caught.traceback if not entry.ishidden(caught)]
    assert [str(entry.path) for entry in visible if str(entry.path) != __file__] == []


# -- callbacks -------------------------------------------------------------------------------------


def test_callbacks_are_called_once_in_their_order_in_a_daemon_thread(source, job):
    called, over = [], threading.Event()
    job.add_done_callback(
        lambda handle: called.append((1, handle.job_id, threading.current_thread().daemon))
    )
    job.add_done_callback(lambda _: called.append(2))
    job.add_done_callback(lambda _: over.set())
    assert called == []
    source.release(0)
    assert over.wait(PATIENCE_S)
    assert called == [(1, "job-00000000", True), 2]


def test_a_job_that_has_ended_calls_at_once(source, job):
    source.release(0)
    called = []
    job.add_done_callback(called.append)
    assert called == [job]


def test_a_callback_that_raises_is_logged_and_the_others_are_called(source, job, caplog):
    over = threading.Event()
    with caplog.at_level(logging.ERROR, "kinetic"):
        job.add_done_callback(lambda _: 1 / 0)
        job.add_done_callback(lambda _: over.set())
        source.release(0)
        assert over.wait(PATIENCE_S)
    assert "ZeroDivisionError" in caplog.text
    assert job.result() == (0, 1)


def test_a_callback_that_exits_stops_no_other_one(source, job, caplog):
    over = threading.Event()
    with caplog.at_level(logging.CRITICAL, logger="kinetic.futures"):
        job.add_done_callback(lambda _: sys.exit(3))
        job.add_done_callback(lambda _: over.set())
        source.release(0)
        assert over.wait(PATIENCE_S)


def test_a_callback_may_add_another_one(source, job):
    over = threading.Event()
    job.add_done_callback(lambda handle: handle.add_done_callback(lambda _: over.set()))
    source.release(0)
    assert over.wait(PATIENCE_S)


def test_a_slow_callback_holds_up_no_other_job(source):
    first, second = jobs(source, 2)
    free, over = threading.Event(), threading.Event()
    first.add_done_callback(lambda _: free.wait(PATIENCE_S))
    second.add_done_callback(lambda _: over.set())
    source.release(0)
    source.release(1)
    assert over.wait(PATIENCE_S)
    free.set()


def test_a_job_whose_records_were_removed_is_done(source, job):
    over = threading.Event()
    job.add_done_callback(lambda _: over.set())
    source.lose(0)
    assert over.wait(PATIENCE_S)


@pytest.mark.starts_processes
def test_a_fork_has_a_watch_of_its_own(source, job):
    futures.watcher().add(job, lambda job, end: None)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if futures.watcher()._thread is None else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.starts_processes
def test_a_fork_calls_its_own_callbacks_and_no_others(source, job):
    called = []
    job.add_done_callback(lambda _: called.append("the parent's"))
    pid = os.fork()
    if pid == 0:
        over = threading.Event()
        job.add_done_callback(lambda _: over.set())
        source.release(0)
        os._exit(0 if over.wait(PATIENCE_S) and called == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0


class Clock:
    """A clock that stands still, so that the passing of time causes no polls."""

    now = 0.0

    def __call__(self):
        return self.now


class ByHand(EndWatcher):
    """A watcher of jobs' ends without a thread: the test calls its `poll`."""

    def start(self):
        pass


@pytest.fixture
def watching():
    return ByHand(Clock())


def ask(watching):
    watching._clock.now += futures.FIRST_POLL_S
    watching.poll()


def test_a_watch_that_broke_passes_over_whom_it_has_told(source, monkeypatch, caplog):
    first, second = jobs(source, 2)
    watching, poll, bugs = futures.EndWatcher(), EndWatcher.poll, [ZeroDivisionError("a bug")]

    def break_once(self):
        if bugs:
            raise bugs.pop()
        poll(self)

    monkeypatch.setattr(EndWatcher, "poll", break_once)
    for job in (first, second):
        ended = threading.Event()
        watching.add(job, lambda job, end, ended=ended: ended.set())
        source.release(job.group_index)
        assert ended.wait(PATIENCE_S)
    messages = [record.message for record in caplog.records]
    assert messages in (["jobs cannot be watched any more"], [])


def test_a_watch_goes_on_though_the_program_has_closed_its_descriptors(source, tmp_path):
    watching = EndWatcher()
    before, after = jobs(source, 2)
    ended = {job: threading.Event() for job in (before, after)}
    watching.add(before, lambda job, end: ended[job].set())
    for fd in (watching._bell, watching._ringer):
        os.close(fd)
    (tmp_path / "own").write_text("own")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((tmp_path / "own").open("r+b")) for _ in range(20)]
        watching.add(after, lambda job, end: ended[job].set())
        for job in (after, before):
            source.release(job.group_index)
            assert ended[job].wait(PATIENCE_S)
        assert [file.tell() for file in files] == [0] * 20
    assert (tmp_path / "own").read_text() == "own"


def test_a_signal_wakes_whoever_sleeps(source):
    watching, ends = ByHand(clock=Clock()), []
    for job in jobs(source, 3):
        watching.add(job, lambda job, end: ends.append((job.group_index, end.ok)))
    ask(watching)
    assert ends == [], "asked for, and their signals taken"
    threading.Timer(0.01, source.release, [1]).start()
    while not ends:
        watching.sleep()
        watching.poll()
    assert ends == [(1, True)]


def test_a_job_that_nobody_waits_for_any_more_is_not_asked_for(source, watching):
    (job,) = jobs(source, 1)
    calls = [lambda *_: None, lambda *_: None]
    for call in calls:
        watching.add(job, call)
    ask(watching)
    (watched,) = watching._jobs.values()
    fd = watched.fd
    assert os.fstat(fd)
    watching.drop(job, calls[0])
    assert len(watching._jobs) == 1
    watching.drop(job, calls[1])
    watching.drop(job, calls[1])
    assert watching._jobs == {}
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_as_completed_that_gives_up_leaves_nothing_watched(source):
    handles = [source.submit("grp-00000001", index) for index in range(3)]
    with pytest.raises(errors.WaitTimeout):
        list(as_completed(handles, timeout=0.01))
    assert not set(handles) & set(futures.watcher()._jobs)


def test_jobs_beyond_the_limit_of_signals_are_polled(source, watching, monkeypatch):
    monkeypatch.setattr(futures, "MOST_SIGNALS", 2)
    ends = set()
    for job in jobs(source, 5):
        watching.add(job, lambda job, end: ends.add(job.group_index))
    ask(watching)
    assert sum(each.fd >= 0 for each in watching._jobs.values()) == 2
    for index in range(5):
        source.release(index)
    while len(ends) < 5:
        ask(watching)
    assert watching._jobs == {}


def test_jobs_without_signals_are_asked_for_ever_less_often(source, watching):
    (job,) = jobs(source, 1)
    clock, polls = watching._clock, []
    job.ending_fd = lambda: None
    job.settle = lambda refs: polls.append(clock.now) or {job.job_id: None}
    watching.add(job, lambda *_: None)
    while clock.now < 60.0:
        watching.poll()
        clock.now += 0.01
    gaps = [b - a for a, b in itertools.pairwise(polls)]
    assert gaps[0] < 0.05
    assert futures.SLOWEST_POLL_S - 0.05 < gaps[-1] < futures.SLOWEST_POLL_S + 0.05
    assert gaps == sorted(gaps, key=lambda gap: round(gap, 1))


@pytest.mark.parametrize(
    "fault",
    [errors.StoreError("It does not answer."), errors.BackendUnavailable("It does not answer.")],
)
def test_a_job_that_cannot_be_asked_for_just_now_is_asked_for_again(
    source, watching, caplog, fault
):
    (job,) = jobs(source, 1)
    job.ending_fd = lambda: None
    real, faults, ends = job.settle, [fault], []
    job.settle = lambda refs: {job.job_id: faults.pop()} if faults else real(refs)
    watching.add(job, lambda job, end: ends.append(end))
    ask(watching)
    assert (ends, faults) == ([], [])
    source.release(0)
    watching._clock.now += 1.0
    watching.poll()
    assert ends[0].ok
    assert "It does not answer." in caplog.text


def test_all_jobs_of_a_place_are_one_question(source, watching):
    several = jobs(source, 20)
    for job in several:
        watching.add(kinetic.JobHandle(job.ref, source), lambda *_: None)
    ask(watching)
    assert source.asked == [[job.job_id for job in several]]


def test_removed_records_are_an_end(source, watching):
    (job,) = jobs(source, 1)
    ends = []
    watching.add(job, lambda job, end: ends.append(end))
    source.lose(0)
    ask(watching)
    assert isinstance(ends[0], errors.NotFound)


# -- await -----------------------------------------------------------------------------------------


def test_awaiting_does_not_block_the_loop(source, job):
    async def main():
        waiting = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        source.release(0)  # This runs while `waiting` waits.
        return await asyncio.wait_for(waiting, PATIENCE_S)

    assert asyncio.run(main()) == (0, 1)


def test_gather_returns_the_values_of_jobs_in_order(source):
    handles = jobs(source, 3)

    async def main():
        values = asyncio.gather(*handles)
        for index in (2, 0, 1):
            source.release(index)
        return await asyncio.wait_for(values, PATIENCE_S)

    assert asyncio.run(main()) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(3), asyncio.CancelledError()])
def test_awaiting_raises_what_the_function_raised(source, error):
    failed = put_ref(source.store, ref())
    put_outcome(source.store, failed, raised(source.store, failed, 0, error))

    async def main():
        await kinetic.JobHandle(failed, source, source.store)

    # Any coroutine that raises StopIteration raises RuntimeError instead.
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected):
        asyncio.run(main())


def test_cancelling_the_waiting_leaves_the_job_running(source, job):
    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(job, 0.01)
        assert "cancel" not in source.calls
        source.release(0)
        return await job

    assert asyncio.run(main()) == (0, 1)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    "until", [asyncio.ALL_COMPLETED, asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION]
)
def test_asyncio_waits_for_handles(source, until, debug):
    handles = jobs(source, 2)

    async def main():
        waiting = asyncio.ensure_future(asyncio.wait(handles, return_when=until))
        await asyncio.sleep(0)
        source.release(0)
        if until != asyncio.FIRST_COMPLETED:
            source.release(1)
        return await asyncio.wait_for(waiting, PATIENCE_S)

    ended, _ = asyncio.run(main(), debug=debug)
    assert handles[0] in ended
    assert (handles[1] in ended) is (until != asyncio.FIRST_COMPLETED)


def test_a_wait_of_asyncio_that_gives_up_takes_its_callbacks_back(source, job):
    async def main():
        return await asyncio.wait([job], timeout=0.01)

    assert asyncio.run(main()) == (set(), {job})
    assert job._callbacks == []


# -- the first of many -----------------------------------------------------------------------------


def test_jobs_come_as_they_end_each_once(source):
    handles = jobs(source, 4)
    source.release(2)
    ends = as_completed([*handles, handles[0]])
    assert next(ends) is handles[2]
    for index in (3, 0, 1):
        source.release(index)
        assert next(ends) is handles[index]
    assert list(ends) == []


def test_ctrl_c_names_the_jobs_and_shows_no_frames_of_ours(source, job, monkeypatch, capsys):
    class Interrupted(queue.SimpleQueue):
        def get(self, timeout=None):
            raise KeyboardInterrupt

    monkeypatch.setattr(futures.queue, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        next(kinetic.as_completed([job]))
    assert str(Path(futures.__file__)) not in "".join(traceback.format_exception(caught.value))
    assert f"{job.job_id} keeps running; see `kinetic jobs list`" in capsys.readouterr().err


def test_as_completed_of_no_jobs_yields_nothing():
    assert list(kinetic.as_completed([])) == []


def test_waiting_for_many_can_end(source):
    first, second, third = jobs(source, 3)
    source.release(0)
    with pytest.raises(
        TimeoutError,
        match=r"After 0\.01 s, 2 of 3 jobs had not ended: job-00000001, job-00000002\. They",
    ):
        list(as_completed([first, second, third], timeout="10ms"))
    assert list(itertools.islice(as_completed([first, second, third]), 1)) == [first]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (3, "must be given a list of job handles; got an int"),
        (
            [None],
            r"handles\[0\] must be a job handle; got a NoneType. For the jobs of a batch",
        ),
        (["job-1"], r"handles\[0\] must be a job handle; got a str"),
    ],
)
def test_what_is_not_a_handle_is_refused_at_once(wrong, words):
    with pytest.raises(errors.UsageTypeError, match=words):
        as_completed(wrong)


# -- completion ------------------------------------------------------------------------------------


def test_dir_of_a_handle_lists_methods_and_fields(job):
    names = dir(job)
    assert {
        "job_id",
        "accelerator",
        "display_name",
        "group_index",
        "result",
        "done",
        "output_dir",
        "__await__",
    } <= set(names)
    assert [name for name in names if name.startswith("_") and not name.startswith("__")] == []
    for name in names:
        with contextlib.suppress(errors.KineticError):
            getattr(job, name)


def test_a_lost_host_can_be_awaited(source):
    lost = put_ref(source.store, ref())
    put_outcome(source.store, lost, HostReport(1, Exit.SIGNAL, detail="killed"))

    async def main():
        await kinetic.JobHandle(lost, source, source.store)

    with pytest.raises(errors.HostLost):
        asyncio.run(main())
