"""Progress lines while a compiler runs."""

from __future__ import annotations

import io

from kinetic._client.compiling import CompileProgress
from kinetic._compile.processes import Compiling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *seconds: float) -> CompileProgress:
    progress = CompileProgress(stream)
    for elapsed_s in seconds:
        progress(Compiling(("step", "evaluate"), 3, elapsed_s))
    return progress


def test_a_pipe_gets_a_line_when_the_time_has_doubled() -> None:
    pipe = io.StringIO()
    show(pipe, *range(1, 130))(None)
    assert pipe.getvalue().splitlines() == [
        f"kinetic: compiling step, evaluate, 3 more to come: {elapsed_s} s"
        for elapsed_s in (30, 60, 120)
    ]


def test_a_report_in_between_begins_no_new_count() -> None:
    pipe = io.StringIO()
    progress = show(pipe, 31.0)
    progress(None)
    for elapsed_s in (33.0, 59.0, 61.0, 1.0, 31.0):
        progress(Compiling(("step",), 0, elapsed_s))
    assert [line.rsplit(": ")[-1] for line in pipe.getvalue().splitlines()] == [
        "31 s",
        "61 s",
        "31 s",
    ]


def test_a_terminal_has_one_line_that_is_taken_away_at_the_end() -> None:
    terminal = Terminal()
    progress = show(terminal, 1.0, 2.0)
    line = "kinetic: compiling step, evaluate, 3 more to come"
    assert terminal.getvalue() == f"\r{line}: 1 s\033[K\r{line}: 2 s\033[K"
    progress(None)
    assert terminal.getvalue().endswith("\r\033[K")


def test_nothing_is_said_of_what_was_quick_and_a_closed_stream_is_no_error() -> None:
    pipe = io.StringIO()
    show(pipe, 1.0, 29.0)(None)
    assert pipe.getvalue() == ""
    pipe.close()
    show(pipe, 31.0)(None)
