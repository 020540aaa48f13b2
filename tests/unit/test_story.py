"""kinetic's messages about attempts. The time that a failure costs begins with the failure, before
the last hosts have ended."""

from __future__ import annotations

import json
import time

import pytest
from doubles.memory_store import MemoryStore

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.gang.policy import AttemptPolicy, Loss
from kinetic._core.options import Elastic
from kinetic._host.story import Story


@pytest.mark.parametrize("has_event", [True, False])
def test_the_time_in_which_survivors_end_is_lost_time(monkeypatch, has_event):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = MemoryStore()
    policy = AttemptPolicy(Elastic(1, 2, 3, 60.0))
    story = Story(store, "job-1", policy, 1)
    story.tell_of_form()
    if has_event:
        story.write(GangEvent(EventKind.FAILURE, 1))
    now += 5.0  # The last host ends 5 s after the failure.
    policy.note_failure(Loss((1,), "killed"), 0.0)
    story.tell_news()
    story.tell_of_form()
    now += 1.0
    story.tell_of_recovery()
    story.close()
    lines = store.get(layout.JobKeys("job-1").events).splitlines()
    *_, recovered = map(json.loads, lines)
    assert recovered["kind"] == "recovered"
    assert recovered["detail"] == ("after 6.0 s" if has_event else "after 1.0 s")
