"""A cancellation counts only once the cluster has accepted it."""

from __future__ import annotations

import pytest
from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._store import cancellation
from kinetic.errors import BackendUnavailable, PreflightError, StoreFull

JOB = "job-00c0ffee"
KEY = layout.JobKeys(JOB).cancellation


def is_agreed(store, pause=lambda _: None):
    clock = iter(range(1000)).__next__
    return cancellation.is_agreed(store, JOB, clock=clock, pause=pause)


def test_the_record_is_there_before_the_cluster_is_asked_and_believed_after():
    store = MemoryStore()
    records = []
    cancellation.request(store, JOB, lambda: records.extend([store.has(KEY), is_agreed(store)]))
    assert records == [True, False]
    assert is_agreed(store)


@pytest.mark.parametrize("error", [PreflightError, BackendUnavailable, KeyboardInterrupt])
def test_a_cancellation_that_was_not_carried_out_is_taken_back(error):
    store = MemoryStore()

    def refuse():
        raise error("no")

    with pytest.raises(error):
        cancellation.request(store, JOB, refuse)
    assert not store.has(KEY)


def test_a_refused_request_takes_back_no_other_one_that_was_agreed():
    store = MemoryStore()

    def refuse():
        cancellation.request(store, JOB, lambda: None)  # Another process cancels, too.
        raise PreflightError("no")

    with pytest.raises(PreflightError):
        cancellation.request(store, JOB, refuse)
    assert is_agreed(store)


def test_a_request_whose_caller_was_killed_is_not_believed():
    store, pauses = MemoryStore(), []
    store.put(KEY, b'{"agreed": false}')
    assert not is_agreed(store, pauses.append)
    assert sum(pauses) > 0


def test_a_pod_that_is_stopped_at_once_waits_for_the_answer():
    store = MemoryStore()
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        store.put(KEY, b'{"agreed": true}')

    store.put(KEY, b'{"agreed": false}')
    assert is_agreed(store, pause)
    assert len(pauses) == 1


def test_an_ended_job_is_not_cancelled():
    store = MemoryStore()
    store.put(layout.JobKeys(JOB).outcome, b"{}")
    cancellation.request(store, JOB, lambda: pytest.fail("it was stopped"))
    assert not store.has(KEY)


class FullStore(MemoryStore):
    def put(self, key, data, *, if_absent=False):
        raise StoreFull("the disk is full")


def test_a_job_is_stopped_whose_store_takes_no_request(caplog):
    """A full store, perhaps filled by this job, must not prevent its cancellation."""
    stopped = []
    cancellation.request(FullStore(), JOB, lambda: stopped.append(JOB))
    assert stopped
    assert "instead of cancelled. The error: the disk is full" in caplog.text
