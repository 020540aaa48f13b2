"""Requests for a gang's activity, sent to the leader through the store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import ref

from kinetic._client.asking import ActivityPoll
from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic.errors import StoreError


class Leader:
    """A leader that answers the newest request, unless it has already answered it."""

    def __init__(self, store: MemoryStore, job: JobRef) -> None:
        self.store, self.place = store, (job.job_id, 1)
        self.answered = ""

    def answer(self, doing: str) -> bool:
        key = layout.AttemptKeys(*self.place).activity_wanted
        request_id = json.loads(self.store.get(key))["id"] if self.store.has(key) else ""
        if request_id in ("", self.answered):
            return False
        answer: dict[str, Any] = {"id": request_id, "activity": {"members": [doing]}}
        self.store.put(layout.AttemptKeys(*self.place).activity, json.dumps(answer).encode())
        self.answered = request_id
        return True


@pytest.fixture
def job() -> JobRef:
    reference: JobRef = ref()
    return reference


def test_a_poll_asks_the_leader_again_after_each_answer(job: JobRef) -> None:
    store = MemoryStore()
    leader, poll = Leader(store, job), ActivityPoll(store, job)
    assert poll.read_answer() is None
    assert leader.answer("waiting")
    assert poll.read_answer() == {"members": ["waiting"]}
    assert poll.read_answer() == {"members": ["waiting"]}
    assert leader.answer("running")
    assert not leader.answer("running"), "it is asked once at a time"
    assert poll.read_answer() == {"members": ["running"]}


def test_what_was_answered_to_somebody_long_ago_is_not_shown(job: JobRef) -> None:
    store = MemoryStore()
    leader = Leader(store, job)
    ActivityPoll(store, job).read_answer()
    leader.answer("old")
    poll = ActivityPoll(store, job)
    assert poll.read_answer() is None
    leader.answer("new")
    assert poll.read_answer() == {"members": ["new"]}


def test_two_who_ask_at_once_both_hear(job: JobRef) -> None:
    store = MemoryStore()
    leader, one, two = Leader(store, job), ActivityPoll(store, job), ActivityPoll(store, job)
    for poll in (one, two):
        assert poll.read_answer() is None
    leader.answer("running")
    for poll in (one, two):
        assert poll.read_answer() == {"members": ["running"]}


def test_a_question_that_could_not_be_put_is_put_again(
    job: JobRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    poll = ActivityPoll(store, job)
    with monkeypatch.context() as broken:
        broken.setattr(store, "put", _fail)
        with pytest.raises(StoreError):
            poll.read_answer()
    assert poll.read_answer() is None
    assert Leader(store, job).answer("running")


def test_of_a_call_the_leader_of_its_session_is_asked(job: JobRef) -> None:
    """It answers with the number of the call's attempt."""
    store = MemoryStore()
    call = replace(job, place=replace(job.place, session="job-0000005e"))
    store.put(layout.AttemptKeys(job.job_id, 1).outcome, b"{}")
    leader, poll = Leader(store, job), ActivityPoll(store, call)
    leader.place = "job-0000005e", 2
    assert poll.read_answer() is None
    assert leader.answer("running")
    assert poll.read_answer() == {"members": ["running"]}


def _fail(*_: object, **__: object) -> bool:
    raise StoreError("It does not answer.")
