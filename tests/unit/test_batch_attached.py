"""Batches as seen by a process that attached to them, and options of batches."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import threading

import pytest
from batch_cases import PATIENCE_S, attached, begin, leave, until
from batch_fakes import Scripted
from doubles.memory_store import MemoryStore

from kinetic import errors
from kinetic._backends import registry
from kinetic._client.batch import handle as handles
from kinetic._client.batch import launch, records
from kinetic._client.batch.inputs import BatchEnd, InputState, inputs_of, job_id_of
from kinetic._client.batch.records import BatchRecords, Stamp, new_batch
from kinetic._client.batch.run import AttachedView, BatchRules, BatchSubmitter, BatchView
from kinetic._core import layout
from kinetic._store.local import LocalStore
from kinetic._system import machine


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


# -- from another process --------------------------------------------------------------------------


def test_what_is_written_does_not_grow_with_the_square_of_the_inputs(store):
    source = Scripted(store)
    batch = begin(source, 40)
    batch.results(timeout=PATIENCE_S)
    assert sorted(store.list(layout.GroupKeys(batch.group_id).prefix)) == [
        layout.GroupKeys(batch.group_id).batch,
        layout.GroupKeys(batch.group_id).end,
        layout.GroupKeys(batch.group_id).owner,
    ]


def test_a_batch_is_found_while_it_is_still_submitted(store):
    source = Scripted(store, ["ok", "hang"])
    batch = begin(source, 3, BatchRules(max_concurrent=1), name="sweep", tags={"for": "paper"})
    next(batch.as_completed(timeout=PATIENCE_S))
    with attached(batch, source) as other:
        assert (other.name, other.tags, len(other)) == ("sweep", {"for": "paper"}, 3)
        until(other, lambda: 1 in source.hanging)
        source.release(1)
        assert other.results(timeout=PATIENCE_S) == [(i, 1) for i in range(3)]


def test_another_process_can_cancel(store):
    source = Scripted(store, ["hang"])
    batch = begin(source, 5, BatchRules(max_concurrent=1))
    until(batch, lambda: 0 in source.hanging)
    with attached(batch, source) as other:
        other.cancel()
        results = other.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results] == [errors.JobCancelled] + [errors.SubmitError] * 4
    assert "cancelled" in str(results[-1])
    batch.wait(timeout=PATIENCE_S)


def test_nothing_is_submitted_in_place_of_what_another_process_cancels(tmp_path):
    """Another process cancels just after the check for a stop request: no further job starts."""
    cancelled = threading.Event()

    class CancelledAfterALook(LocalStore):
        def has(self, key):
            exists = super().has(key)
            if key == layout.GroupKeys(batch.group_id).stop and source.hanging:
                records.ask_to_stop()
                source.cancel(source.hanging[0])
                events = view.events
                while not view.finished:
                    view.wait_for_event(PATIENCE_S, events)
                    events = view.events
                cancelled.set()
            return exists

    store = CancelledAfterALook(tmp_path)
    source = Scripted(store, ["hang"])
    batch = new_batch(3, now=0.0)
    records = BatchRecords(store, batch)
    records.begin()
    view = BatchView(records, BatchRules(max_concurrent=1))
    BatchSubmitter(view, source).start(blocking=True)
    assert cancelled.is_set()
    assert view.states == [InputState.FAILED, InputState.SKIPPED, InputState.SKIPPED]
    assert source.order == [0]


def dead(store, total, submitted):
    """Store a batch whose process was killed after `submitted` jobs; return source and records."""
    source = Scripted(store)
    batch_records = leave(store, new_batch(total, now=0.0))
    for index in range(submitted):
        source.submit(batch_records.batch.group_id, index)
    return source, batch_records


def test_a_batch_whose_process_was_killed(store):
    source, batch_records = dead(store, 4, 2)
    with registry.substitute_backend("local", lambda _, store: source):
        batch = handles._attach(store, batch_records.batch.group_id)
        results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
        assert results[:2] == [(0, 1), (1, 1)]
        assert ["ended first" in str(e) for e in results[2:]] == [True, True]
        assert set(batch.submission_failures) == {2, 3}
        assert batch.status_counts() == {"SUCCEEDED": 2}


def test_a_process_elsewhere_that_stamps_no_more_was_killed():
    store, now = MemoryStore(), [0.0]
    source, batch_records = dead(store, 2, 1)
    batch_records._stamp(Stamp(1, "1", "another machine", "there"))
    with registry.substitute_backend("local", lambda _, store: source):
        view = AttachedView(batch_records, clock=lambda: now[0])
    assert view.states == [InputState.LIVE, InputState.WAITING]
    for beat in range(1, 20):
        now[0] += records.SILENT_S / 2
        batch_records._stamp(Stamp(1, "1", "another machine", "there", beat))
        view.catch_up(now=True)
        assert view.states[1] is InputState.WAITING
    now[0] += records.SILENT_S
    view.catch_up(now=True)
    assert view.states[1] is InputState.WAITING
    now[0] += 1
    view.catch_up(now=True)
    assert view.states == [InputState.LIVE, InputState.REFUSED]
    assert "ended first" in str(view.errors[1])


def test_a_process_that_submits_the_rest_and_ends_during_a_look_left_nothing(store, monkeypatch):
    source, batch_records = dead(store, 2, 1)
    is_dead = records.SubmitterWatch.is_dead

    def end_first(watch, stamp):
        if 1 not in source.order:
            source.submit(batch_records.batch.group_id, 1)
            batch_records.note_end(BatchEnd())
        return is_dead(watch, stamp)

    monkeypatch.setattr(records.SubmitterWatch, "is_dead", end_first)
    with registry.substitute_backend("local", lambda _, store: source):
        view = AttachedView(batch_records)
    assert view.states == [InputState.LIVE, InputState.LIVE]


@pytest.mark.parametrize("make_store", [MemoryStore, None])
def test_the_process_that_submits_stamps_the_batch_on_every_store(store, make_store, monkeypatch):
    monkeypatch.setattr(records, "STAMP_EVERY_S", 0.01)
    batch = BatchRecords(make_store() if make_store else store, new_batch(1, now=0.0))
    batch.begin()
    beats = set()
    while len(beats) < 3:
        beats.add(batch.read_stamp().beat)
    assert not records.SubmitterWatch().is_dead(batch.read_stamp())
    batch.remove()
    assert records.SubmitterWatch().is_dead(batch.read_stamp())


def test_where_inputs_stand_follows_from_the_records():
    waiting, live, refused = InputState.WAITING, InputState.LIVE, InputState.REFUSED
    assert inputs_of(4, {0}, {1}, None) == [live, refused, waiting, waiting]
    assert inputs_of(4, {0}, {1}, None, is_abandoned=True) == [live, refused, refused, refused]
    end = BatchEnd("another input failed", frozenset({3}))
    assert inputs_of(4, {0}, {1}, end) == [live, refused, InputState.REMOVED, InputState.SKIPPED]


class Killed(BaseException):
    """An exception that ends a submission like SIGKILL: nothing is recorded after it."""


STEPS = {
    "before the batch": (BatchRecords, "begin", 1),
    "before the first job": (Scripted, "submit", 1),
    "before the second job": (Scripted, "submit", 2),
    "before a refusal is kept": (BatchRecords, "note_refused", 1),
    "before the end": (BatchRecords, "note_end", 1),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_submitter_that_is_killed_at_any_step_leaves_what_others_can_read(
    store, monkeypatch, step
):
    owner, name, fatal = STEPS[step]
    act, calls, is_dead = getattr(owner, name), itertools.count(1), []

    def die(*args, **more):
        if is_dead or next(calls) == fatal:
            is_dead.append(True)
            raise Killed
        return act(*args, **more)

    source = Scripted(store, ["ok", "refuse", "ok"])
    batch = BatchRecords(store, new_batch(3, now=0.0))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, die)
        for written in ("note_end", "note_refused"):
            real = getattr(BatchRecords, written)
            patched.setattr(
                BatchRecords,
                written,
                lambda *args, real=real: None if is_dead else real(*args),
            )
        with contextlib.suppress(Killed):
            batch.begin()
            BatchSubmitter(BatchView(batch, BatchRules()), source).start(blocking=True)
        assert is_dead
    batch._ended.set()
    if step == "before the batch":
        with pytest.raises(errors.NotFound):
            handles._attach(store, batch.batch.group_id)
        return
    batch._stamp(Stamp(1, "ended", machine.container_id(), "machine"))
    with registry.substitute_backend("local", lambda _, store: source):
        other = handles._attach(store, batch.batch.group_id)
        values = other.results(timeout=PATIENCE_S, return_exceptions=True)
        assert [value for value in values if isinstance(value, tuple)] == [
            (index, 1) for index in source.order
        ]
        assert all(isinstance(v, errors.SubmitError) for v in values if not isinstance(v, tuple))
        other.cleanup()
    assert list(store.list(layout.REFS)) == list(store.list(layout.GROUPS)) == []


def test_a_thousand_inputs_on_a_distant_store_take_few_calls():
    store = MemoryStore(delay_s=0.0005)
    source, batch_records = dead(store, 1000, 1000)
    batch_records.note_end(BatchEnd())
    with registry.substitute_backend("local", lambda _, store: source):
        store.forget_calls()
        batch = handles._attach(store, batch_records.batch.group_id)
        attaching = store.calls.total()
        batch.wait(timeout=PATIENCE_S)
        store.forget_calls()
        assert batch.results() == [(index, 1) for index in range(1000)]
        reading = store.calls
        store.forget_calls()
        batch.cleanup()
        removing = store.calls.total()
    assert attaching <= 1010, "the references that are not listed, and few others"
    assert reading == {"get": 1000}
    assert removing <= 5001


def test_jobs_whose_records_were_removed(store):
    source = Scripted(store)
    batch = begin(source, 3)
    batch.results(timeout=PATIENCE_S)
    removed = batch.jobs[1]
    removed.cleanup()
    store.put(layout.JobKeys(batch.jobs[2].job_id).ref, b"garbage")
    with attached(batch, source) as other:
        assert other.unavailable_children == {1: removed.job_id, 2: batch.jobs[2].job_id}
        assert [type(e) for e in other.results(timeout=PATIENCE_S, return_exceptions=True)] == [
            tuple,
            errors.NotFound,
            errors.NotFound,
        ]
        assert [job is None for job in other.jobs] == [False, True, True]


def test_records_removed_while_a_job_runs(store):
    source = Scripted(store, ["hang"])
    batch = begin(source, 1)
    until(batch, lambda: 0 in source.hanging)
    job = source.hanging[0]
    source.lose(0)
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert isinstance(results[0], errors.NotFound)
    assert batch.unavailable_children == {0: job.job_id}


def test_a_store_that_does_not_answer_is_not_taken_for_missing_records(home):
    class Silent(LocalStore):
        silent = False

        def get(self, key):
            if self.silent:
                raise errors.StoreError("the store does not answer")
            return super().get(key)

    store = Silent(home)
    source = Scripted(store, ["hang"])
    batch = begin(source, 1)
    until(batch, lambda: 0 in source.hanging)
    until(batch, lambda: not batch._view.is_submitting)
    Silent.silent = True
    with pytest.raises(errors.StoreError, match="does not answer"):
        batch._view.handles[0].status()
    assert batch.unavailable_children == {}
    Silent.silent = False
    source.release(0)
    assert batch.results(timeout=PATIENCE_S) == [(0, 1)]


def test_cleaning_up_takes_the_batch_away(store):
    source = Scripted(store, ["ok", "hang"])
    batch = begin(source, 9, BatchRules(max_concurrent=2))
    until(batch, lambda: 1 in source.hanging)
    batch.cleanup()
    assert list(store.list(layout.JOBS)) == []
    assert list(store.list(layout.REFS)) == []
    assert list(store.list(layout.GROUPS)) == []
    with pytest.raises(errors.NotFound, match="no batch"):
        handles._attach(store, batch.group_id)


def test_collecting_can_remove_what_succeeded(store):
    source = Scripted(store, ["ok", "raise"])
    batch = begin(source, 2)
    results = batch.results(timeout=PATIENCE_S, cleanup=True, return_exceptions=True)
    assert batch.results(return_exceptions=True)[0] == results[0] == (0, 1)
    assert len(list(store.list(layout.REFS))) == 1
    with attached(batch, source) as other:
        assert [index for index, _ in other.statuses()] == [1]


def test_a_handle_can_be_pickled(store):
    source = Scripted(store)
    batch = begin(source, 2)
    batch.wait(timeout=PATIENCE_S)
    with registry.substitute_backend("local", lambda _, store: source):
        assert pickle.loads(pickle.dumps(batch)).results(timeout=PATIENCE_S) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    "garbage",
    [b"", b"[]", b"{}", b'{"schema_version": 2, "group_id": "x"}'],
)
def test_a_damaged_record_is_told(store, garbage):
    store.put(layout.GroupKeys("grp-00000000").batch, garbage)
    with pytest.raises(errors.CorruptRecord):
        handles._attach(store, "grp-00000000")


def test_garbage_beside_the_records_is_passed_over(store):
    source, batch_records = dead(store, 2, 1)
    group = layout.GroupKeys(batch_records.batch.group_id).prefix
    for name in ("refused/x.json", "README"):
        store.put(f"{group}/{name}", b"garbage")
    store.put(f"{group}/end.json", b"garbage")
    with registry.substitute_backend("local", lambda _, store: source):
        results = handles._attach(store, batch_records.batch.group_id).results(
            timeout=PATIENCE_S, return_exceptions=True
        )
    assert results[0] == (0, 1)
    assert isinstance(results[1], errors.NotFound)


@pytest.mark.parametrize("group_id", ["", "job-12345678", "grp-../../x", 3, None])
def test_what_is_no_id_of_a_batch(group_id):
    with pytest.raises(errors.UsageError, match="not a batch id"):
        handles.attach_batch(group_id)


def test_ids_of_jobs_follow_from_the_batch(store):
    assert job_id_of("grp-1a2b3c4d", 0) == "job-1a2b3c4d0000"
    assert len({job_id_of("grp-1a2b3c4d", index) for index in range(70_000)}) == 70_000
    batch = new_batch(100, now=0.0)
    BatchRecords(store, batch).begin()
    assert BatchRecords.open(store, batch.group_id).batch == batch
    with pytest.raises(errors.SubmitError, match="already has the id"):
        BatchRecords(store, batch).begin()


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_concurrent": 0}, "max_concurrent must be 1 or more"),
        ({"max_concurrent": 1.5}, "max_concurrent must be a whole number"),
        ({"max_concurrent": "all"}, "or None for all at once; got 'all'"),
        ({"fail_fast": 1}, "fail_fast must be True or False"),
    ],
)
def test_options_that_cannot_work(options, words):
    arguments = {
        "max_concurrent": 64,
        "fail_fast": False,
        "cancel_running_on_fail": False,
    } | options
    with pytest.raises(errors.UsageError, match=words):
        launch.check_rules(**arguments)


def test_tags_are_a_dict_or_a_list_of_strings():
    assert (
        launch.check_tags(None),
        launch.check_tags({"a": "b"}),
        launch.check_tags(("a", "b")),
    ) == (
        {},
        {"a": "b"},
        ["a", "b"],
    )
    for wrong in ("abc", {"a": 1}, [1], 3):
        with pytest.raises(errors.UsageTypeError, match="tags must be"):
            launch.check_tags(wrong)


def test_too_many_inputs_are_refused(store):
    with pytest.raises(errors.UsageError, match="several"):
        launch.launch(Scripted(store), store, 6_000_000, BatchRules(), name="", notes={})
    assert list(store.list("groups")) == []


def test_launching_without_a_limit_submits_before_it_returns(store):
    source = Scripted(store, ["hang"] * 3)
    batch = launch.launch(source, store, 3, BatchRules(max_concurrent=None), name="", notes={})
    assert source.order == [0, 1, 2]
    assert json.loads(store.get(layout.GroupKeys(batch.group_id).end)) == {
        "stopped": "",
        "skipped": [],
    }
    batch.cancel()
    batch.wait(timeout=PATIENCE_S)


def test_as_many_at_a_time_as_there_is_room_for(store, capsys):
    source = Scripted(store, ["hang"] * 5)
    how = launch.check_rules(max_concurrent="auto", fail_fast=False, cancel_running_on_fail=False)
    batch = launch.launch(source, store, 5, how, name="train", notes={})
    until(batch, lambda: len(source.hanging) == 2)
    assert (
        "running 5 inputs, 2 at a time to fit the available resources; max_concurrent= changes this"
        in capsys.readouterr().err
    )
    assert repr(batch) == f"<BatchHandle {batch.group_id}: train, 5 inputs, 2 at a time>"
    for index in range(5):
        until(batch, lambda index=index: index in source.hanging)
        source.release(index)
    assert batch.results(timeout=PATIENCE_S) == [(index, 1) for index in range(5)]
    assert source.most_at_once == 2


@pytest.mark.parametrize("limit", [3, None])
def test_a_number_that_was_given_is_obeyed(store, limit, capsys):
    source = Scripted(store, ["hang"] * 4)
    how = launch.check_rules(max_concurrent=limit, fail_fast=False, cancel_running_on_fail=False)
    batch = launch.launch(source, store, 4, how, name="train", notes={})
    until(batch, lambda: len(source.hanging) == (limit or 4))
    assert "room" not in capsys.readouterr().err
    batch.cancel()


def test_what_failed_is_told_before_what_was_cancelled_because_of_it(store):
    script = ["hang"] * 7 + ["raise"]
    batch = begin(
        Scripted(store, script),
        9,
        BatchRules(max_concurrent=8, fail_fast=True, cancel_running_on_fail=True),
    )
    with pytest.raises(errors.BatchError) as caught:
        batch.results(timeout=PATIENCE_S)
    lines = str(caught.value).splitlines()
    assert re.match(r"  input 7 \(job-[0-9a-f]{12}\): ValueError", lines[1])
    assert type(caught.value.__cause__) is ValueError
    assert all(line.startswith("  ") for line in lines[1:-1])
    assert (
        lines[-1] == f"More: kinetic jobs logs {batch.jobs[7].job_id}, kinetic jobs list --group "
        f"{batch.group_id}"
    )


class Speechless(Exception):
    def __str__(self):
        raise OSError("no words")


def test_an_exception_without_words_does_not_hide_the_others(store):
    batch = begin(Scripted(store, [Speechless()]), 2)
    with pytest.raises(errors.BatchError, match=r"input 0: Speechless: <str\(\) failed: OSError>"):
        batch.results(timeout=PATIENCE_S)


def test_a_batch_of_another_version_is_called_so(store):
    store.put(layout.GroupKeys("grp-1").batch, b'{"schema_version": 1, "group_id": "grp-1"}')
    with pytest.raises(errors.UnsupportedVersion, match="by another version of kinetic"):
        handles._attach(store, "grp-1")
