"""The table of exit kinds (how a host ended): every kind has a row, and the rows are consistent."""

from __future__ import annotations

import os
import signal

import pytest

from kinetic._core.exits import KINDS, SILENT_RANK, Exit, ExitCode, HostState, ProgramCode
from kinetic._core.gang import blame
from kinetic._core.outcome import HostReport, RemoteError, program_code
from kinetic._host.agents import Agents
from kinetic._host.program import pause_before_next
from kinetic.errors import HostLost, JobFailed

CODE_FAILED = {Exit.RAISED, Exit.SYS_EXIT, Exit.UNPICKLE_FAILED, Exit.SETUP_FAILED}


def test_every_exit_has_a_row():
    assert set(KINDS) == set(Exit)
    assert [exit for exit in Exit if exit.kind.code is ExitCode.OK] == [Exit.RETURNED]
    assert [exit for exit in Exit if exit.kind.state is HostState.RETURNED] == [Exit.RETURNED]


def test_a_host_that_died_is_lost_and_tried_again():
    died = [exit for exit in Exit if exit.kind.fatal]
    assert died == [exit for exit in Exit if exit.kind.error is HostLost]
    assert all(exit.kind.retryable for exit in died)


def test_who_failed_by_itself_comes_before_who_fell_silent_and_who_was_stopped():
    own = [exit for exit in Exit if not exit.kind.hearsay and exit is not Exit.RETURNED]
    assert all(exit.kind.rank < SILENT_RANK for exit in own)
    assert all(exit.kind.error is not JobFailed for exit in own)


def test_code_that_fails_the_same_way_everywhere():
    assert {exit for exit in Exit if exit.kind.code_failed} == CODE_FAILED


@pytest.mark.parametrize("exit", Exit)
def test_a_program_tells_its_cluster_whether_it_would_fail_again(exit):
    final = exit in CODE_FAILED | {Exit.RESULT_UNPICKLABLE, Exit.DIFFERED}
    expected = ProgramCode.CODE_FAILED if final else ProgramCode.DELIVERED
    assert program_code(HostReport(0, exit)) is expected


def test_an_echo_of_another_hosts_death_may_be_tried_again():
    echo = RemoteError("JaxRuntimeError", "connection closed", "", consequence=True)
    assert program_code(HostReport(1, Exit.RAISED, error=echo)) is ProgramCode.DELIVERED


@pytest.mark.parametrize(
    ("message", "line"),
    [("no", "E: no"), ("", "E"), ("\n", "E"), ("\n \nAll fits failed.\nx", "E: All fits failed.")],
)
def test_a_message_that_begins_with_blank_lines_has_a_reason(message, line):
    report = HostReport(0, Exit.RAISED, error=RemoteError("E", message, ""))
    assert blame.why(report) == line


FRAME = '  File "/lib/python3.11/site-packages/{}.py", line 7 in read\n'


def last_words(agents, host, words):
    os.write(agents._open_last_words(host), words.encode())


def test_only_who_was_ended_by_a_crash_is_said_to_have_crashed():
    """A crash is reported for the agent that died of it, from the newest fault text of this agent,
    not of another host's agent or an earlier one."""
    agents = Agents(None, None)
    for host, module in ((0, "grpc/first"), (0, "grpc/last"), (1, "grpc/other")):
        words = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most):\n{FRAME}"
        last_words(agents, host, words.format(module))
    crashed = "Its agent process was killed by SIGSEGV at grpc/last.py:7 in read."
    assert agents.cause_of_death(0, signal.SIGSEGV) == crashed
    assert agents.cause_of_death(0, signal.SIGKILL) == "Its agent process was killed by SIGKILL."
    assert agents.cause_of_death(0, 1 << 8) == "Its agent process ended with exit code 1."


@pytest.mark.parametrize("signum", [signal.SIGALRM, signal.SIGABRT])
def test_of_an_agent_in_which_grpc_got_no_threads_the_limit_is_told(signum):
    """Without threads, gRPC aborts or hangs until SIGALRM; the message names the thread limit."""
    agents = Agents(None, None)
    words = f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most):\n{FRAME}"
    last_words(agents, 0, words.format("grpc/_channel") if signum == signal.SIGABRT else "")
    cause = agents.cause_of_death(0, signum)
    assert cause.startswith(f"Its agent process was killed by {signum.name}")
    assert "; the limit of processes and threads (" in cause
    last_words(agents, 0, words.format("numpy/core"))
    assert "limit" not in agents.cause_of_death(0, signal.SIGABRT)


def test_what_an_agent_said_when_it_ended_is_not_said_of_a_killed_one():
    agents = Agents(None, None)
    last_words(agents, 0, "raised: OSError: no space\n")
    ended = "Its agent process ended with exit code 1: OSError: no space"
    assert agents.cause_of_death(0, 1 << 8) == ended
    assert agents.cause_of_death(0, signal.SIGKILL) == "Its agent process was killed by SIGKILL."
    last_words(agents, 0, "")
    assert agents.cause_of_death(0, 1 << 8) == "Its agent process ended with exit code 1."


def test_an_agent_that_is_killed_again_and_again_is_replaced_later_and_later():
    pauses = [0.0]
    for ran_s in (60.0, 1.0, 1.0, 1.0, *[1.0] * 9, 60.0):
        pauses.append(pause_before_next(ran_s, pauses[-1]))
    assert pauses[1:5] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-2:] == [30.0, 0.0]
