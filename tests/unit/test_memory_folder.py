"""The folders of jobs in this machine's memory; those of succeeded jobs are freed after an hour."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

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
            store.put(layout.JobKeys(job_id).outcome, json.dumps(outcome.to_json()).encode())
    memory_folder.make("job-of-another-store", "host-0")
    supervisor.free_memory_of_ended(store, NOW)
    remaining = ["job-00000002", "job-00000003", "job-00000004", "job-of-another-store"]
    assert memory_folder.jobs() == remaining


def test_a_host_that_starts_while_the_last_job_leaves_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    ended = threading.Event()

    def leave() -> None:
        while not ended.is_set():
            memory_folder.remove_unused("job-00000001")

    leaving = threading.Thread(target=leave)
    leaving.start()
    folders = [memory_folder.make("job-00000001", "host-0") for _ in range(3000)]
    ended.set()
    leaving.join()
    assert None not in folders
