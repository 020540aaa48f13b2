"""The display in a notebook's cell: when it appears, changes and is removed."""

from __future__ import annotations

import json
import sys

import pytest

from kinetic._client import notebook
from kinetic._client.board import drawing
from kinetic._config import settings
from kinetic._core import layout
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore
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


@pytest.fixture
def session_dev(home):
    """A store that knows a session dev."""
    ref = JobRef("job-0000005e", Place("local"), "cpu", "f", "session dev", 1.0, str(home))
    store = LocalStore(home)
    store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    store.put(layout.session("dev"), b'{"job_id": "job-0000005e"}')
    yield
    settings.choose_session(None)


def test_the_magic_selects_a_session_for_later_calls(session_dev, capsys, monkeypatch):
    """`off` goes back to the session that the environment names."""
    pytest.importorskip("IPython")
    notebook.kinetic_magic("session dev")
    assert settings.load(flags={"session": None}).session == "dev"
    assert settings.load(flags={"session": "big"}).session == "big"
    notebook.kinetic_magic("session off")
    assert settings.load().session is None
    monkeypatch.setenv("KINETIC_SESSION", "big")
    notebook.kinetic_magic("session")
    assert capsys.readouterr().err.splitlines() == [
        "kinetic: calls run on the session dev.",
        "kinetic: no session is in use, so each call gets its own machines.",
        "kinetic: calls run on the session big (from environment KINETIC_SESSION).",
    ]


@pytest.mark.parametrize("line", ["", "session nope", "session dev now", "sesion dev"])
def test_a_magic_that_cannot_work_changes_nothing(session_dev, line):
    """A wrong command, and a session that does not exist, are IPython's errors of usage."""
    error = pytest.importorskip("IPython.core.error").UsageError
    with pytest.raises(error, match=r"kinetic[. ]session"):
        notebook.kinetic_magic(line)
    assert settings.load().session is None
