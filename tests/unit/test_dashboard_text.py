"""Lines of output and charts of the dashboard's pages, without a server."""

from __future__ import annotations

import math
from array import array

import pytest

pytest.importorskip("starlette")


from kinetic._core.log_format import STDERR, LogChunk, Position
from kinetic._core.metrics import Series
from kinetic._dashboard import output
from kinetic._dashboard.charts import draw_chart
from kinetic._dashboard.output import LineFolder


def fold(*pieces: bytes) -> tuple[list[str], str]:
    folder, at = LineFolder(), 0
    lines: list[str] = []
    for piece in pieces:
        at += len(piece)
        part = LogChunk(0, 1, 10**18, piece, Position(1, at))
        lines += [line.text for line in folder.fold(part)]
    return lines, folder.rest()


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"], ""),
        (["é\n".encode()[:1], "é\n".encode()[1:]], ["é"], ""),
        ([b"\x1b[3", b"1mred\x1b[0m\n"], ["\x1b[31mred\x1b[0m"], ""),
        ([b"\x1b[1;3", b"8;5;9mx\x1b[2J\x1b[m\n"], ["\x1b[1;38;5;9mx\x1b[m"], ""),
        (
            ["\U0001f468\u200d\U0001f469 \u200c\n".encode()],
            ["\U0001f468\u200d\U0001f469 \u200c"],
            "",
        ),
        ([b"\x1b]0;title\x07x\x1b]8;;http://e\x1b\\link\n"], ["xlink"], ""),
        ([b"\x1bP1$r\x1b\\\x1b(Bq\x1bM\n"], ["q"], ""),
        ([b"\x1b[31", b""], [], "\\x1b[31"),
        ([b"10%\r", b"20%\r", b"30%"], [], "30%"),
        ([b"10%\r20%\r\n"], ["20%"], ""),
        ([b"a\r\nb\r\n"], ["a", "b"], ""),
        ([b"\x00\x07\xff\n"], ["\\x00\\x07\ufffd"], ""),
        (["\u202eevil\n".encode()], ["\\u202eevil"], ""),
    ],
)
def test_lines_are_what_a_terminal_would_show_without_its_powers(
    pieces: list[bytes], lines: list[str], rest: str
):
    assert fold(*pieces) == (lines, rest)


def test_long_lines_are_cut_and_little_of_them_is_kept():
    folder = LineFolder()
    for number in range(100):
        part = LogChunk(0, 1, 0, b"x" * 100_000, Position(1, number))
        assert list(folder.fold(part)) == []
        assert len(folder._begun) <= output._BUFFER_CHARS
    (line,) = folder.fold(LogChunk(0, 1, 0, b"\n", Position(1, 101)))
    assert (
        line.text == "x" * output.LINE_CHARS + f" … {10**7 - output.LINE_CHARS:,} more characters"
    )


def test_the_last_line_of_an_attempt_is_not_glued_to_the_next_one():
    folder = LineFolder()
    assert list(folder.fold(LogChunk(0, 1, 0, b"killed he", Position(1, 9)))) == []
    lines = list(folder.fold(LogChunk(0, STDERR, 0, b"again\n", Position(2, 6))))
    assert [(line.attempt, line.is_error, line.text) for line in lines] == [
        (1, False, "killed he"),
        (2, True, "again"),
    ]


# -- charts ----------------------------------------------------------------------------------------


def series(values: list[float], name: str = "loss", steps: list[int] | None = None) -> Series:
    count = len(values)
    numbers = array("q", range(count) if steps is None else steps)
    times = array("d", range(count))
    return Series(name, 0, numbers, times, array("d", values), array("q", [1] * count))


def test_gaps_are_left_where_a_value_is_no_number():
    chart = draw_chart(series([1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0]))
    assert len(chart.lines) == 2
    assert len(chart.dots) == 1
    assert (chart.low, chart.high, chart.last) == ("1", "3", "1")
    assert (chart.first, chart.until) == ("step 0", "step 6")
    assert [words for _, words in chart.points][:2] == ["0: 1", "1: 2"]
    assert all(0 <= x <= 320 for x, _ in chart.points)


@pytest.mark.parametrize("values", [[math.nan], [5.0], [5.0, 5.0], [0.0, 0.0], [1e300, -1e300]])
def test_any_values_can_be_drawn(values: list[float]):
    chart = draw_chart(series(values))
    assert all(math.isfinite(x) for x, _ in chart.points)


def test_figures_of_a_host_are_drawn_over_time_in_their_unit():
    chart = draw_chart(series([1 << 30, 2 << 30], "host/memory_bytes", [-1, -1]))
    assert (chart.low, chart.high, chart.first, chart.until) == ("1.0 GiB", "2.0 GiB", "", "1.0s")


def test_a_million_points_become_a_few():
    chart = draw_chart(series([float(n % 1000) for n in range(100_000)]))
    assert len(chart.points) < 700
    assert chart.high == "999"
