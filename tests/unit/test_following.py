"""Following a job: output is unchanged, and there is exactly one verdict, even if the process that
should have judged has died."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import (
    NOW,
    FakeBackend,
    chunk,
    plan,
    put_attempt,
    put_outcome,
    put_ref,
    put_report,
    put_success,
    raised,
    ref,
)

from kinetic._backends import attempt_logs
from kinetic._backends.base import LogRequest, Status
from kinetic._client import following
from kinetic._client.board.reader import JobBoard
from kinetic._client.following import Finished, Tick
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._core.place import Place
from kinetic._core.state import JobStatus
from kinetic._store import index
from kinetic._store.base import folder_of
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound, StoreError


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def backend(store):
    return FakeBackend(store)


def follow(backend, store, job, request=None, **more):
    pauses = []
    more = {"now": lambda: NOW + 1, "pause": pauses.append} | more
    return list(following.follow(backend, store, job, request or LogRequest(), **more))


def board(backend, store, now=NOW):
    return JobBoard(store, lambda _: backend, lambda: now)


def take_next(looks):
    next(looks)()


def test_output_then_one_verdict(store, backend):
    job = put_ref(store, ref())
    outcome = put_success(store, job, 1)
    backend.output = [chunk(b"a\n"), None, chunk(b"b\n"), chunk(b"other\n", host=1)]
    events = follow(backend, store, job)
    assert events[:3] == [chunk(b"a\n"), Tick(), chunk(b"b\n")]
    assert [e for e in events[3:] if e != Tick()] == [Finished(outcome)]


def test_a_stream_that_read_everything_is_not_read_again(store):
    """The job had its verdict before the stream read its end."""

    class Complete(FakeBackend):
        def logs(self, ref, request):
            yield from super().logs(ref, request)
            return True

    job, backend = put_ref(store, ref()), Complete(store)
    outcome = put_success(store, job, 1)
    backend.output = [chunk(b"a\n")]
    assert follow(backend, store, job) == [chunk(b"a\n"), Finished(outcome)]
    assert len(backend.requests) == 1


@pytest.mark.parametrize("has_verdict", [True, False])
def test_output_of_a_cluster_is_complete_once_there_is_a_verdict(has_verdict):
    """A job that only its cluster knows to have ended may still get output."""
    store, job = MemoryStore(), ref()
    if has_verdict:
        put_success(store, job, 1)
    ended = {job.job_id: Status(JobStatus.FAILED)}
    stream = attempt_logs.read_of_cluster(store, job, LogRequest(), lambda refs: ended)
    with pytest.raises(StopIteration) as stopped:
        next(stream)
    assert stopped.value.value is has_verdict


def test_a_job_that_is_being_submitted_is_waited_for(store, backend):
    job = put_ref(store, ref())
    looks = iter([lambda: None, lambda: put_success(store, job, 1), lambda: None])
    backend.finish = functools.partial(take_next, looks)
    events = follow(backend, store, job)
    assert [type(e) for e in events] == [Tick, Finished]
    assert events[-1].outcome.ok


def test_what_was_shown_is_not_shown_again_when_the_stream_breaks(store, backend):
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.RUNNING
    backend.output = [chunk(b"a\n")]
    looks = iter([lambda: None] * 2 + [lambda: put_success(store, job, 1), lambda: None])
    backend.finish = functools.partial(take_next, looks)
    events = follow(backend, store, job)
    assert [e for e in events if e == chunk(b"a\n")] == [chunk(b"a\n")]
    assert {r.hosts for r in backend.requests} == {(0,)}


def test_a_killed_supervisor_is_told_and_the_verdict_kept(store, backend):
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    (finished,) = follow(backend, store, job)
    assert finished.outcome.supervisor_lost
    assert finished.outcome.reason == "the job's supervisor was killed"
    assert [r.exit for r in finished.outcome.reports] == [Exit.AGENT_LOST] * 4
    assert board(backend, store).verdict(job) == finished.outcome
    assert follow(backend, store, job, now=lambda: NOW + 99) == [finished], (
        "the first verdict stays"
    )


def test_what_the_supervisor_had_said_before_it_was_killed_is_the_reason(store, backend):
    """The leader had stopped the gang, because a host got no threads, and then crashed itself."""
    job = put_ref(store, ref())
    lines = [
        {"kind": "stop", "attempt": 1, "time": NOW, "detail": "host 0: the limit is 14."},
        {"kind": "finished", "attempt": 1, "time": NOW},
    ]
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    store.put(layout.JobKeys(job.job_id).events, data)
    backend.phases[job.job_id] = JobStatus.FAILED
    (finished,) = follow(backend, store, job)
    assert finished.outcome.supervisor_lost
    assert finished.outcome.reason == "host 0: the limit is 14."


@pytest.mark.parametrize("first", [Exit.AGENT_LOST, Exit.RETURNED])
def test_an_agent_that_ended_the_supervisor_is_the_reason(store, backend, first):
    """Also if another host has returned."""
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    why = "The leader has not answered for 30 s. This host's agent gave up."
    for report in (HostReport(0, first), HostReport(1, Exit.STOPPED, why, ended_at=NOW)):
        put_report(store, job, report)
    (finished,) = follow(backend, store, job)
    assert finished.outcome.supervisor_lost
    assert finished.outcome.reason == why


def test_a_gang_that_had_returned_succeeds_although_its_supervisor_was_killed(store, backend):
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    for host in range(4):
        put_report(
            store, job, HostReport(host, Exit.RETURNED, result_digest="d" * 64 if host == 0 else "")
        )
    (finished,) = follow(backend, store, job)
    assert finished.outcome.ok
    assert finished.outcome.supervisor_lost


def test_reports_of_an_earlier_attempt_do_not_count(store, backend):
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    first = raised(store, job, 2, ValueError("first attempt"))
    put_report(store, job, first)
    put_attempt(store, job, 1, first)
    put_report(store, job, HostReport(0, Exit.STOPPED), attempt=2)
    (finished,) = follow(backend, store, job)
    assert finished.outcome.attempt == 2
    assert 2 in finished.outcome.blamed
    assert finished.outcome.reports[2].exit is Exit.AGENT_LOST


def test_the_supervisors_verdict_wins_a_race(store, backend):
    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    true = put_success(store, job, 1)
    data = store.get(layout.JobKeys(job.job_id).outcome)
    store.delete(layout.JobKeys(job.job_id).outcome)

    class Racing(LocalStore):
        def put(self, key, content, *, if_absent=False):
            if key == layout.JobKeys(job.job_id).outcome:
                super().put(key, data)
            return super().put(key, content, if_absent=if_absent)

    racing = Racing(store.path("x").parent)
    assert follow(backend, racing, job) == [Finished(true)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"verdict": "maybe"}',
        b'{"verdict": "failed", "reports": [1]}',
    ],
)
def test_a_damaged_verdict_is_rebuilt_from_the_reports(store, backend, garbage, caplog):
    job = put_ref(store, ref())
    put_report(store, job, raised(store, job, 1, ValueError("no")))
    for host in (0, 2, 3):
        put_report(store, job, HostReport(host, Exit.STOPPED))
    store.put(layout.JobKeys(job.job_id).outcome, garbage)
    (finished,) = follow(backend, store, job)
    assert finished.outcome.blamed == (1,)
    assert "ValueError: no" in finished.outcome.reason
    assert "damaged" in finished.outcome.reason
    assert job.job_id in caplog.text
    assert store.get(layout.JobKeys(job.job_id).outcome) == garbage, "evidence is not overwritten"


def test_a_submission_that_was_interrupted_is_told_after_a_while(store, backend):
    job = put_ref(store, ref())
    (finished,) = follow(backend, store, job, now=lambda: NOW + 61)
    assert finished.outcome.supervisor_lost
    assert "never started" in finished.outcome.reason


def test_a_clock_that_was_set_back_does_not_make_a_job_start_for_ever(store, backend):
    job = put_ref(store, ref())
    (finished,) = follow(backend, store, job, now=lambda: NOW - 3600)
    assert "never started" in finished.outcome.reason


def test_a_folder_that_was_removed_is_told_at_once(store, backend):
    job = put_ref(store, ref())
    store.delete(layout.JobKeys(job.job_id).prefix)
    with pytest.raises(NotFound, match="removed"):
        follow(backend, store, job)
    assert not store.has(layout.JobKeys(job.job_id).outcome)


def test_an_earlier_attempt_is_not_taken_for_the_one_that_was_under_way(store, backend):
    job = put_ref(store, ref(hosts=1))
    backend.phases[job.job_id] = JobStatus.FAILED
    first = HostReport(0, Exit.RAISED, detail="of attempt 1")
    put_report(store, job, first)
    put_attempt(store, job, 1, first)
    (finished,) = follow(backend, store, job)
    assert finished.outcome.attempt == 2
    assert finished.outcome.first.exit is Exit.AGENT_LOST
    assert finished.outcome.supervisor_lost


@pytest.mark.parametrize("elastic", [False, True])
def test_the_loss_that_an_elastic_job_would_have_survived_did_not_end_it(store, backend, elastic):
    planned = plan(options={"slices": (1, 2) if elastic else 2})
    job = put_ref(store, ref(hosts=2))
    store.put(layout.JobKeys(job.job_id).plan, json.dumps(planned.to_json()).encode())
    backend.phases[job.job_id] = JobStatus.FAILED
    put_report(store, job, HostReport(0, Exit.STOPPED, "host 1 died"))
    put_report(store, job, HostReport(1, Exit.SIGNAL, "killed by SIGKILL", signal=9))
    (finished,) = follow(backend, store, job)
    assert finished.outcome.reason == "the job's supervisor was killed"
    assert finished.outcome.blamed == (() if elastic else (1,))


def test_how_the_supervisor_was_lost_is_told_as_its_agents_saw_it(store, backend):
    job = put_ref(store, ref(hosts=2))
    backend.phases[job.job_id] = JobStatus.FAILED
    put_report(store, job, HostReport(1, Exit.STOPPED, detail="It did not answer for 30 s."))
    (finished,) = follow(backend, store, job)
    assert finished.outcome.reason == "It did not answer for 30 s."


def test_removed_records_are_not_found(store, backend):
    with pytest.raises(NotFound, match="removed"):
        follow(backend, store, ref())
    assert list(store.list("")) == []


def test_a_store_that_takes_no_verdict_still_gives_one(store, backend, caplog):
    from kinetic.errors import StoreFull

    class Full(LocalStore):
        def put(self, key, content, *, if_absent=False):
            raise StoreFull("The disk of the store is full.")

    job = put_ref(store, ref())
    backend.phases[job.job_id] = JobStatus.FAILED
    (finished,) = follow(backend, Full(store.path("x").parent), job)
    assert finished.outcome.supervisor_lost
    assert "The disk of the store is full." in caplog.text


def test_following_logs_nothing_when_all_is_well(store, backend, caplog):
    caplog.set_level(logging.WARNING)
    job = put_ref(store, ref())
    put_outcome(store, job, HostReport(2, Exit.SIGNAL, signal=9))
    follow(backend, store, job)
    assert caplog.records == []


class Queue(FakeBackend):
    """A backend that gives one reason after the other why its job waits."""

    name = "pathways"

    def __init__(self, store, reasons):
        super().__init__(store)
        self.reasons_given = iter(reasons)
        self.unready = self.lost = ""

    def why_lost(self, ref, host):
        return self.lost

    def why_unready(self, ref):
        return self.unready

    def why_waiting(self, ref):
        return next(self.reasons_given)


def test_why_a_job_waits_is_said_when_it_changes(store):
    backend = Queue(store, ["", "no node", "no node", "an image is pulled", None])
    job = put_ref(store, ref())
    put_success(store, job, 1)
    backend.output = [None] * 9
    times = iter(range(1, 10_000))
    events = follow(backend, store, job, now=lambda: NOW + next(times) * following.EXPLAIN_EVERY_S)
    reasons = [event.reason for event in events if isinstance(event, following.Waiting)]
    assert reasons == ["no node", "an image is pulled"]


def test_who_reads_output_is_told_why_there_is_none(store):
    backend = Queue(store, ["no node", None])
    job = put_ref(store, ref())
    put_success(store, job, 1)
    backend.output = [None] * 4
    notices, times = [], iter(range(1, 10_000))
    request = LogRequest(hosts=None, follow=True)
    now = lambda: NOW + next(times) * following.EXPLAIN_EVERY_S  # noqa: E731
    for _ in following.chunks(backend, store, job, request, tell=notices.append, now=now):
        pass
    assert notices == [f"kinetic: {job.job_id}: no node"]


def test_a_start_that_was_given_up_is_explained_by_what_was_waited_for(store):
    job = put_ref(store, dataclasses.replace(ref(), place=Place("pathways")))
    late = HostReport(0, Exit.NEVER_JOINED, "was not ready within 8 s (start_timeout)")
    put_outcome(store, job, late)
    backend = Queue(store, [None])
    assert board(backend, store).outcome(job).reports[0] == late
    backend.unready = "No node of the cluster has 8x8."
    for _ in range(2):
        outcome = board(backend, store).outcome(job)
        assert outcome.reason.endswith(". No node of the cluster has 8x8.")
        assert outcome.reports[0].detail.count("No node") == 1
        backend.unready = "something else"


def test_a_reason_that_is_told_already_is_not_told_again(store):
    job = put_ref(store, dataclasses.replace(ref(), place=Place("pathways")))
    reason = "its workload was removed from the cluster"
    put_outcome(
        store, job, HostReport(0, Exit.AGENT_LOST, reason), reason=f"host 0 was lost: {reason}"
    )
    backend = Queue(store, [None])
    backend.lost = "Its workload was removed from the cluster."
    outcome = board(backend, store).outcome(job)
    assert (outcome.reason, outcome.reports[0].detail) == (f"host 0 was lost: {reason}", reason)
    assert outcome.explained


def test_what_a_job_holds_that_never_ran_is_released(store, backend):
    job = put_ref(store, dataclasses.replace(ref(), place=Place("pathways")))
    backend.phases[job.job_id] = JobStatus.FAILED
    backend.reasons[job.job_id] = "no node pool has 4x4"
    (finished,) = follow(backend, store, job)[-1:]
    assert not finished.outcome.ok
    assert backend.calls == ["cleanup"]


class RemovedMeanwhile(LocalStore):
    """A store from which another process removes the job just before or after the verdict."""

    moment = "before"

    def put(self, key, data, **how):
        verdict = key.endswith("/outcome.json")
        if verdict and self.moment == "before":
            index.remove(self, "job-0000abcd")
        wrote = super().put(key, data, **how)
        if verdict and self.moment == "after":
            index.remove(self, "job-0000abcd")
        return wrote


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_job_that_was_removed_meanwhile_is_not_judged(moment, tmp_path, backend):
    store = RemovedMeanwhile(tmp_path / "removed")
    store.moment = moment
    job = put_ref(store, ref("job-0000abcd"))
    backend.phases[job.job_id] = JobStatus.FAILED
    assert board(backend, store, time.time()).read_standing(job).status is JobStatus.NOT_FOUND
    assert list(store.parts(layout.JOBS)) == []
    job = put_ref(store, ref("job-0000abcd"))
    with pytest.raises(NotFound, match="were removed"):
        board(backend, store, time.time()).outcome(job)
    assert list(store.parts(layout.JOBS)) == []


def test_what_was_removed_is_not_made_again_by_a_running_job(store):
    job = put_ref(store, ref())
    running = LocalStore(folder_of(store), existing=True)
    running.put(layout.HostKeys(job.job_id, 1, 0).report, b"{}")
    index.remove(store, job.job_id)
    for key in (layout.JobKeys(job.job_id).outcome, layout.HostKeys(job.job_id, 1, 0).report):
        with pytest.raises(StoreError, match=f"{job.job_id} was removed"):
            running.put(key, b"{}")
    assert list(store.parts(layout.JOBS)) == []


@pytest.mark.parametrize("wrong_by_s", [-3600, 3600])
def test_a_submitters_clock_that_is_wrong_does_not_end_its_job(store, backend, wrong_by_s):
    now = time.time()
    submitted = ref("job-0000abcd", created_at=now + wrong_by_s)
    job = put_ref(store, dataclasses.replace(submitted, place=Place("pathways")))
    assert board(backend, store, now).read_standing(job).state == JobStatus.PENDING
    os.utime(folder_of(store) / layout.JobKeys(job.job_id).plan, (now - 3600, now - 3600))
    assert board(backend, store, now).read_standing(job).state == JobStatus.FAILED
