"""Results of a job through its handle: values, timeouts, interrupts, damaged records."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import handle_cases
import pytest
from handle_cases import ends_with
from laptop_fakes import (
    chunk,
    is_gone,
    put_outcome,
    put_success,
    raised,
)

import kinetic
from kinetic import errors
from kinetic._client import result as collecting
from kinetic._client.board import console
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport
from kinetic._pickling import results
from kinetic.job_status import JobStatus
from kinetic.jobs import attach

OURS = f"{Path(kinetic.__file__).parent}/"

store, backend = handle_cases.store, handle_cases.backend
job, handle = handle_cases.job, handle_cases.handle


# -- values ----------------------------------------------------------------------------------------


def test_the_value_can_be_fetched_again_and_from_elsewhere(store, backend, job, handle):
    put_success(store, job, {"loss": 0.5})
    assert handle.result() == {"loss": 0.5}
    assert handle.result() == {"loss": 0.5}
    assert attach(job.job_id).result() == {"loss": 0.5}
    assert handle.status() is JobStatus.SUCCEEDED
    assert backend.calls == ["cleanup"] * 3


def test_cleanup_choices(store, backend, job, handle):
    put_success(store, job, 1)
    handle.result(cleanup=False)
    assert backend.calls == []
    assert handle.result(cleanup=True) == 1
    assert is_gone(store, job)
    assert handle.result() == 1, "the handle keeps what it removed from the store"
    with pytest.raises(errors.NotFound):
        attach(job.job_id)


def test_records_of_a_failed_job_are_never_removed_by_fetching(store, job, handle):
    put_outcome(store, job, raised(store, job, 0, ValueError("no")))
    for cleanup in (True, None, False):
        with pytest.raises(ValueError, match="no"):
            handle.result(cleanup=cleanup)
    assert not is_gone(store, job)


def test_a_cleanup_that_fails_does_not_cost_the_value(store, backend, job, handle, caplog):
    put_success(store, job, 1)
    backend.cleanup = lambda ref: (_ for _ in ()).throw(
        errors.StoreError("The store does not answer.")
    )
    assert handle.result() == 1
    assert "The store does not answer." in caplog.text


def test_logs_are_streamed_on_request_only(store, backend, job, handle, capsys):
    backend.output = [chunk(b"epoch 1\n"), chunk(b"hidden\n", host=1)]
    put_success(store, job, 1)
    handle.result()
    assert capsys.readouterr().out == ""
    handle.result(stream_logs=True)
    assert capsys.readouterr().out == "epoch 1\n"


def test_each_change_of_status_is_told_once(store, backend, job, handle):
    statuses = []
    backend.output = [None] * 5
    ends_with(backend, store, job, 1)
    handle.result(on_status_change=statuses.append)
    assert statuses == [JobStatus.RUNNING, JobStatus.SUCCEEDED]


def test_a_status_that_cannot_be_had_does_not_end_the_wait(store, backend, job, handle):
    statuses, real, answers = [], backend.status, iter([False, True])

    def status(refs):
        if not next(answers, True):
            raise errors.BackendUnavailable("Too many requests.")
        return real(refs)

    backend.status = status
    backend.output = [None] * 5
    ends_with(backend, store, job, 1)
    assert handle.result(on_status_change=statuses.append) == 1
    assert statuses[-1] == JobStatus.SUCCEEDED


def test_a_timeout_leaves_the_job_running(store, backend, job, handle):
    backend.output = [None] * 100
    with pytest.raises(TimeoutError, match="job-00000001") as caught:
        handle.result(timeout=5)
    assert isinstance(caught.value, errors.WaitTimeout)
    assert "The job keeps running; reattach with" in str(caught.value)


def test_a_timeout_while_nobody_can_be_asked_promises_nothing(backend, handle):
    """While the backend does not answer, a timeout must not say that the job keeps running."""

    def fail():
        raise errors.BackendUnavailable("The cluster does not answer.")

    backend.finish = fail
    with pytest.raises(errors.WaitTimeout) as caught:
        handle.result(timeout=5)
    assert "its state is unknown now (The cluster does not answer); reattach with" in str(
        caught.value
    )
    assert "The job keeps running" not in str(caught.value)
    assert not isinstance(caught.value, errors.JobFailed)
    assert "cancel" not in backend.calls
    assert "cleanup" not in backend.calls
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0)


def test_no_patience_is_enough_for_a_job_that_has_ended(store, backend, job, handle):
    backend.output = [chunk(b"x\n")] * 50
    put_success(store, job, 1)
    assert handle.result(timeout=0, stream_logs=True) == 1


@pytest.mark.parametrize("timeout", ["5 parsecs", "", True, float("nan"), [5]])
def test_a_timeout_is_a_length_of_time(handle, timeout):
    with pytest.raises(errors.UsageTypeError, match="timeout"):
        handle.result(timeout=timeout)


def test_ctrl_c_tells_the_way_back_and_leaves_the_job(backend, job, handle):
    backend.output = [None]

    def interrupt():
        raise KeyboardInterrupt

    backend.finish = interrupt
    for blocking in (handle.result, handle.wait, lambda: handle.logs(follow=True)):
        with pytest.raises(KeyboardInterrupt) as caught:
            blocking()
        lines = "".join(traceback.format_exception(caught.value)).splitlines()
        assert lines[-2] == "KeyboardInterrupt"
        assert f'kinetic.attach("{job.job_id}")' in lines[-1], "the last words"
        assert f"kinetic jobs logs -f {job.job_id}" in lines[-1]
        assert f"kinetic jobs cancel {job.job_id}" in lines[-1]
        assert not [line for line in lines if OURS in line], "no frames of ours"
    assert backend.calls == []


@pytest.mark.parametrize("named", ["value", "free"])
def test_ctrl_c_once_the_job_has_ended_says_how_to_get_the_value(
    store, job, handle, monkeypatch, named
):
    put_success(store, job, 1)
    with monkeypatch.context() as patched:
        patched.setattr(collecting if named == "value" else handle, named, raise_interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            handle.result()
    (note,) = caught.value.__notes__
    assert f'{job.job_id} has ended: kinetic.attach("{job.job_id}").result() returns its' in note
    assert "running" not in note
    assert handle.result() == 1


def test_ctrl_c_while_the_records_are_removed_says_who_has_the_value(
    store, job, handle, monkeypatch
):
    put_success(store, job, 1)
    monkeypatch.setattr(handle, "free", raise_interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        handle.result(cleanup=True)
    assert "has ended: this handle's result() returns its value" in caught.value.__notes__[0]
    assert handle.result() == 1


INTERRUPTED = """
import sys
from kinetic._client.board import console
try:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        console.print_last(interrupt, "it goes on")
        raise
except %s as caught:
    print("caught", file=sys.stderr)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("caught", "ending"),
    [("ValueError", "KeyboardInterrupt\nit goes on\n"), ("BaseException", "caught\nit goes on\n")],
)
def test_the_way_back_is_the_last_word_whoever_catches_the_interrupt(caught, ending):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED % caught], capture_output=True, text=True
    )
    assert done.stderr.endswith(ending)
    assert done.stderr.count("it goes on") == 1


@pytest.mark.parametrize(("state", "notices"), [("running", 1), ("ended", 0), ("removed", 0)])
def test_a_job_that_is_over_at_the_end_is_not_said_to_go_on(
    store, job, handle, capsys, monkeypatch, state, notices
):
    last = []
    monkeypatch.setattr(console.atexit, "register", lambda *call: last.append(call))
    monkeypatch.setattr(handle, "_watch", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    if state == "ended":
        put_success(store, job, 1)
    elif state == "removed":
        store.delete(layout.JobKeys(job.job_id).ref)
    for act, *arguments in last:
        act(*arguments)
    assert capsys.readouterr().err.count("keeps running") == notices


def raise_interrupt(*_, **__):
    raise KeyboardInterrupt


# -- damaged and missing values --------------------------------------------------------------------


def test_a_value_that_was_tampered_with_is_not_unpickled(store, job, handle):
    put_success(store, job, 1)
    store.put(layout.HostKeys(job.job_id, 1, 0).result, pickle.dumps("evil"))
    with pytest.raises(errors.CorruptRecord, match="not unpickled"):
        handle.result(cleanup=True)
    assert not is_gone(store, job)


def test_a_value_that_was_removed(store, job, handle):
    put_success(store, job, 1)
    store.delete(layout.HostKeys(job.job_id, 1, 0).result)
    with pytest.raises(errors.ResultUnavailable, match="removed"):
        handle.result()


class Unbuildable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_value_that_cannot_be_rebuilt_here_names_its_job(store, job, handle):
    put_success(store, job, Unbuildable())
    with pytest.raises(
        errors.ResultUnavailable,
        match=rf"{job.job_id}\): The function returned, but .* unpickled here.*no number",
    ) as caught:
        handle.result()
    assert caught.value.job_id == job.job_id
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_value_of_a_call_is_that_of_process_0_on_whichever_host(store, job, handle):
    reports = []
    for host, value in enumerate(("other", "other", "first", "other")):
        data = results.pack_value(value)
        store.put(layout.HostKeys(job.job_id, 1, host).result, data)
        digest = hashlib.sha256(data).hexdigest()
        is_first = value == "first"
        reports.append(HostReport(host, Exit.RETURNED, result_digest=digest, is_first=is_first))
    assert put_outcome(store, job, *reports).leader == 2
    assert handle.result() == "first"
    assert handle.results() == ["other", "other", "first", "other"]
