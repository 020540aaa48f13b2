"""Handles: any process, again and again; the value or the error; nothing lost."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import traceback

import pytest
from laptop_fakes import (
    HOSTS,
    NOW,
    FakeBackend,
    chunk,
    is_gone,
    put_outcome,
    put_ref,
    put_report,
    put_success,
    raised,
    ref,
)

import kinetic
from kinetic import errors
from kinetic._backends import registry
from kinetic._client.handle import JobHandle
from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, RemoteError
from kinetic._core.place import Place
from kinetic._store.local import LocalStore
from kinetic.job_status import JobStatus
from kinetic.jobs import attach, list_jobs


@pytest.fixture
def store(home):
    return LocalStore(home)


@pytest.fixture
def backend(store):
    fake = FakeBackend(store)
    with registry.substituted("local", lambda *_: fake):
        yield fake


@pytest.fixture
def job(store, backend):
    kept = put_ref(store, ref())
    backend.phases[kept.job_id] = JobStatus.RUNNING
    return kept


@pytest.fixture
def handle(job, store, backend):
    return JobHandle(job, backend, store, clock=iter(range(10**6)).__next__)


def ends_with(backend, store, job, value):
    backend.finish = lambda: put_success(store, job, value)


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
    backend.cleanup = lambda ref: (_ for _ in ()).throw(errors.StoreError("unreachable"))
    assert handle.result() == 1
    assert "unreachable" in caplog.text


def test_logs_are_streamed_on_request_only(store, backend, job, handle, capsys):
    backend.output = [chunk(b"epoch 1\n"), chunk(b"hidden\n", host=1)]
    put_success(store, job, 1)
    handle.result()
    assert capsys.readouterr().out == ""
    handle.result(stream_logs=True)
    assert capsys.readouterr().out == "epoch 1\n"


def test_each_change_of_status_is_told_once(store, backend, job, handle):
    seen = []
    backend.output = [None] * 5
    ends_with(backend, store, job, 1)
    handle.result(on_status_change=seen.append)
    assert seen == [JobStatus.RUNNING, JobStatus.SUCCEEDED]


def test_a_status_that_cannot_be_had_does_not_end_the_wait(store, backend, job, handle):
    seen, real, answers = [], backend.status, iter([False, True])

    def status(refs):
        if not next(answers, True):
            raise errors.BackendUnavailable("Too many requests.")
        return real(refs)

    backend.status = status
    backend.output = [None] * 5
    ends_with(backend, store, job, 1)
    assert handle.result(on_status_change=seen.append) == 1
    assert seen[-1] == JobStatus.SUCCEEDED


def test_a_timeout_leaves_the_job_running(store, backend, job, handle):
    backend.output = [None] * 100
    with pytest.raises(TimeoutError, match="job-00000001") as caught:
        handle.result(timeout=5)
    assert isinstance(caught.value, errors.WaitTimeout)
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
        told = "".join(traceback.format_exception(caught.value)).splitlines()
        assert told[-2] == "KeyboardInterrupt"
        assert f'kinetic.attach("{job.job_id}")' in told[-1], "the last words"
        assert f"kinetic jobs logs -f {job.job_id}" in told[-1]
        assert f"kinetic jobs cancel {job.job_id}" in told[-1]
        assert not [line for line in told if "/kinetic/" in line and "/tests/" not in line], (
            "no frames of ours"
        )
    assert backend.calls == []


INTERRUPTED = """
import sys
from kinetic._client.board import console
try:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        console.tell_last(interrupt, "it goes on")
        raise
except %s as caught:
    print("caught", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("caught", "told"),
    [("ValueError", "KeyboardInterrupt\nit goes on\n"), ("BaseException", "caught\nit goes on\n")],
)
def test_the_way_back_is_the_last_word_whoever_catches_the_interrupt(caught, told):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED % caught], capture_output=True, text=True
    )
    assert done.stderr.endswith(told)
    assert done.stderr.count("it goes on") == 1


# -- damaged and missing values --------------------------------------------------------------------


def test_a_value_that_was_tampered_with_is_not_unpickled(store, job, handle):
    put_success(store, job, 1)
    store.put(layout.result(job.job_id, 1, 0), pickle.dumps("evil"))
    with pytest.raises(errors.CorruptRecord, match="not unpickled"):
        handle.result(cleanup=True)
    assert not is_gone(store, job)


def test_a_value_that_was_removed(store, job, handle):
    put_success(store, job, 1)
    store.delete(layout.result(job.job_id, 1, 0))
    with pytest.raises(errors.ResultUnavailable, match="removed"):
        handle.result()


class Unbuildable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_value_that_cannot_be_rebuilt_here_names_its_job(store, job, handle):
    put_success(store, job, Unbuildable())
    with pytest.raises(
        errors.ResultUnavailable,
        match=rf"{job.job_id}\): The value could not be rebuilt here.*no number",
    ) as caught:
        handle.result()
    assert caught.value.job_id == job.job_id
    assert isinstance(caught.value.__cause__, ValueError)


# -- failures --------------------------------------------------------------------------------------


class OwnError(Exception):
    def __init__(self, code, *, why):
        super().__init__(code, why)
        self.code = code
        self.why = why


def test_the_functions_own_exception_is_raised_with_its_type_and_told_where_it_comes_from(
    store, backend, job, handle
):
    backend.output = [chunk(b"line %d\n" % n, host=2) for n in range(3)]
    put_outcome(store, job, raised(store, job, 2, OwnError(7, why="because")))
    with pytest.raises(OwnError) as caught:
        handle.result()
    assert (caught.value.code, caught.value.why) == (7, "because")
    notes = "\n".join(caught.value.__notes__)
    assert "Remote traceback (host 2 of 4, job-00000001):\n" in notes
    assert "OwnError" in notes
    assert "line 2" in notes, "what the caller has not seen is shown"
    assert "kinetic jobs logs job-00000001 --host 2" in notes


def test_a_traceback_is_shown_once(store, job, handle):
    try:
        raise OwnError(7, why="because")
    except OwnError as error:
        put_outcome(store, job, raised(store, job, 2, error))
    with pytest.raises(OwnError) as caught:
        handle.result()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count('raise OwnError(7, why="because")') == 1
    assert shown.count("Traceback (most recent call last)") == 1
    assert re.search(
        r"Remote traceback \(host 2 of 4, job-00000001\): as above, raised at test_handle.py:\d+ "
        r"in test_",
        shown,
    )


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words(store, job, handle):
    report = raised(store, job, 1, ValueError("no"))
    store.put(layout.error(job.job_id, 1, 1), b"garbage")
    put_outcome(store, job, report)
    with pytest.raises(errors.UserCodeFailed, match="host 1 of 4 raised ValueError: no") as caught:
        handle.result()
    assert "ValueError: no" in caught.value.remote_traceback
    assert "Remote traceback" in str(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_would_end_the_caller_is_wrapped(store, job, handle, kind):
    put_outcome(store, job, raised(store, job, 0, kind()))
    with pytest.raises(errors.UserCodeFailed, match=kind.__name__) as caught:
        handle.result()
    assert isinstance(caught.value.__cause__, kind)


CASES = [
    (
        HostReport(2, Exit.SYS_EXIT, exit_code=3),
        errors.UserCodeFailed,
        r"called sys\.exit\(3\) on host 2",
    ),
    (
        HostReport(2, Exit.SIGNAL, "The worker process was killed by SIGSEGV.", signal=11),
        errors.HostLost,
        "host 2 of 4 died.*SIGSEGV",
    ),
    (
        HostReport(2, Exit.OS_EXIT, "ended with exit code 9", exit_code=9),
        errors.HostLost,
        "host 2 of 4 died.*exit code 9",
    ),
    (
        HostReport(2, Exit.OUT_OF_MEMORY, "peak memory 3 MiB."),
        errors.HostLost,
        "host 2 of 4 ran out of memory.*3 MiB",
    ),
    (
        HostReport(2, Exit.OUT_OF_MEMORY, "9 of 10 MiB.", guessed=True),
        errors.HostLost,
        "host 2 of 4 probably ran out of memory",
    ),
    (
        HostReport(2, Exit.AGENT_LOST, "No heartbeat for 10 s."),
        errors.HostLost,
        r"host 2 of 4 was lost\. No heartbeat for 10 s\.",
    ),
    (
        HostReport(2, Exit.HANG, stacks="Thread 0x1 (most recent call first):\n"),
        errors.HostHung,
        "host 2",
    ),
    (HostReport(2, Exit.NEVER_JOINED, "pod pending"), errors.GangTimeout, "host 2"),
    (HostReport(2, Exit.TIMEOUT, "ran longer than 5 s"), errors.JobTimeout, "longer than 5 s"),
    (HostReport(2, Exit.CANCELLED, "by the caller"), errors.JobCancelled, "by the caller"),
    (
        HostReport(2, Exit.SETUP_FAILED, "bad bundle"),
        errors.SetupFailed,
        "could not be prepared: bad bundle",
    ),
    (
        HostReport(2, Exit.SETUP_FAILED, "The host could not be prepared: full"),
        errors.SetupFailed,
        "could not be prepared: full",
    ),
    (
        HostReport(2, Exit.UNPICKLE_FAILED, "no module x"),
        errors.SetupFailed,
        "could not load the function: no module x",
    ),
    (
        HostReport(0, Exit.RESULT_UNPICKLABLE, "a lock\nIts repr: <lock>"),
        errors.ResultUnavailable,
        "(?s)cannot be brought here.*<lock>",
    ),
]


@pytest.mark.parametrize(("report", "kind", "words"), CASES, ids=[c[0].exit for c in CASES])
def test_each_way_to_fail_has_its_error(store, job, handle, report, kind, words):
    put_outcome(store, job, report)
    with pytest.raises(kind, match=words) as caught:
        handle.result()
    assert type(caught.value) is kind
    assert caught.value.job_id == job.job_id
    assert caught.value.hosts == (() if kind is errors.JobCancelled else (report.host,))
    assert caught.value.host == (None if kind is errors.JobCancelled else report.host)
    assert "kinetic jobs" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 60


def test_every_way_to_end_is_covered():
    assert {c[0].exit for c in CASES} | {Exit.RAISED, Exit.RETURNED, Exit.STOPPED} == set(Exit)


def test_several_hosts_to_blame_are_named(store, job, handle):
    put_outcome(
        store,
        job,
        HostReport(1, Exit.NEVER_JOINED),
        HostReport(3, Exit.NEVER_JOINED),
        reason="hosts 1, 3 of 4 did not join",
    )
    with pytest.raises(errors.GangTimeout, match="hosts 1, 3 of 4 did not join") as caught:
        handle.result()
    assert caught.value.hosts == (1, 3)


def test_the_runners_own_frames_are_not_shown_of_a_crash(store, backend, job, handle):
    lines = [
        "Fatal Python error: Segmentation fault",
        '  File "/home/me/train.py", line 3 in train',
    ]
    lines += [f'  File "/x/kinetic/_host/worker/main.py", line {n} in f' for n in range(30)] + [
        "Extension modules: " + "numpy " * 300
    ]
    backend.output = [chunk("\n".join(lines).encode(), host=1)]
    put_outcome(store, job, HostReport(1, Exit.SIGNAL, "killed by SIGSEGV", signal=11))
    with pytest.raises(errors.HostLost, match=r"train\.py") as caught:
        handle.result()
    assert "runner" not in str(caught.value)
    assert "Extension" not in str(caught.value)


def test_a_cancelled_job_blames_nobody_at_length(store, backend, job, handle):
    backend.output = [chunk(b"step 1\n", host=1)]
    put_outcome(
        store,
        job,
        *[HostReport(n, Exit.CANCELLED) for n in range(4)],
        reason="cancelled by somebody.",
    )
    with pytest.raises(errors.JobCancelled, match=r"cancelled by somebody\.\n") as caught:
        handle.result()
    assert "step 1" not in str(caught.value)
    assert "as well" not in str(caught.value)


def test_an_echo_is_called_an_echo(store, job, handle):
    put_outcome(store, job, raised(store, job, 1, ValueError("connection reset"), consequence=True))
    with pytest.raises(ValueError, match="reset") as caught:
        handle.result()
    assert "hosts 0, 2-3 have returned; the other hosts probably waited for them" in "\n".join(
        caught.value.__notes__
    )


def test_hosts_that_failed_alike_are_named_together(store, job, handle):
    reports = [
        dataclasses.replace(raised(store, job, host, ValueError("no")), ended_at=NOW + host)
        for host in (0, 1, 3)
    ]
    other = raised(store, job, 2, KeyError("k"))
    put_outcome(store, job, *reports, other)
    with pytest.raises(ValueError, match="no") as caught:
        handle.result()
    notes = "\n".join(caught.value.__notes__)
    assert "Remote traceback (hosts 0-1, 3 of 4, job-" in notes
    assert "Failed as well: host 2: KeyError: 'k'." in notes


def test_all_hosts_that_failed_alike_are_said_to(store, job, handle):
    reports = [
        HostReport(host, Exit.SYS_EXIT, "The function called sys.exit(3).", exit_code=3)
        for host in range(4)
    ]
    put_outcome(store, job, *reports)
    with pytest.raises(
        errors.UserCodeFailed, match=r"the function called sys.exit\(3\) on all 4 hosts\."
    ):
        handle.result()


def test_an_echo_without_a_cause_is_called_an_echo(store, job, handle):
    put_outcome(
        store,
        job,
        *(raised(store, job, host, ValueError("reset"), consequence=True) for host in range(4)),
    )
    with pytest.raises(ValueError, match="reset") as caught:
        handle.result()
    assert "echo of another host's end" in "\n".join(caught.value.__notes__)


def test_a_killed_supervisor_is_told(store, backend, job, handle):
    backend.phases[job.job_id] = JobStatus.FAILED
    with pytest.raises(errors.SupervisorLost, match="supervisor was killed") as caught:
        handle.result()
    assert caught.value.job_id == job.job_id


def test_what_the_function_raised_counts_more_than_the_supervisors_end(store, backend, job, handle):
    backend.phases[job.job_id] = JobStatus.FAILED
    put_report(store, job, raised(store, job, 3, ValueError("cause")))
    with pytest.raises(ValueError, match="cause"):
        handle.result()


def test_a_gang_that_returned_without_a_value(store, job, handle):
    put_outcome(store, job)
    with pytest.raises(errors.ResultUnavailable, match="no result"):
        handle.result()


def test_long_tracebacks_fit_on_a_screen(store, job, handle):
    text = "\n".join(f"frame {n}" for n in range(5000))
    put_outcome(store, job, HostReport(1, Exit.RAISED, error=RemoteError("Odd", "m" * 9000, text)))
    with pytest.raises(errors.UserCodeFailed) as caught:
        handle.result()
    shown = str(caught.value)
    assert "frame 0" in shown
    assert "frame 4999" in shown
    assert "lines left out" in shown
    assert len(shown.splitlines()) < 70
    assert len(shown) < 10_000
    assert caught.value.remote_traceback == text


# -- looking ---------------------------------------------------------------------------------------


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
    store.delete(layout.ref(job.job_id))
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
    with pytest.raises(errors.UsageError, match="hosts 0 to 3"):
        handle.logs(host=host)


def test_events_pass_over_damage(store, job, handle):
    assert handle.events() == []
    store.put(layout.events(job.job_id), b'{"kind": "joined"}\n{"kin\n[]\n{"kind": "ready"}\n')
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
    seen = JobHandle(ref(created_at=1_700_000_000.9), store=store)
    assert seen.created_at == "2023-11-14T22:13:20Z"
    assert seen.ref.created_at == 1_700_000_000.9


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
    with pytest.raises(errors.UsageError, match="beginning of 2 ids: job-12345678, job-12345999"):
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
        store.put(layout.ref(f"job-{name}"), garbage)
    store.put(
        layout.ref("job-bad5"),
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
