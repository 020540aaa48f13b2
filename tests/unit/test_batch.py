"""Batches of scripted jobs: every input ends exactly once, and results keep the inputs' order."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from batch_cases import NUMBERS, PATIENCE_S, attached, begin, until
from batch_fakes import Scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic import errors
from kinetic._client.batch.run import BatchRules
from kinetic._client.futures import EndWatcher
from kinetic._store.local import LocalStore
from kinetic.job_status import JobStatus


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


# -- drawing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [2, 30])
def test_a_batch_is_drawn(store, inputs):
    batch = begin(Scripted(store), inputs, name="<sweep>")
    batch.wait(PATIENCE_S)
    html = batch._repr_html_()
    assert "&lt;sweep&gt;" in html
    assert f"{inputs} inputs: succeeded" in html
    assert batch.group_id in html


# -- results ---------------------------------------------------------------------------------------


def test_values_come_in_the_order_of_the_inputs(store):
    batch = begin(Scripted(store), 5)
    assert batch.results(timeout=PATIENCE_S) == [(i, 1) for i in range(5)]
    assert batch.results() == [(i, 1) for i in range(5)], "can be had again"
    assert batch.status_counts() == {"SUCCEEDED": 5}
    assert [job.group_index for job in batch.jobs] == [0, 1, 2, 3, 4]
    assert {(job.group_id, job.group_kind) for job in batch.jobs} == {(batch.group_id, "map")}


def test_values_in_the_order_in_which_jobs_end(store):
    source = Scripted(store, ["hang", "ok"])
    batch = begin(source, 2)
    ends = batch.as_completed(timeout=PATIENCE_S)
    assert next(ends).group_index == 1
    source.release(0)
    assert [job.group_index for job in ends] == [0]
    assert batch.results(ordered=False) == [(1, 1), (0, 1)]


def test_nothing_to_do(store):
    batch = begin(Scripted(store), 0)
    assert batch.results(timeout=PATIENCE_S) == []
    assert list(batch.as_completed()) == []
    assert (batch.statuses(), batch.jobs, batch.failures()) == ([], [], [])


def test_failures_are_told_together_with_what_there_is(store):
    batch = begin(Scripted(store, ["ok", "raise", "refuse", "lost"]), 5, name="sweep")
    with pytest.raises(errors.BatchError, match=r"3 of 5 inputs") as caught:
        batch.results(timeout=PATIENCE_S)
    error = caught.value
    assert error.group_id == batch.group_id
    assert [job.group_index for job in error.failures] == [1, 3]
    assert error.partial_results == [(0, 1), None, None, None, (4, 1)]
    assert {index: type(why) for index, why in error.submission_failures.items()} == {2: ValueError}
    assert isinstance(error.__cause__, ValueError)
    ids = [job.job_id for job in error.failures]
    lines = str(error).splitlines()
    assert lines[0] == f"3 of 5 inputs of sweep ({batch.group_id}) have no result:"
    assert lines[1] == f"  input 1 ({ids[0]}): ValueError: input 1 failed"
    assert lines[2] == "  input 2: ValueError: input 2 is not wanted"
    assert lines[3].startswith(f"  input 3 ({ids[1]}): HostLost: ")
    assert (
        lines[-1] == f"More: kinetic jobs logs {ids[0]}, kinetic jobs list --group {batch.group_id}"
    )
    assert [job.group_index for job in batch.failures()] == [1, 3]
    assert [str(why) for why in batch.submission_failures.values()] == ["input 2 is not wanted"]
    assert dict(batch.statuses())[1] is JobStatus.FAILED
    assert batch.jobs[2] is None


def test_exceptions_in_place_of_values(store):
    batch = begin(Scripted(store, ["raise", "lost", "refuse"]), 4)
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(each) for each in results] == [ValueError, errors.HostLost, ValueError, tuple]


def test_a_failure_whose_records_were_removed_does_not_cost_the_values(store):
    batch = begin(Scripted(store, ["ok", "raise"]), 2)
    with pytest.raises(errors.BatchError) as caught:
        batch.results(timeout=PATIENCE_S)
    caught.value.failures[0].cleanup()
    assert batch.results(timeout=PATIENCE_S, return_exceptions=True)[0] == (0, 1)
    with pytest.raises(errors.BatchError, match="were removed") as caught:
        batch.results(timeout=PATIENCE_S)
    assert caught.value.partial_results == [(0, 1), None]


def test_a_cleanup_that_fails_does_not_cost_the_values(store, monkeypatch):
    source = Scripted(store, ["ok", "raise"])

    def not_now(ref):
        raise errors.BackendUnavailable("it does not answer")

    monkeypatch.setattr(source, "cleanup", not_now)
    results = begin(source, 2).results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(each) for each in results] == [tuple, ValueError]


class Hollow(ValueError):
    def __len__(self):
        return 0


def test_an_exception_that_is_false_is_an_exception_still(store):
    batch = begin(Scripted(store, [Hollow("no")]), 1)
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(each) for each in results] == [Hollow]


def test_a_batch_error_can_be_pickled(store):
    error = errors.BatchError("grp-1", [], [1, None], {1: ValueError("no")}, message="told")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.partial_results, str(copy.submission_failures[1])) == (
        "told",
        [1, None],
        "no",
    )


def test_patience_ends_but_the_batch_goes_on(store):
    source = Scripted(store, ["ok", "hang"])
    batch = begin(source, 2)
    for wait in (
        batch.wait,
        batch.results,
        lambda timeout: list(batch.as_completed(timeout=timeout)),
    ):
        with pytest.raises(TimeoutError, match=r"kinetic\.attach_batch\(\"grp-"):
            wait(timeout=0.05)
    source.release(1)
    assert batch.results(timeout=PATIENCE_S) == [(0, 1), (1, 1)]


def test_a_watch_that_broke_breaks_one_wait_and_not_the_next(store, monkeypatch):
    source = Scripted(store, ["hang"])
    batch = begin(source, 1)
    poll, bugs = EndWatcher.poll, []

    def break_once(self):
        if bugs:
            raise bugs.pop()
        poll(self)

    def wait_in_vain():
        while True:  # The watch starts with the batch, and may break before `results`.
            bugs[:] = [ZeroDivisionError("a bug")]
            with contextlib.suppress(TimeoutError):
                batch.results(timeout=1)

    monkeypatch.setattr(EndWatcher, "poll", break_once)
    with pytest.raises(ZeroDivisionError):
        wait_in_vain()
    source.release(0)
    assert batch.results(timeout=PATIENCE_S) == [(0, 1)]


# -- submission and cancellation -------------------------------------------------------------------


def test_no_more_jobs_at_a_time_than_allowed(store):
    source = Scripted(store, ["hang"] * 6)
    batch = begin(source, 6, BatchRules(max_concurrent=2))
    ended = 0
    while ended < 6:
        with contextlib.suppress(TimeoutError):
            batch.wait(timeout=0.02)
        for index in list(source.hanging):
            source.release(index)
            ended += 1
    assert batch.results(timeout=PATIENCE_S) == [(i, 1) for i in range(6)]
    assert source.most_at_once <= 2


def test_nothing_more_is_submitted_after_a_failure(store):
    source = Scripted(store, ["hang", "raise"])
    batch = begin(source, 50, BatchRules(max_concurrent=2, fail_fast=True))
    until(batch, lambda: not batch._view.is_submitting)
    assert source.order == [0, 1]
    source.release(0)
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert results[0] == (0, 1), "what ran went on"
    assert [type(e) for e in results[1:]] == [ValueError] + [errors.SubmitError] * 48
    assert "another input failed" in str(results[-1])


def test_a_failure_cancels_what_runs_when_asked_to(store):
    source = Scripted(store, ["hang", "hang", "raise"])
    batch = begin(
        source,
        10,
        BatchRules(max_concurrent=3, fail_fast=True, cancel_running_on_fail=True),
    )
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results[:4]] == [
        errors.JobCancelled,
        errors.JobCancelled,
        ValueError,
        errors.SubmitError,
    ]
    assert source.order == [0, 1, 2]


def test_cancelling_stops_submission_and_jobs(store):
    source = Scripted(store, ["ok", "hang", "hang"])
    batch = begin(source, 9, BatchRules(max_concurrent=2))
    next(batch.as_completed(timeout=PATIENCE_S))
    until(batch, lambda: 2 in source.hanging)
    batch.cancel()
    assert set(batch.status_counts()) == {"SUCCEEDED", "CANCELLED"}, "it has waited"
    assert {job.status() for job in batch.failures()} == {JobStatus.CANCELLED}
    results = batch.results(timeout=0, return_exceptions=True)
    assert [type(e) for e in results] == [
        tuple,
        *[errors.JobCancelled] * 2,
        *[errors.SubmitError] * 6,
    ]
    batch.cancel()
    assert "cancelled" in str(results[-1])


def test_a_job_too_many_for_the_machine_waits_for_another_to_end(store):
    source = Scripted(store, ["hang", "crowded", "ok"])
    batch = begin(source, 3)
    until(batch, lambda: source.turned_away)
    assert source.order == [0]
    source.release(0)
    assert batch.results(timeout=PATIENCE_S) == [(i, 1) for i in range(3)]


ACTS = st.sampled_from(["ok", "ok", "raise", "lost", "refuse"])


SCRIPTS = st.lists(ACTS, max_size=8)


RULES = st.builds(
    BatchRules,
    max_concurrent=st.none() | st.integers(1, 3),
    fail_fast=st.booleans(),
    cancel_running_on_fail=st.booleans(),
)


@given(SCRIPTS, RULES)
@settings(max_examples=30, deadline=None)
def test_every_input_ends_in_exactly_one_way(playground, script, rules):
    store = LocalStore(playground / f"batch-{next(NUMBERS)}")
    source = Scripted(store, script)
    batch = begin(source, len(script), rules)
    values = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert sorted(batch._view.finished) == list(range(len(script)))
    for index, value in enumerate(values):
        if type(value) is errors.SubmitError:
            assert rules.fail_fast, "an input is left out only after a failure"
            assert index not in batch.submission_failures
        elif isinstance(value, tuple):
            assert script[index] == "ok"
        else:
            assert script[index] != "ok"
            assert (index in batch.submission_failures) == (script[index] == "refuse")
    succeeded = sum(isinstance(value, tuple) for value in values)
    counted = len(batch.submission_failures) + len(batch.failures()) + succeeded
    left_out = sum(type(value) is errors.SubmitError for value in values)
    assert counted + left_out == len(script)
    with attached(batch, source) as other:
        others = other.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [isinstance(v, tuple) for v in others] == [isinstance(v, tuple) for v in values]
