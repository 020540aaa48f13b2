"""Errors that a handle raises for a failed job, with their notes."""

from __future__ import annotations

import dataclasses
import json
import re
import traceback

import handle_cases
import pytest
from laptop_fakes import (
    NOW,
    chunk,
    put_outcome,
    put_report,
    raised,
)

from kinetic import errors
from kinetic._core import failure, layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, RemoteError, Verdict
from kinetic.job_status import JobStatus

store, backend = handle_cases.store, handle_cases.backend
job, handle = handle_cases.job, handle_cases.handle


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
    assert "Remote traceback (host 2 of 4, job-00000001): as above.\n" in notes
    assert "line 2" in notes, "what the caller has not seen is shown"
    assert "kinetic jobs logs job-00000001 --host 2" in notes


def test_a_traceback_is_shown_once(store, job, handle):
    try:
        raise OwnError(7, why="because")
    except OwnError as error:
        put_outcome(store, job, raised(store, job, 2, error))
    with pytest.raises(OwnError) as caught:
        handle.result()
    text = "".join(traceback.format_exception(caught.value))
    assert text.count('raise OwnError(7, why="because")') == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert re.search(
        r"Remote traceback \(host 2 of 4, job-00000001\): as above, "
        r"raised at test_handle_failures.py:\d+ in test_",
        text,
    )


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words(store, job, handle):
    report = raised(store, job, 1, ValueError("no"))
    store.put(layout.HostKeys(job.job_id, 1, 1).error, b"garbage")
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
        HostReport(2, Exit.EVICTED, "fell silent: no sign of life for 10 s"),
        errors.HostLost,
        r"host 2 of 4 was lost\. Fell silent: no sign of life for 10 s\.",
    ),
    (
        HostReport(2, Exit.EVICTED, "The cluster asked its pod to end."),
        errors.HostLost,
        r"host 2 of 4 was lost\. The cluster asked",
    ),
    (
        HostReport(2, Exit.HANG, stacks="Thread 0x1 (most recent call first):\n"),
        errors.HostHung,
        "host 2",
    ),
    (HostReport(2, Exit.NEVER_JOINED, "pod pending"), errors.GangTimeout, "host 2"),
    (HostReport(2, Exit.TIMEOUT, "ran longer than 5 s"), errors.JobTimeout, "longer than 5 s"),
    (HostReport(2, Exit.OVER_BUDGET, "used up its budget"), errors.BudgetUsedUp, "its budget"),
    (HostReport(2, Exit.CANCELLED, "by the caller"), errors.JobCancelled, "by the caller"),
    (HostReport(2, Exit.DIFFERED, "host 2 compiles another"), errors.JobFailed, "host 2 compiles"),
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
        "(?s)cannot be loaded here.*<lock>",
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
    no_failures = {Exit.RETURNED, Exit.STOPPED, Exit.REFORMED}
    assert {c[0].exit for c in CASES} | {Exit.RAISED} | no_failures == set(Exit)


@pytest.mark.parametrize("exit", [Exit.REFORMED, Exit.STOPPED])
def test_a_job_given_up_between_two_attempts_has_lost_a_host(store, job, handle, exit):
    every = tuple(HostReport(host, exit) for host in range(job.hosts))
    why = "Given up: it failed once, and max_failures is 0. attempt 1: slice 1 lost: killed."
    outcome = Outcome(Verdict.FAILED, blamed=(0,), reports=every, given_up=why)
    store.put(layout.JobKeys(job.job_id).outcome, json.dumps(outcome.to_json()).encode())
    with pytest.raises(errors.HostLost, match="given up: it failed once"):
        handle.result()


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
    assert str(caught.value).endswith(f"More: kinetic jobs status {job.job_id}"), "no logs"


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


def test_a_crash_in_a_library_shows_the_line_above_the_frames_of_all_threads(
    store, backend, job, handle
):
    threads = [
        f"Thread 0x{n:016x} (most recent call first):\n"
        + "".join(
            f'  File "/v/lib/python3.11/site-packages/grpc/x.py", line {line} in wait\n'
            for line in range(8)
        )
        + '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
        for n in range(10)
    ]
    output = (
        "F0000 collective.cc:120] Check failed: x == y (1 vs. 2)\n"
        "*** Check failure stack trace: ***\nFatal Python error: Aborted\n\n"
        + "".join(threads)
        + "Current thread 0x00007f74949e0b80 (most recent call first):\n"
        + '  File "/v/lib/python3.11/site-packages/jax/api.py", line 9 in block\n' * 20
        + '  File "/home/me/train.py", line 3 in train\n\n'
        + "Extension modules: numpy (total: 14)\n"
    )
    backend.output = [chunk(output.encode(), host=1)]
    put_outcome(store, job, HostReport(1, Exit.SIGNAL, "killed by SIGABRT", signal=6))
    with pytest.raises(errors.HostLost) as caught:
        handle.result()
    quoted = str(caught.value).partition("Last lines of host 1:\n")[2]
    assert quoted.splitlines()[:-1] == [
        "  F0000 collective.cc:120] Check failed: x == y (1 vs. 2)",
        "  *** Check failure stack trace: ***",
        "  Fatal Python error: Aborted",
        "  ",
        "  Current thread 0x00007f74949e0b80 (most recent call first):",
        '    File "/home/me/train.py", line 3 in train',
    ]


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (
            "shard 7\n" + "\r".join(f"{n}%|###| {n}/99" for n in range(99)),
            ["shard 7", "98%|###| 98/99"],
        ),
        ("shard 7\n 50%|# |\r100%|##|\r        \rdone\n", ["shard 7", "done"]),
        ("shard 7\n\r 50%|# |\r100%|##|\r        \r\n", ["shard 7", "100%|##|"]),
        ("shard 7\r\n\r\nshard 8\r\n", ["shard 7", "", "shard 8"]),
        ("one\x0btwo\u2028three\n", ["one\x0btwo\u2028three"]),
        ("x" * 500, ["x" * 400]),
        (
            "kinetic: attempt 2 of 3 failed: host 1: ValueError: no\n"
            "kinetic: attempt 3 of 3 begins.\nkinetic: attempt 4 begins on 1 of 2.\nstep 1\n",
            ["step 1"],
        ),
        ("kinetic: this process ends\n", ["kinetic: this process ends"]),
        ("kinetic: attempt 1 of 3 failed.\nkinetic: attempt 2 of 3 begins.\n", []),
        (" \r\n\r", []),
    ],
)
def test_the_last_lines_of_a_host_are_those_that_a_terminal_shows(printed, lines):
    title = ["Last lines of host 3:"] if lines else [""]
    assert failure.last_lines(printed, 3).split("\n") == title + [f"  {line}" for line in lines]


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
    assert "Also failed" not in str(caught.value)


def test_an_echo_is_called_an_echo(store, job, handle):
    put_outcome(store, job, raised(store, job, 1, ValueError("connection reset"), consequence=True))
    with pytest.raises(ValueError, match="reset") as caught:
        handle.result()
    assert "hosts 0, 2-3 have returned; the other hosts probably waited for them" in "\n".join(
        caught.value.__notes__
    )


def test_hosts_that_came_too_late_for_each_other_are_said_to(store, job, handle):
    late = ValueError(
        "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out "
        "with key: cpu:gloo/0,1,2048,2049/2 and duration: 29.99999997s"
    )
    stopped = [HostReport(host, Exit.STOPPED, "host 0 of 4: …") for host in (1, 2, 3)]
    put_outcome(store, job, raised(store, job, 0, late, consequence=True), *stopped)
    with pytest.raises(ValueError, match="Gloo") as caught:
        handle.result()
    notes = "\n".join(caught.value.__notes__)
    assert "No host has ended: the hosts were more than 30 s apart." in notes
    assert "echo" not in notes


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
    assert "Also failed: host 2: KeyError: 'k'." in notes


@pytest.mark.parametrize(
    ("words", "end"),
    [("word " * 99, " word word …."), ("x" * 999, "xxx …."), ("short", ": short.")],
)
def test_the_words_of_other_hosts_are_cut_between_words(store, job, handle, words, end):
    first, other = (
        raised(store, job, n, e) for n, e in enumerate((ValueError("no"), OSError(words)))
    )
    put_outcome(store, job, dataclasses.replace(first, ended_at=NOW), other)
    with pytest.raises(ValueError, match="no") as caught:
        handle.result()
    lines = "\n".join(caught.value.__notes__).splitlines()
    assert any(line.startswith("Also failed: ") and line.endswith(end) for line in lines)


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


def test_a_collective_that_fails_by_itself_is_not_called_an_echo(store, job, handle):
    put_outcome(
        store,
        job,
        *(raised(store, job, host, ValueError("reset"), consequence=True) for host in range(4)),
    )
    with pytest.raises(ValueError, match="reset") as caught:
        handle.result()
    notes = "\n".join(caught.value.__notes__)
    assert "no host had ended; the message above says why" in notes
    assert f"kinetic jobs logs {job.job_id} --all-hosts" in notes
    assert "echo" not in notes


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
    trace = "\n".join(f"frame {n}" for n in range(5000))
    put_outcome(store, job, HostReport(1, Exit.RAISED, error=RemoteError("Odd", "m" * 9000, trace)))
    with pytest.raises(errors.UserCodeFailed) as caught:
        handle.result()
    text = str(caught.value)
    assert "frame 0" in text
    assert "frame 4999" in text
    assert "lines left out" in text
    assert len(text.splitlines()) < 70
    assert len(text) < 10_000
    assert caught.value.remote_traceback == trace


def test_an_exception_that_another_version_wrote_is_called_so(store, job, handle):
    report = raised(store, job, 0, ValueError("nine"))
    put_outcome(store, job, report)
    data = store.get(report.error.key)
    store.put(report.error.key, data.replace(b'"schema": 3', b'"schema": 1', 1))
    with pytest.raises(errors.UserCodeFailed, match="another version of kinetic wrote it") as info:
        handle.result()
    assert "class cannot be unpickled" not in str(info.value)
