"""Reading the states of jobs takes few calls to store and backend, however many jobs exist."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from batch_cases import begin, until
from batch_fakes import Scripted
from doubles.memory_store import MemoryStore
from laptop_fakes import NOW, FakeBackend, plan, ref

from kinetic._client.activity_watch import ActivityWatch
from kinetic._client.board.reader import JobBoard
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, judge
from kinetic._core.place import Place
from kinetic._core.state import JobStanding, JobStatus
from kinetic._store import index
from kinetic._store.local import LocalStore
from kinetic.cli.context import AppContext
from kinetic.errors import BackendUnavailable

JOBS = 200


def fill(store):
    """Fill a store with jobs: of every ten, one runs, one has failed, eight have succeeded."""
    for number in range(JOBS):
        job = replace(ref(f"job-{number:08x}", hosts=1), place=Place("ray"))
        index.add(store, replace(job, created_at=NOW + number))
        if number % 10:
            end = Exit.RAISED if number % 10 == 1 else Exit.RETURNED
            report = HostReport(0, end, "no", started_at=NOW + 1, result_digest="d")
            index.write_outcome(store, job.job_id, judge(1, [report], now=NOW + 300))


def test_a_list_reads_only_what_runs_or_failed_and_asks_a_backend_once():
    store = MemoryStore()
    fill(store)
    backend = FakeBackend(store)
    backend.phases = {f"job-{number:08x}": JobStatus.RUNNING for number in range(0, JOBS, 10)}
    board = JobBoard(store, lambda _: backend, lambda: NOW)
    store.forget_calls()
    refs = board.refs()
    standings = board.read_standings(refs)
    states = [standings[job.job_id].state for job in reversed(refs)]
    ten = [JobStatus.RUNNING, JobStatus.FAILED, *[JobStatus.SUCCEEDED] * 8]
    assert states == ten * (JOBS // 10)
    assert store.calls == {"list": 2, "get": JOBS // 5}
    assert [len(ids) for ids in backend.asked] == [JOBS // 10]
    assert standings["job-00000001"].reason == "host 0: no"
    assert standings["job-00000002"] == JobStanding(JobStatus.SUCCEEDED, "", NOW + 300, NOW + 1)


def test_verdicts_of_many_jobs_are_one_look():
    store = MemoryStore()
    fill(store)
    backend = FakeBackend(store)
    backend.phases = {f"job-{number:08x}": JobStatus.RUNNING for number in range(0, JOBS, 10)}
    board = JobBoard(store, lambda _: backend, lambda: NOW)
    refs = board.refs()
    store.forget_calls()
    verdicts = board.settle(refs)
    assert sum(outcome is None for outcome in verdicts.values()) == JOBS // 10
    assert store.calls == {"get": JOBS}
    assert [len(ids) for ids in backend.asked] == [JOBS // 10]


def test_the_plan_of_a_job_is_read_once_by_a_board_and_again_only_while_there_is_none():
    store, job = MemoryStore(), ref("job-00000001", hosts=1)
    board = JobBoard(store, lambda _: FakeBackend(store), lambda: NOW)
    assert board.plan(job) is None
    own_plan = plan(job_id=job.job_id)
    store.put(layout.JobKeys(job.job_id).plan, json.dumps(own_plan.to_json()).encode())
    store.forget_calls()
    assert [board.plan(job), board.plan(job)] == [own_plan, own_plan]
    assert store.calls == {"get": 1}


def test_a_board_keeps_the_plans_that_it_read_last():
    store = MemoryStore()
    board = JobBoard(store, lambda _: FakeBackend(store), lambda: NOW)
    jobs = [ref(f"job-{number:08x}", hosts=1) for number in range(100)]
    for job in jobs:
        own_plan = plan(job_id=job.job_id)
        store.put(layout.JobKeys(job.job_id).plan, json.dumps(own_plan.to_json()).encode())
        assert board.plan(job) == own_plan
    store.forget_calls()
    assert board.plan(jobs[-1]) == own_plan
    assert store.calls == {}
    assert board.plan(jobs[0]).job_id == jobs[0].job_id
    assert store.calls == {"get": 1}


def test_a_backend_that_does_not_answer_hides_no_other_job():
    store = MemoryStore()
    fill(store)
    backend = FakeBackend(store)
    away = BackendUnavailable("The cluster does not answer.")

    def refuse(refs):
        raise away

    backend.status = refuse
    board = JobBoard(store, lambda _: backend, lambda: NOW)
    refs = board.refs()
    standings, settled = board.read_standings(refs), board.settle(refs)
    assert (standings["job-00000000"].state, standings["job-00000000"].reason) == (
        "UNKNOWN",
        str(away),
    )
    with pytest.raises(BackendUnavailable):
        standings["job-00000000"].status  # noqa: B018
    assert settled["job-00000000"] is away
    assert standings["job-00000002"].status is JobStatus.SUCCEEDED
    assert settled["job-00000002"].ok


def test_when_running_jobs_have_started_is_read_of_all_at_once():
    store = MemoryStore()
    jobs = [ref(f"job-{number:08x}", hosts=1) for number in range(3)]
    ready = GangEvent(EventKind.READY, time=NOW + 7, attempt=1)
    written = json.dumps(ready.to_json()).encode()
    store.put(layout.JobKeys(jobs[1].job_id).events, b'{"torn\n' + written + b"\n")
    board = JobBoard(store, lambda _: FakeBackend(store), lambda: NOW)
    jobs_with_starts = board.add_starts([(job, JobStanding(JobStatus.RUNNING)) for job in jobs])
    assert [standing.started_at for _, standing in jobs_with_starts] == [None, NOW + 7, None]


def test_top_reads_nothing_of_what_has_succeeded():
    store = MemoryStore()
    fill(store)
    backend = FakeBackend(store)
    backend.phases = {f"job-{number:08x}": JobStatus.RUNNING for number in range(0, JOBS, 10)}
    app = AppContext(store, lambda _: backend, lambda _: None, lambda: NOW)
    with ActivityWatch(app, set()) as watch:
        store.forget_calls()
        assert len(watch.poll()) == JOBS // 10
        assert store.calls == {"list": 3, "get": 3 * JOBS // 10}
        store.forget_calls()
        assert len(watch.poll()) == JOBS // 10
        assert store.calls == {"list": 1, "get": 2 * JOBS // 10}


def test_statuses_of_a_batch_are_one_question(tmp_path):
    source = Scripted(LocalStore(tmp_path), ["hang"] * 5)
    batch = begin(source, 5)
    until(batch, lambda: len(source.hanging) == 5 and not batch._view.is_submitting)
    answer, counts = source.status, []

    def status(refs):
        if threading.current_thread() is threading.main_thread():  # the batch's watcher asks, too
            counts.append(len(refs))
        return answer(refs)

    source.status = status
    assert batch.status_counts() == {"RUNNING": 5}
    assert counts == [5]
    batch.cancel()
