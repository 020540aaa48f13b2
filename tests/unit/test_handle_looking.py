"""Reading the state of jobs, ending jobs and finding jobs by their handles."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import handle_cases
import pytest
from handle_cases import ends_with
from laptop_fakes import (
    HOSTS,
    NOW,
    chunk,
    is_gone,
    put_outcome,
    put_ref,
    put_success,
    ref,
)

import kinetic
from kinetic import errors
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._core.place import Place
from kinetic.job_status import JobStatus
from kinetic.jobs import attach, list_jobs

store, backend = handle_cases.store, handle_cases.backend
job, handle = handle_cases.job, handle_cases.handle


# -- reading ---------------------------------------------------------------------------------------


def test_status_comes_from_the_verdict_first(store, backend, job, handle):
    assert handle.status() is JobStatus.RUNNING
    assert handle.outcome() is None
    put_outcome(store, job, HostReport(1, Exit.CANCELLED))
    backend.phases[job.job_id] = JobStatus.NOT_FOUND
    assert handle.status() is JobStatus.CANCELLED
    assert handle.outcome().blamed == (), "nobody is to blame for a cancel"


def test_a_job_in_the_hands_of_its_submitter_is_pending(store, backend):
    import time

    job = put_ref(store, ref("job-0000abcd", created_at=time.time()))
    assert JobHandle(job).status() is JobStatus.PENDING
    old = put_ref(store, ref("job-0000abce", created_at=time.time() - 3600))
    assert JobHandle(old).status() is JobStatus.FAILED
    store.delete(layout.JobKeys(job.job_id).ref)
    assert JobHandle(job).status() is JobStatus.NOT_FOUND


def test_logs_as_text(backend, handle, capsys):
    backend.output = [chunk(b"a\nb\n"), None, chunk(b"other\n", host=3)]
    assert handle.logs() == "a\nb\n"
    assert handle.logs(host=3) == "other\n"
    assert handle.logs(all_hosts=True) == "[host 0] a\n[host 0] b\n[host 3] other\n"
    handle.tail(7)
    assert (backend.requests[-1].tail, backend.requests[-1].follow) == (7, False)
    assert capsys.readouterr() == ("", "")


def test_logs_streamed(store, backend, job, handle, capsys):
    backend.output = [chunk(b"a\n"), chunk(b"b\n", host=1)]
    ends_with(backend, store, job, 1)
    assert handle.logs(follow=True, all_hosts=True) is None
    assert capsys.readouterr().out == "[host 0] a\n[host 1] b\n"


@pytest.mark.parametrize("host", [-1, HOSTS, "1", True])
def test_a_host_that_is_not_there(handle, host):
    with pytest.raises(errors.UsageError, match=r"There is no host .*: job-.* has hosts 0 to 3"):
        handle.logs(host=host)


def test_events_pass_over_damage(store, job, handle):
    assert handle.events() == []
    store.put(
        layout.JobKeys(job.job_id).events, b'{"kind": "joined"}\n{"kin\n[]\n{"kind": "ready"}\n'
    )
    assert [e["kind"] for e in handle.events()] == ["joined", "ready"]


def test_stacks_are_those_that_were_kept(store, job, handle):
    with pytest.raises(errors.NotFound, match="not running"):
        handle.stacks()
    put_outcome(store, job, HostReport(1, Exit.HANG, stacks="Thread 1"))
    assert handle.stacks()[1] == "Thread 1"
    assert handle.stacks()[0] == "The function has returned."


def test_stacks_of_a_running_job_are_asked_for(backend, handle):
    backend.control = lambda ref: Endpoint("unix:/nonexistent/kinetic.sock", "token", ref.job_id)
    with pytest.raises(errors.CoordinatorLost):
        handle.stacks(timeout_s=0.01)


# -- ending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"cleanup_timeout": 60, "cleanup_poll_interval": 1}])
def test_cancel_waits_for_the_end_and_keeps_everything(limits, store, backend, job, handle):
    backend.finish = lambda: put_outcome(store, job, HostReport(0, Exit.CANCELLED))
    handle.cancel(**limits)
    assert backend.calls == ["cancel"]
    assert handle.outcome() is not None
    assert not is_gone(store, job)


def test_cancel_can_do_without_waiting(backend, handle):
    handle.cancel(cleanup_timeout=0)
    assert backend.calls == ["cancel"]
    assert handle.status() == JobStatus.RUNNING


def test_a_job_that_does_not_stop_in_time_is_left_to_stop(backend, handle, caplog):
    handle.cancel(cleanup_timeout=0.01)
    assert "has not stopped within 0.01 s" in caplog.text


def test_when_it_was_submitted_is_a_date(handle, store):
    dated = JobHandle(ref(created_at=1_700_000_000.9), store=store)
    assert dated.created_at == "2023-11-14T22:13:20Z"
    assert dated.ref.created_at == 1_700_000_000.9


def test_cleaning_up_a_running_job_stops_it_first(store, backend, job, handle):
    backend.finish = lambda: put_outcome(store, job, HostReport(0, Exit.CANCELLED))
    handle.cleanup()
    assert backend.calls == ["cancel", "cleanup"]
    assert is_gone(store, job)
    handle.cleanup()


def test_records_of_a_running_job_are_not_taken_away(store, backend, job, handle):
    with pytest.raises(errors.UsageError, match="Cancel it first"):
        handle.cleanup(k8s=False)
    assert not is_gone(store, job)


def test_only_the_backends_part(store, backend, job, handle):
    put_success(store, job, 1)
    handle.cleanup(gcs=False)
    assert backend.calls == ["cleanup"]
    assert handle.result() == 1


def test_a_handle_whose_records_are_gone(store, backend, job, handle):
    put_success(store, job, 1)
    handle.cleanup()
    backend.phases.clear()
    with pytest.raises(errors.NotFound, match="removed"):
        handle.result()


# -- finding ---------------------------------------------------------------------------------------


def test_fields_and_round_trips(job, handle):
    assert (handle.job_id, handle.accelerator, handle.backend, handle.hosts) == (
        job.job_id,
        "tpu-v6e-16",
        "local",
        4,
    )
    data = json.loads(json.dumps(handle.to_dict()))
    assert JobHandle.from_dict(data | {"unknown": 1}) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert copy.copy(handle) == handle
    assert "group_id" not in data
    assert "job-00000001" in repr(handle)
    with pytest.raises(AttributeError, match="no attribute 'jobid'"):
        handle.jobid  # noqa: B018


def test_attach_by_prefix(store, backend, job):
    put_ref(store, ref("job-12345678"))
    put_ref(store, ref("job-12345999"))
    assert attach("job-0").job_id == "job-00000001"
    assert attach(" 123456 ").job_id == "job-12345678"
    with pytest.raises(errors.UsageError, match=r"2 job ids begin .* job-12345678, job-12345999"):
        attach("job-1234")
    with pytest.raises(errors.NotFound, match="Did you mean") as caught:
        attach("job-12345688")
    assert "job-12345678" in caught.value.suggestions


@pytest.mark.parametrize("text", ["", "../../etc", "a b", 7, None])
def test_attach_refuses_what_is_no_id(backend, text):
    with pytest.raises(errors.UsageError):
        attach(text)


def test_attach_in_an_empty_store(backend):
    with pytest.raises(LookupError, match="no job 'job-1'"):
        kinetic.attach("job-1")


def test_all_jobs_newest_first_and_damage_does_not_hide_them(store, backend, caplog):
    for n in range(3):
        put_ref(store, ref(f"job-0000000{n}", created_at=NOW + n))
    put_ref(store, dataclasses.replace(ref("job-0000cafe"), place=Place("gke"), created_at=NOW - 1))
    for name, garbage in (
        ("bad1", b"{"),
        ("bad2", b"[]"),
        ("bad3", b'{"job_id": "x"}'),
        ("bad4", b"\xff"),
    ):
        store.put(layout.JobKeys(f"job-{name}").ref, garbage)
    store.put(
        layout.JobKeys("job-bad5").ref,
        json.dumps(ref("job-bad5").to_json() | {"created_at": "yesterday"}).encode(),
    )
    assert [h.job_id for h in list_jobs()] == [
        "job-00000002",
        "job-00000001",
        "job-00000000",
        "job-0000cafe",
    ]
    assert len(caplog.records) == 5
    with pytest.raises(errors.CorruptRecord, match="job-bad1"):
        attach("job-bad1")


def test_no_jobs(home):
    assert list_jobs() == []
    assert not home.exists(), "looking creates nothing"
