"""Whoever asks where a job stands gets the same answer: Python, the CLI, a batch, the notebook.

In: stores without a verdict: the supervisor was killed before it could judge, and nobody has waited
since. Out: states.
"""

from __future__ import annotations

import pytest
from laptop_fakes import NOW, FakeBackend, put_ref, put_report, ref

from kinetic._backends.base import Phase
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Verdict, judge
from kinetic._store.local import LocalStore
from kinetic.cli.context import Desk


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def backend(store):
    return FakeBackend(store)


def desk(store, backend, now=NOW + 1):
    return Desk(
        store,
        lambda _: backend,
        lambda job: JobHandle(job, backend, store),
        lambda *_: None,
        lambda: now,
    )


def ask_python(store, backend, job):
    return str(JobHandle(job, backend, store).status())


def ask_cli(store, backend, job):
    return desk(store, backend).state(job)


def ask_notebook(store, backend, job):
    return JobHandle(job, backend, store).picture().state.upper()


EVERYBODY = [ask_python, ask_cli, ask_notebook]


def killed_after(store, backend, *reports):
    job = put_ref(store, ref(hosts=2))
    for report in reports:
        put_report(store, job, report)
    backend.phases[job.job_id] = Phase.FAILED
    return job


@pytest.mark.parametrize("ask", EVERYBODY)
def test_a_job_whose_hosts_all_returned_succeeded(store, backend, ask):
    returned = [HostReport(0, Exit.RETURNED, result_digest="d"), HostReport(1, Exit.RETURNED)]
    assert ask(store, backend, killed_after(store, backend, *returned)) == "SUCCEEDED"


@pytest.mark.parametrize("ask", EVERYBODY)
def test_a_job_of_which_a_host_raised_failed(store, backend, ask):
    assert (
        ask(
            store,
            backend,
            killed_after(store, backend, HostReport(0, Exit.RAISED), HostReport(1, Exit.STOPPED)),
        )
        == "FAILED"
    )


@pytest.mark.parametrize("ask", EVERYBODY)
def test_a_damaged_verdict_is_judged_again(store, backend, ask):
    job = killed_after(
        store,
        backend,
        HostReport(0, Exit.RETURNED, result_digest="d"),
        HostReport(1, Exit.RETURNED),
    )
    store.put(layout.outcome(job.job_id), b"{")
    assert ask(store, backend, job) == "SUCCEEDED"


def test_the_verdict_is_kept_so_that_the_next_to_ask_only_reads(store, backend):
    job = killed_after(
        store,
        backend,
        HostReport(0, Exit.RETURNED, result_digest="d"),
        HostReport(1, Exit.RETURNED),
    )
    ask_cli(store, backend, job)
    assert desk(store, backend).ending(job)[:2] == ("SUCCEEDED", NOW + 1)


@pytest.mark.parametrize("later_s", [3600.0, -3600.0])
def test_a_job_that_nobody_ever_started_is_not_found_also_when_the_clock_was_set_back(
    store, backend, later_s, monkeypatch
):
    job = put_ref(store, ref())
    monkeypatch.setattr("kinetic._client.handle.time.time", lambda: job.created_at + later_s)
    assert ask_python(store, backend, job) == "NOT_FOUND"
    assert desk(store, backend, job.created_at + later_s).state(job) == "NOT_FOUND"


def test_nobody_is_to_blame_for_a_cancel():
    outcome = judge(
        2,
        [
            HostReport(0, Exit.CANCELLED, detail="the job was cancelled"),
            HostReport(1, Exit.STOPPED),
        ],
        now=1.0,
    )
    assert (outcome.verdict, outcome.blamed, outcome.reason) == (
        Verdict.CANCELLED,
        (),
        "the job was cancelled",
    )
    assert repr(outcome) == "<Outcome cancelled, 2 hosts: the job was cancelled>"
    failed = judge(1, [HostReport(0, Exit.SIGNAL, detail="killed\nat once")], now=1.0, attempt=2)
    assert repr(failed) == "<Outcome failed, 1 host, attempt 2: host 0: killed>"
    assert (
        repr(judge(1, [HostReport(0, Exit.RETURNED, result_digest="x")], now=1.0))
        == "<Outcome succeeded, 1 host>"
    )
