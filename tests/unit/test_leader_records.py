"""What a leader writes at the end of an attempt: once, whoever comes back later."""

from __future__ import annotations

import json

from kinetic._core import layout
from kinetic._core.outcome import Outcome, Verdict
from kinetic._host import leader
from kinetic._store.memory import MemoryStore


def test_the_first_outcome_of_an_attempt_stands():
    store = MemoryStore("leader-records")
    for reason in ("host 0 was lost", "a leader that was cut off comes back"):
        leader.repeat(store, "job-00000001", Outcome(Verdict.FAILED, (), reason, attempt=1))
    written = json.loads(store.get(layout.attempt_outcome("job-00000001", 1)))
    assert written["reason"] == "host 0 was lost"
