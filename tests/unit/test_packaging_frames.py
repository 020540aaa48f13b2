"""Rebuilt tracebacks look like the originals in terminals, notebooks and debuggers."""

from __future__ import annotations

import linecache
import sys
import traceback

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kinetic._pickling import exceptions

POSITIONS = st.integers(0, 3000)


def taken_apart(error):
    links, at = [], error.__traceback__
    while at is not None:
        links.append(exceptions.describe_frame(at, at.tb_frame.f_code.co_filename))
        at = at.tb_next
    return links


def several_lines(x):
    return [
        (1 + (2 / y))  # Python prints its ^^^ below the division.
        for y in (x,)
    ]


def test_what_is_printed_is_the_same_to_the_last_mark():
    with pytest.raises(ZeroDivisionError) as caught:
        several_lines(0)
    error = caught.value
    before = "".join(traceback.format_exception(error))
    rebuilt = "".join(
        traceback.format_exception(
            error.with_traceback(exceptions.make_traceback(taken_apart(error)))
        )
    )
    assert rebuilt == before
    assert sys.version_info < (3, 11) or "~~^~~" in rebuilt


@given(
    first=st.integers(1, 10**6),
    below=st.integers(-50, 10**5),
    end=POSITIONS,
    start=POSITIONS,
    stop=POSITIONS,
)
def test_any_position_comes_back(first, below, end, start, stop):
    assume(end or start <= stop)
    line = max(first + below, 1)
    frame = ("/no/such/file.py", "train", line, first, line + end, start, stop)
    rebuilt = exceptions.make_traceback([frame])
    assert rebuilt.tb_lineno == line
    assert exceptions.describe_frame(rebuilt, "/no/such/file.py") == frame


def test_no_frames_make_no_traceback():
    assert exceptions.make_traceback([]) is None


def test_source_that_is_no_file_is_shown(monkeypatch):
    text = ["def train():\n", "    return missing\n"]
    monkeypatch.setitem(linecache.cache, "<cell 1>", (30, None, text, "<cell 1>"))
    rebuilt = exceptions.make_traceback([("<cell 1>", "train", 2, 1, 2, 11, 18)])
    shown_text = "".join(traceback.format_tb(rebuilt))
    assert "    return missing\n           ^^^^^^^\n" in shown_text
