"""The display in a notebook's cell: when it appears, changes and is removed."""

from __future__ import annotations

import sys

import pytest

from kinetic._client import notebook
from kinetic._client.board import drawing
from kinetic._core.outcome import Outcome, Verdict
from kinetic.errors import WaitTimeout


class Cell:
    """A notebook cell that waits for a job, with a fake clock and the displays that it shows."""

    def __init__(self):
        self.now, self.reads, self.displays, self.title = 100.0, 0, [], "train"
        self.progress = notebook.Progress(self.draw, lambda: self.now, self.displays.append)

    def draw(self, outcome):
        return notebook.draw_picture(self.read(outcome))

    def read(self, outcome):
        self.reads += 1
        state = "running" if outcome is None else str(outcome.verdict)
        return drawing.Picture(self.title, (), state, None, ("running",))

    def wait(self, seconds, step=0.1):
        for _ in range(round(seconds / step)):
            self.now += step
            self.progress()


def test_what_is_over_soon_shows_nothing():
    cell = Cell()
    cell.wait(0.4)
    cell.progress(Outcome(Verdict.SUCCEEDED))
    assert (cell.displays, cell.reads) == ([], 0)


def test_only_changes_are_shown_and_the_end():
    cell = Cell()
    cell.wait(10)
    assert len(cell.displays) == 1
    assert "train" in cell.displays[0]["text/html"]
    assert cell.displays[0]["text/plain"] == "train · running · 1 host: running"
    cell.title = "train again"
    cell.wait(1.1)
    assert len(cell.displays) == 2
    cell.progress(Outcome(Verdict.FAILED))
    assert "failed" in cell.displays[-1]["text/plain"]
    assert len(cell.displays) == 3


def test_long_waits_are_looked_at_rarely():
    cell = Cell()
    cell.wait(60)
    assert 55 <= cell.reads <= 61
    before = cell.reads
    cell.wait(600)
    assert cell.reads - before <= 121


def test_outside_a_kernel_nothing_happens(monkeypatch):
    def fail(*_):
        raise AssertionError("looked")

    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert notebook.open_display(fail, fail) is None
    assert notebook.kernel_shell() is None


def test_files_that_are_no_cells_have_no_title():
    assert notebook.cell_title(__file__) == ""


def test_a_line_that_is_only_begun_is_not_cut_in_two():
    cell = Cell()
    cell.progress.before(b"whole\n")
    assert cell.displays == []
    cell.progress.before(b"\r 10%|#")
    assert len(cell.displays) == 1, "the drawing has its place above the line"
    cell.progress.before(b"\r 20%|##")
    assert len(cell.displays) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyboardInterrupt(), "The wait was interrupted; running jobs keep running"),
        (WaitTimeout("late"), "The wait has ended"),
    ],
)
def test_a_drawing_that_nobody_updates_says_so(error, words):
    cell = Cell()
    cell.wait(1)
    with pytest.raises(type(error)), cell.progress:
        raise error
    assert words in cell.displays[-1]["text/html"]
    assert words in cell.displays[-1]["text/plain"]
    assert "running" in cell.displays[-1]["text/plain"]
    quick = Cell()
    with pytest.raises(type(error)), quick.progress:
        raise error
    assert quick.displays == []
