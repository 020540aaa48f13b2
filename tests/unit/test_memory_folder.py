"""The folders of jobs in this machine's memory: which of them are freed by themselves.

In: jobs that have ended, or not. Out: what is left.
"""

from __future__ import annotations

import json
from pathlib import Path

from kinetic._core import layout
from kinetic._core.outcome import Outcome, Verdict
from kinetic._host.local import supervisor
from kinetic._store.local import LocalStore
from kinetic._system import memory_folder

NOW = 1e9


def test_what_succeeded_jobs_have_left_is_freed_after_a_while(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    assert memory_folder.jobs() == []
    store = LocalStore(tmp_path / "store")
    jobs = {
        "job-00000001": Outcome(Verdict.SUCCEEDED, ended_at=NOW - 3601),
        "job-00000002": Outcome(Verdict.SUCCEEDED, ended_at=NOW - 3599),
        "job-00000003": Outcome(Verdict.FAILED, reason="it raised", ended_at=NOW - 9999),
        "job-00000004": None,
    }
    for job_id, outcome in jobs.items():
        memory_folder.make(job_id, "host-0").joinpath("mark").touch()
        if outcome is not None:
            store.put(layout.outcome(job_id), json.dumps(outcome.to_json()).encode())
    memory_folder.make("job-of-another-store", "host-0")
    supervisor.free_memory_of_ended(store, NOW)
    left = ["job-00000002", "job-00000003", "job-00000004", "job-of-another-store"]
    assert memory_folder.jobs() == left
