"""Source of notebook cells: only definitions are sent, and hosts' tracebacks show them."""

from __future__ import annotations

import linecache
import pickle
import traceback

import pytest
from laptop_fakes import plan as make_plan

from kinetic._core.plan import Cell, Plan
from kinetic._pickling import cells, results

CELL = """\
password = "hunter2"
import os

@decorate(
    "x")
def train(x):
    return 1 / x
total = train(1)
shift = lambda x: x + total
"""
FILE = "/tmp/ipykernel_77/1234.py"


def typed(name, source):
    return {name: (len(source), None, source.splitlines(keepends=True), name)}


def title(file):
    return "Cell In[3]" if file == FILE else ""


def test_only_definitions_travel_and_stay_on_their_lines():
    lines = cells.keep_definitions(CELL).splitlines()
    assert [(n, line) for n, line in enumerate(lines, 1) if line] == [
        (4, "@decorate("),
        (5, '    "x")'),
        (6, "def train(x):"),
        (7, "    return 1 / x"),
        (9, "shift = lambda x: x + total"),
    ]


@pytest.mark.parametrize("source", ["", "x = 1\n", "this is no Python\n", "a\0b", "(" * 5000])
def test_a_cell_without_definitions_stays_here(source):
    assert cells.keep_definitions(source) == ""


def test_only_cells_whose_code_is_sent_are_named():
    cache = (
        typed(FILE, CELL)
        | typed("/tmp/ipykernel_77/9.py", "def other(): pass\n")
        | {"/a/file.py": (3, 1.0, ["x\n"], "/a/file.py")}
    )
    referenced = cells.find_referenced([b"", pickle.dumps([FILE, "/a/file.py"])], title, cache)
    assert referenced == (Cell(FILE, "Cell In[3]", cells.keep_definitions(CELL)),)
    assert cells.find_referenced([b"nothing"], title, cache) == ()
    assert cells.find_referenced([b"x"], title, {}) == ()


def test_a_prompt_without_titles_is_named_by_its_file():
    name = "<python-input-0>"
    (cell,) = cells.find_referenced([pickle.dumps(name)], title, typed(name, "def f(): pass\n"))
    assert cell.title == name


def test_code_made_of_a_cell_leads_to_it(monkeypatch):
    space = {"decorate": lambda _: lambda f: f, "__name__": "__main__"}
    exec(compile(CELL, FILE, "exec"), space)
    monkeypatch.setitem(linecache.cache, FILE, typed(FILE, CELL)[FILE])
    (cell,) = cells.find_referenced([results.pack_value(space["train"])], title)
    assert cell.file == FILE


def test_a_function_that_comes_back_leads_to_its_file():
    space = {"__name__": "__main__"}
    exec(compile("def train(): return lambda: 1", FILE, "exec"), space)
    train = results.unpack_value(results.pack_value(space["train"]))
    assert [train.__code__.co_filename, train().__code__.co_filename] == [FILE, FILE]


def test_a_traceback_shows_the_lines_under_the_cells_title(monkeypatch):
    monkeypatch.delitem(linecache.cache, FILE, raising=False)
    sent = [vars(Cell(FILE, "Cell In[3]", cells.keep_definitions(CELL)))]
    cells.cache_lines(sent)
    space = {"decorate": lambda _: lambda f: f}
    exec(compile(CELL, FILE, "exec"), space)
    with pytest.raises(ZeroDivisionError) as caught:
        space["train"](0)
    text = cells.title_cells("".join(traceback.format_exception(caught.value)), sent)
    monkeypatch.delitem(linecache.cache, FILE)
    assert "  Cell In[3], line 7, in train\n    return 1 / x\n" in text
    assert FILE not in text


def test_cells_rest_in_the_plan():
    plan = make_plan(cells=(Cell(FILE, "Cell In[3]", "def f(): pass\n"),))
    assert Plan.from_json(plan.to_json()) == plan
    older = plan.to_json()
    del older["cells"]
    assert Plan.from_json(older).cells == ()
