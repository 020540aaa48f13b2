"""Python, the CLI, a batch and the notebook report the same state of a job. Its store has no
verdict: the supervisor was killed before it wrote one, and no caller has waited for the job
since."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from laptop_fakes import NOW, FakeBackend, put_outcome, put_ref, put_report, ref

from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Verdict, judge
from kinetic._core.state import JobStatus
from kinetic._store.local import LocalStore
from kinetic.cli.context import AppContext
from kinetic.cli.root import call


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def backend(store):
    return FakeBackend(store)


def app(store, backend, now=NOW + 1):
    return AppContext(
        store,
        lambda _: backend,
        lambda job: JobHandle(job, backend, store),
        lambda: now,
    )


def ask_python(store, backend, job):
    return str(JobHandle(job, backend, store).status())


def ask_cli(store, backend, job):
    return app(store, backend).board.read_standing(job).state


def ask_wait(store, backend, job):
    statuses = []
    with contextlib.suppress(Exception):
        JobHandle(job, backend, store).result(on_status_change=statuses.append, cleanup=False)
    return str(statuses[-1])


def ask_notebook(store, backend, job):
    return JobHandle(job, backend, store).picture().state.upper()


EVERYBODY = [ask_python, ask_cli, ask_notebook, ask_wait]


def killed_after(store, backend, *reports):
    job = put_ref(store, ref(hosts=2))
    for report in reports:
        put_report(store, job, report)
    backend.phases[job.job_id] = JobStatus.FAILED
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
    store.put(layout.JobKeys(job.job_id).outcome, b"{")
    assert ask(store, backend, job) == "SUCCEEDED"


@pytest.mark.parametrize("phase", [JobStatus.FAILED, JobStatus.RUNNING])
@pytest.mark.parametrize("ask", EVERYBODY)
def test_a_job_that_was_cancelled_is_no_failure(store, backend, ask, phase):
    job = put_ref(store, ref(hosts=2))
    backend.phases[job.job_id] = phase
    put_outcome(store, job, HostReport(0, Exit.CANCELLED), HostReport(1, Exit.CANCELLED))
    assert ask(store, backend, job) == "CANCELLED"


@pytest.mark.parametrize("ask", EVERYBODY)
def test_a_job_that_was_cancelled_and_never_judged(store, backend, ask):
    reports = [HostReport(0, Exit.CANCELLED), HostReport(1, Exit.STOPPED)]
    assert ask(store, backend, killed_after(store, backend, *reports)) == "CANCELLED"


def test_asking_how_an_interrupted_submission_ended_changes_nothing(store, backend, capsys):
    job = put_ref(store, ref())
    now = job.created_at + 3600.0
    assert app(store, backend, now).board.read_standing(job).state == "FAILED"
    assert not store.has(layout.JobKeys(job.job_id).outcome), "its submission may yet go on"
    assert "never started" in app(store, backend, now).board.outcome(job).reason
    assert app(store, backend, now).board.read_standing(job).state == "FAILED"
    assert call(["jobs", "status", "--json", job.job_id], app(store, backend, now)) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "FAILED"


def test_why_a_job_is_not_known_to_its_backend_yet_is_said(store, backend):
    job = put_ref(store, ref())
    soon = app(store, backend, job.created_at + 1.0).board.read_standing(job)
    assert (soon.state, soon.reason) == ("PENDING", "it is being submitted")


def test_the_verdict_is_kept_so_that_the_next_to_ask_only_reads(store, backend):
    job = killed_after(
        store,
        backend,
        HostReport(0, Exit.RETURNED, result_digest="d"),
        HostReport(1, Exit.RETURNED),
    )
    ask_cli(store, backend, job)
    standing = app(store, backend).board.read_standing(job)
    assert (standing.state, standing.ended_at) == ("SUCCEEDED", NOW + 1)


@pytest.mark.parametrize("later_s", [3600.0, -3600.0])
def test_a_job_that_nobody_ever_started_has_failed_also_when_the_clock_was_set_back(
    store, backend, later_s, monkeypatch
):
    job = put_ref(store, ref())
    monkeypatch.setattr("kinetic._client.handle.time.time", lambda: job.created_at + later_s)
    assert ask_python(store, backend, job) == "FAILED"
    assert app(store, backend, job.created_at + later_s).board.read_standing(job).state == "FAILED"


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


@pytest.mark.parametrize("has_report", [True, False])
def test_a_job_whose_leader_was_killed_ended_when_its_hosts_were_last_heard_from(
    store, backend, has_report
):
    job = killed_after(store, backend, *[HostReport(0, Exit.STOPPED)] * has_report)
    if has_report:
        os.utime(store.path(layout.HostKeys(job.job_id, 1, 0).report), times=(NOW + 5, NOW + 5))
    ended_at = app(store, backend, NOW + 74).board.read_standing(job).ended_at
    assert ended_at == (NOW + 5 if has_report else job.created_at)
