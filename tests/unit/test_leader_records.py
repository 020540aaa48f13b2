"""The records that a leader writes at the end of an attempt; no later leader overwrites them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from doubles.memory_store import MemoryStore
from laptop_fakes import plan

from kinetic._core import events, layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.gang.formation import make_policy
from kinetic._core.gang.picture import picture_of
from kinetic._core.outcome import Outcome, Verdict
from kinetic._host import leader, pod, verdicts
from kinetic._host.hosts import ForkedHosts, JoinedHosts


def test_the_first_outcome_of_an_attempt_stands():
    store = MemoryStore("leader-records")
    for reason in ("host 0 was lost", "a leader that was cut off comes back"):
        verdicts.repeat(store, "job-00000001", Outcome(Verdict.FAILED, (), reason, attempt=1))
    written = json.loads(store.get(layout.AttemptKeys("job-00000001", 1).outcome))
    assert written["reason"] == "host 0 was lost"


def test_an_attempt_whose_leader_was_lost_is_recorded_as_ended():
    store, job = MemoryStore("leader-records-2"), "job-00000001"
    verdicts.write_event(store, job, 1, GangEvent(EventKind.JOINED, 0))
    assert pod.take_up(plan(job, "cpu", {"retries": 1}), store).attempt == 2
    story = events.parse(store.get(layout.JobKeys(job).events))
    first, second = picture_of(story, 1).attempts
    assert (first.verdict, first.reason) == (
        Verdict.FAILED,
        "host 0 of 1, which led the job, was lost",
    )
    assert first.ended_at is not None
    assert second.verdict is None


@pytest.mark.parametrize(
    ("accelerator", "kind", "first_sign_s"),
    [
        ("cpu", ForkedHosts, leader.FIRST_SIGN_S),
        ("tpu-v6e-8", ForkedHosts, leader.FIRST_SIGN_S),
        ("tpu-v6e-8", JoinedHosts, None),
    ],
)
def test_only_hosts_that_are_there_must_be_heard_from(accelerator, kind, first_sign_s):
    """Forked hosts must give a first sign in time; hosts that are separate programs may be late."""
    planned = plan("job-00000001", accelerator, {})
    agents = SimpleNamespace(pids={100: 0})
    more = {"hosts": planned.hosts} if kind is JoinedHosts else {}
    hosts = kind(agents, stay=False, alone=planned.hosts == 1, **more)
    store = MemoryStore("leader-records-3")
    led = leader.Leader(planned, store, hosts, make_policy(planned), has_records=lambda: True)
    assert led._gang.spec.first_sign_s == first_sign_s
