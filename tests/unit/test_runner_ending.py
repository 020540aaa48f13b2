"""The reason for a host's end, from its worker's messages and its process's exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import HostView
from kinetic._core.outcome import HostReport, RemoteError
from kinetic._host.agent.exit_report import Moment, ending_of, last_words
from kinetic._host.agent.memory import MemoryVerdict
from kinetic._host.agent.stall import Sample, has_moved
from kinetic._system import processes

RETURNED = {
    "event": "returned",
    "result_digest": "ab",
    "result_size_bytes": 3,
    "leftover_threads": ["t"],
}
RAISED = {
    "event": "raised",
    "error": {
        "type_name": "ValueError",
        "message": "no",
        "traceback": "Traceback…",
        "consequence": False,
    },
}
STOP = HostView(stop=True, stop_exit=Exit.STOPPED, stop_reason="host 2 failed")
KILLED = signal.SIGKILL


def exited(code: int) -> int:
    return code << 8


def test_a_value_stands_even_when_the_gang_was_stopped():
    report = ending_of(RETURNED, None, STOP, 1)
    assert report.exit is Exit.RETURNED
    assert report.result_digest == "ab"
    assert report.leftover_threads == ("t",)


@pytest.mark.parametrize("kind", [Exit.CANCELLED, Exit.TIMEOUT, Exit.EVICTED])
def test_an_exit_with_0_stands_unless_it_came_after_the_stop(kind):
    stop = HostView(stop=True, stop_exit=kind, stop_reason="because")
    exits = RETURNED | {"by_exit": True}
    assert ending_of(exits, None, None, 1).exit is Exit.RETURNED
    assert ending_of(exits, None, stop, 1).exit is kind


def test_an_exception_stands_unless_it_came_after_the_stop():
    assert ending_of(RAISED, None, None, 1).exit is Exit.RAISED
    assert ending_of(RAISED, None, None, 1).error.message == "no"
    after = ending_of(RAISED, None, STOP, 1)
    assert (after.exit, after.detail) == (Exit.STOPPED, "host 2 failed")


@pytest.mark.parametrize("kind", [Exit.CANCELLED, Exit.TIMEOUT, Exit.HANG, Exit.STOPPED])
def test_a_stopped_worker_ended_as_the_coordinator_says(kind):
    stop = HostView(stop=True, stop_exit=kind, stop_reason="because")
    assert ending_of(None, KILLED, stop, 0).exit is kind


@pytest.mark.parametrize(
    ("status", "memory", "peak", "kind", "words"),
    [
        (exited(3), MemoryVerdict(), 0, Exit.OS_EXIT, "exit code 3"),
        (exited(0), MemoryVerdict(struck=True), 0, Exit.OS_EXIT, "exit code 0"),
        (KILLED, MemoryVerdict(), 5 << 20, Exit.SIGNAL, "SIGKILL (peak memory 5 MiB)"),
        (
            KILLED,
            MemoryVerdict(limit_bytes=10 << 20),
            5 << 20,
            Exit.SIGNAL,
            "SIGKILL (peak memory 5 MiB)",
        ),
        (signal.SIGSEGV, MemoryVerdict(), 0, Exit.SIGNAL, "SIGSEGV"),
        (
            KILLED,
            MemoryVerdict(struck=True, limit_bytes=2 << 30),
            1 << 30,
            Exit.OUT_OF_MEMORY,
            "killer ended.*1,024 MiB, limit 2,048 MiB",
        ),
        (
            KILLED,
            MemoryVerdict(limit_bytes=11 << 20),
            10 << 20,
            Exit.OUT_OF_MEMORY,
            "10 MiB of 11 MiB: probably out of memory",
        ),
        (signal.SIGSEGV, MemoryVerdict(struck=True), 1 << 30, Exit.SIGNAL, "SIGSEGV"),
    ],
)
def test_a_death_is_named(status, memory, peak, kind, words):
    report = ending_of(None, status, None, 2, peak_bytes=peak, memory=memory)
    assert report.exit is kind
    assert report.guessed is (kind is Exit.OUT_OF_MEMORY and not memory.struck)
    assert words in report.detail or re.search(words, report.detail)


MAIN = (10**9, 0)
BASE = Sample(time_s=100.0, cpu_s=5.0, main_ns=MAIN, log_bytes=100)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (Sample(110.0, 5.0, MAIN, 100), False),  # The worker sleeps.
        (Sample(110.0, 5.0, MAIN, 101), True),  # The worker prints.
        (Sample(110.0, 7.0, MAIN, 100), True),  # The worker computes.
        (Sample(110.0, 5.3, MAIN, 100), False),  # Threads in the background wake up.
        (
            Sample(110.0, 5.01, (10**9 + 5_000_000, 0), 100),
            True,
        ),  # The worker feeds an accelerator in a loop.
        (Sample(110.0, 5.0, (10**9 + 400_000, 0), 100), False),  # The worker wakes once a second.
        (Sample(110.0, 5.0, None, 100), False),
        (Sample(90.0, 5.0, MAIN, 100), False),  # The clock was set back.
        (Sample(110.0, 4.9, MAIN, 100), True),  # An ended child no longer counts.
    ],
)
def test_standing_still(second, expected):
    assert has_moved(BASE, second) is expected


@pytest.mark.starts_processes
def test_programs_that_have_ended_count_with_whoever_has_run_them():
    before = processes.cpu_s(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert processes.cpu_s(os.getpid()) - before >= 0.4


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (Moment(started=False), "before the function began"),
        (Moment(), "before the function returned"),
        (
            Moment(ending={"raised": True, "type_name": "a.Mine"}),
            "the exception that the function raised (a.Mine)",
        ),
        (
            Moment(ending={"raised": False, "type_name": "a.Mine"}),
            "the value that the function returned (a.Mine)",
        ),
    ],
)
def test_how_far_the_worker_was_is_told(moment, words):
    assert words in ending_of(None, exited(3), None, 0, moment=moment).detail
    assert ending_of(None, exited(3), None, 0, moment=moment).exit is Exit.OS_EXIT


RAISED_REPORT = HostReport(
    0,
    Exit.RAISED,
    "ValueError: no",
    error=RemoteError("ValueError", "no", "Traceback…\nValueError: no\n"),
)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (HostReport(0, Exit.RETURNED), ""),
        (RAISED_REPORT, "Traceback…\nValueError: no"),
        (HostReport(0, Exit.RAISED, "broken"), "kinetic: broken"),
        (HostReport(0, Exit.SYS_EXIT, "The function called sys.exit(3).", exit_code=3), ""),
        (HostReport(0, Exit.SIGNAL, "killed by SIGKILL.", signal=9), "kinetic: killed by SIGKILL."),
        (HostReport(0, Exit.SETUP_FAILED, "no room"), "kinetic: no room"),
        (
            HostReport(0, Exit.STOPPED, "host 2 of 4: ValueError: no"),
            "kinetic: this host was stopped: host 2 of 4: ValueError: no",
        ),
        (HostReport(0, Exit.AGENT_LOST), "kinetic: agent_lost"),
    ],
)
def test_a_log_ends_with_how_the_host_failed(report, words):
    assert last_words(report) == words
