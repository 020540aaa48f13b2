"""Batches as another process sees them, and their options."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import threading

import pytest
from batch_cases import PATIENCE_S, attached, begin, until
from batch_fakes import Scripted
from doubles.memory_store import MemoryStore

from kinetic import errors
from kinetic._backends import registry
from kinetic._client.batch import handle as handles
from kinetic._client.batch import launch
from kinetic._client.batch import manifest as manifests
from kinetic._client.batch.executor import BatchExecutor
from kinetic._client.batch.ledger import BatchRules, InputState, Ledger
from kinetic._client.batch.manifest import Manifest, new_batch
from kinetic._client.batch.poller import BatchUpdates
from kinetic._core import layout
from kinetic._store import lease
from kinetic._store.lease import Owner
from kinetic._store.local import LocalStore


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
    source = Scripted(store, [["ok"], ["hang"]])
    batch = begin(source, 3, BatchRules(max_concurrent=1), name="sweep", tags={"for": "paper"})
    next(batch.as_completed(timeout=PATIENCE_S))
    with attached(batch, source) as other:
        assert (other.name, other.tags, len(other)) == ("sweep", {"for": "paper"}, 3)
        until(other, lambda: 1 in source.hanging)
        source.release(1)
        assert other.results(timeout=PATIENCE_S) == [(i, 1) for i in range(3)]


def test_a_retry_by_another_process_is_waited_for(store):
    source = Scripted(store, [["raise", "hang"]])
    batch = begin(source, 1, BatchRules(retries=1))
    with attached(batch, source) as other:
        until(other, lambda: 0 in source.hanging)
        source.release(0)
        assert other.results(timeout=PATIENCE_S) == [(0, 2)]


def test_another_process_can_cancel(store):
    source = Scripted(store, [["hang"]])
    batch = begin(source, 5, BatchRules(max_concurrent=1))
    until(batch, lambda: 0 in source.hanging)
    with attached(batch, source) as other:
        other.cancel()
        found = other.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in found] == [errors.JobCancelled] + [errors.SubmitError] * 4
    assert "cancelled" in str(found[-1])
    batch.wait(timeout=PATIENCE_S)


def test_nothing_is_submitted_in_place_of_what_another_process_cancels(tmp_path):
    """The wish to stop comes in the moment after the batch has looked for one."""
    cancelled = threading.Event()

    class CancelledAfterALook(LocalStore):
        def has(self, key):
            found = super().has(key)
            if key == layout.GroupKeys(batch.group_id).stop and source.hanging:
                Manifest(store, batch).ask_to_stop()
                source.cancel(source.hanging[0])
                seen = executor.events
                while not executor.ledger.finished:
                    executor.look(PATIENCE_S, seen)
                    seen = executor.events
                cancelled.set()
            return found

    store = CancelledAfterALook(tmp_path)
    source = Scripted(store, [["hang"]])
    batch = new_batch(store, 3, known_ids=True, now=0.0)
    ledger = Ledger(3, BatchRules(max_concurrent=1))
    executor = BatchExecutor(ledger, Manifest.begin(store, batch), source)
    executor.start(here=True)
    assert cancelled.is_set()
    assert [task.state for task in ledger.tasks] == [
        InputState.FAILED,
        InputState.SKIPPED,
        InputState.SKIPPED,
    ]
    assert source.order == [0]


def dead(store, total, submitted, *, retries=0):
    """A batch whose process was killed: there is no end, and nobody holds the lock."""
    source = Scripted(store)
    batch = new_batch(store, total, known_ids=True, now=0.0, retries=retries)
    manifest = Manifest.begin(store, batch)
    for index in range(submitted):
        source.submit(batch.group_id, index, batch.jobs[index][0])
    return source, manifest


def test_a_batch_whose_process_was_killed(store):
    source, manifest = dead(store, 4, 2)
    with registry.substitute_backend("local", lambda _, store: source):
        batch = handles._attach(store, manifest.batch.group_id)
        found = batch.results(timeout=PATIENCE_S, return_exceptions=True)
        assert found[:2] == [(0, 1), (1, 1)]
        assert ["ended before" in str(e) for e in found[2:]] == [True, True]
        assert set(batch.submission_failures) == {2, 3}
        assert batch.status_counts() == {"SUCCEEDED": 2}


def test_without_locks_a_process_that_counts_no_more_was_killed():
    store, now = MemoryStore(), [0.0]
    _, manifest = dead(store, 2, 1)
    ledger = Ledger(2, BatchRules())
    updates = BatchUpdates(manifest, lambda ref: ref, clock=lambda: now[0])
    assert [index for index, _ in updates.enter(updates.read(ledger), ledger)] == [0]
    for number in range(1, 20):
        now[0] += manifests.SILENT_S / 2
        manifest.owner.renew(Owner("", "a", 1, "machine", number))
        assert not updates.read(ledger).over
    now[0] += manifests.SILENT_S
    assert not updates.read(ledger).over
    now[0] += 1
    update = updates.read(ledger)
    assert update.over
    assert list(updates.enter(update, ledger)) == []
    assert "has not answered for too long" in str(ledger.tasks[1].error)


def test_without_locks_the_process_that_submits_counts(monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    _, manifest = dead(MemoryStore(), 1, 0)
    assert manifest.batch.counts
    held = manifest.hold()
    assert manifest.owner.is_held()
    seen = set()
    while len(seen) < 3:
        seen.add(manifest.owner.read()[0].beat)
    held.release()
    assert not manifest.owner.is_held()


def test_jobs_whose_records_were_removed(store):
    source = Scripted(store)
    batch = begin(source, 3)
    batch.results(timeout=PATIENCE_S)
    gone = batch.jobs[1]
    gone.cleanup()
    store.put(layout.JobKeys(batch.jobs[2].job_id).ref, b"garbage")
    with attached(batch, source) as other:
        assert other.unavailable_children == {1: gone.job_id, 2: batch.jobs[2].job_id}
        assert [type(e) for e in other.results(timeout=PATIENCE_S, return_exceptions=True)] == [
            tuple,
            errors.NotFound,
            errors.NotFound,
        ]
        assert [job is None for job in other.jobs] == [False, True, True]


def test_records_removed_while_a_job_runs(store):
    source = Scripted(store, [["hang"]])
    batch = begin(source, 1)
    until(batch, lambda: 0 in source.hanging)
    job = source.hanging[0]
    source.lose(0)
    found = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert isinstance(found[0], errors.NotFound)
    assert batch.unavailable_children == {0: job.job_id}


def test_a_store_that_does_not_answer_is_not_taken_for_missing_records(home):
    class Silent(LocalStore):
        silent = False

        def get(self, key):
            if self.silent:
                raise errors.StoreError("the store does not answer")
            return super().get(key)

    store = Silent(home)
    batch = begin(Scripted(store, [["raise"]]), 1)
    batch.wait(timeout=PATIENCE_S)
    Silent.silent = True
    for look in (batch.statuses, batch.status_counts):
        with pytest.raises(errors.StoreError, match="does not answer"):
            look()


def test_cleaning_up_takes_the_batch_away(store):
    source = Scripted(store, [["ok"], ["hang"]])
    batch = begin(source, 9, BatchRules(max_concurrent=2))
    until(batch, lambda: 1 in source.hanging)
    batch.cleanup()
    assert list(store.list(layout.JOBS)) == []
    assert list(store.list(layout.REFS)) == []
    assert list(store.list(layout.GROUPS)) == []
    with pytest.raises(errors.NotFound, match="no batch"):
        handles._attach(store, batch.group_id)


def test_cleaning_up_takes_earlier_tries_away(store):
    batch = begin(Scripted(store, [["raise", "raise", "ok"]]), 1, BatchRules(retries=2))
    assert batch.results(timeout=PATIENCE_S) == [(0, 3)]
    assert len(list(store.list(layout.REFS))) == 3
    batch.cleanup()
    assert list(store.list(layout.JOBS)) == list(store.list(layout.REFS)) == []


def test_collecting_can_remove_what_succeeded(store):
    source = Scripted(store, [["ok"], ["raise"]])
    batch = begin(source, 2)
    found = batch.results(timeout=PATIENCE_S, cleanup=True, return_exceptions=True)
    assert batch.results(return_exceptions=True)[0] == found[0] == (0, 1)
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
    [b"", b"[]", b"{}", b'{"schema_version": 99}', b'{"schema_version": 1, "group_id": "x"}'],
)
def test_a_damaged_record_is_told(store, garbage):
    store.put(layout.GroupKeys("grp-00000000").batch, garbage)
    with pytest.raises(errors.CorruptRecord):
        handles._attach(store, "grp-00000000")


def test_garbage_beside_the_records_is_passed_over(store):
    source, manifest = dead(store, 2, 1)
    group = layout.GroupKeys(manifest.batch.group_id).prefix
    for name in ("refused/x.json", "jobs/1.json", "jobs/one-two.json", "README"):
        store.put(f"{group}/{name}", b"garbage")
    store.put(f"{group}/end.json", b"garbage")
    with registry.substitute_backend("local", lambda _, store: source):
        found = handles._attach(store, manifest.batch.group_id).results(
            timeout=PATIENCE_S, return_exceptions=True
        )
    assert found[0] == (0, 1)
    assert isinstance(found[1], errors.NotFound)


@pytest.mark.parametrize("group_id", ["", "job-12345678", "grp-../../x", 3, None])
def test_what_is_no_id_of_a_batch(group_id):
    with pytest.raises(errors.UsageError, match="not a batch id"):
        handles.attach_batch(group_id)


def test_ids_are_not_those_of_other_jobs(store):
    batch = new_batch(store, 100, known_ids=True, now=0.0, retries=2)
    ids = list(itertools.chain(*batch.jobs))
    assert len(set(ids)) == 300
    assert Manifest.begin(store, batch).batch == Manifest.open(store, batch.group_id).batch


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_concurrent": 0}, "max_concurrent must be 1 or more"),
        ({"max_concurrent": 1.5}, "max_concurrent must be a whole number"),
        ({"max_concurrent": "all"}, "or None for all at once; it is 'all'"),
        ({"retries": -1}, "retries must be 0 or more"),
        ({"fail_fast": 1}, "fail_fast must be True or False"),
    ],
)
def test_options_that_cannot_work(options, words):
    given = {
        "max_concurrent": 64,
        "retries": 0,
        "fail_fast": False,
        "cancel_running_on_fail": False,
    } | options
    with pytest.raises(errors.UsageError, match=words):
        launch.rules(**given)


def test_tags_are_a_dict_or_a_list_of_strings():
    assert (launch.tags(None), launch.tags({"a": "b"}), launch.tags(("a", "b"))) == (
        {},
        {"a": "b"},
        ["a", "b"],
    )
    for wrong in ("abc", {"a": 1}, [1], 3):
        with pytest.raises(errors.UsageTypeError, match="tags must be"):
            launch.tags(wrong)


def test_more_ids_than_can_be_written_down_are_refused(store):
    with pytest.raises(errors.UsageError, match="several"):
        launch.launch(Scripted(store), store, 3_000_000, BatchRules(retries=1), name="", notes={})
    assert list(store.list("groups")) == []


def test_launching_without_a_limit_submits_before_it_returns(store):
    source = Scripted(store, [["hang"]] * 3)
    batch = launch.launch(source, store, 3, BatchRules(max_concurrent=None), name="", notes={})
    assert source.order == [0, 1, 2]
    assert json.loads(store.get(layout.GroupKeys(batch.group_id).end)) == {
        "stopped": "",
        "skipped": [],
    }
    batch.cancel()
    batch.wait(timeout=PATIENCE_S)


def test_as_many_at_a_time_as_there_is_room_for(store, capsys):
    source = Scripted(store, [["hang"]] * 5)
    how = launch.rules(
        max_concurrent="auto", retries=0, fail_fast=False, cancel_running_on_fail=False
    )
    batch = launch.launch(source, store, 5, how, name="train", notes={})
    until(batch, lambda: len(source.hanging) == 2)
    assert (
        "5 inputs, 2 at a time: what there is room for here; max_concurrent= changes it"
        in capsys.readouterr().err
    )
    assert repr(batch) == f"<BatchHandle {batch.group_id}: train, 5 inputs, 2 at a time>"
    for index in range(5):
        until(batch, lambda index=index: index in source.hanging)
        source.release(index)
    assert batch.results(timeout=PATIENCE_S) == [(index, 1) for index in range(5)]
    assert source.most_at_once == 2


@pytest.mark.parametrize("given", [3, None])
def test_a_number_that_was_given_is_obeyed(store, given, capsys):
    source = Scripted(store, [["hang"]] * 4)
    how = launch.rules(
        max_concurrent=given, retries=0, fail_fast=False, cancel_running_on_fail=False
    )
    batch = launch.launch(source, store, 4, how, name="train", notes={})
    until(batch, lambda: len(source.hanging) == (given or 4))
    assert "room" not in capsys.readouterr().err
    batch.cancel()


def test_what_failed_is_told_before_what_was_cancelled_because_of_it(store):
    script = [["hang"]] * 7 + [["raise"]]
    batch = begin(
        Scripted(store, script),
        9,
        BatchRules(max_concurrent=8, fail_fast=True, cancel_running_on_fail=True),
    )
    with pytest.raises(errors.BatchError) as caught:
        batch.results(timeout=PATIENCE_S)
    told = str(caught.value).splitlines()
    assert re.match(r"  input 7 \(job-[0-9a-f]{8}\): ValueError", told[1])
    assert type(caught.value.__cause__) is ValueError
    assert all(line.startswith("  ") for line in told[1:-1])
    assert (
        told[-1] == f"More: kinetic jobs logs {batch.jobs[7].job_id}, kinetic jobs list --group "
        f"{batch.group_id}"
    )


class Speechless(Exception):
    def __str__(self):
        raise OSError("no words")


def test_an_exception_without_words_does_not_hide_the_others(store):
    batch = begin(Scripted(store, [[Speechless()]]), 2)
    with pytest.raises(
        errors.BatchError, match="input 0: Speechless: <its text could not be made: OSError>"
    ):
        batch.results(timeout=PATIENCE_S)
