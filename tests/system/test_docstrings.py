"""Run the examples of docstrings as scripts, with the local backend.

`LINES` completes an example that uses a function, a job or a batch without making it. Examples of
what functions call in a job run in a job. One that follows `<!-- not run: reason -->`, as on the
pages of docs/, is only compiled, and its names and arguments of kinetic are checked.
"""

from __future__ import annotations

import ast
import asyncio
import dis
import inspect
import runpy
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_docs import ROOT, Block, blocks

import kinetic
from kinetic._dashboard import start

PACKAGE = ROOT / "kinetic"
TRAIN = """
@kinetic.run("cpu")
def train(lr):
    kinetic.log(step=0, loss=lr)
    return lr
"""
LINES = {
    "train": TRAIN,
    "job": "job = train.run_async(0.1)\njob.wait()",
    "batch": "batch = train.run_async_map([0.1, 0.2])",
    "os": "import os",
    "json": "import json",
    "plt": "from types import SimpleNamespace\nplt = SimpleNamespace(plot=print)",
}
"""Lines that define a name. A line may use the names before it."""
IDS = {'"job-1a2b3c4d"': "job.job_id", '"grp-1a2b3c4d"': "batch.group_id"}
STATE = "step, loss, state = 1, 0.5, {'step': 0}\nsave, train_step = print, dict\n"
"""Variables of a function that trains."""
SLICES = {"make_mesh": '"tpu-v6e-16", slices=2, controller="single"'}
"""Options of jobs that need more than a processor, by the name that the example explains."""


@dataclass(frozen=True)
class Example:
    """An example of a public name.

    Attributes:
        name: The name, such as "JobHandle.logs".
        block: Its code.
        in_job: True if a function of a job calls the name.
    """

    name: str
    block: Block
    in_job: bool


def find_examples() -> Iterator[Example]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "```python" in text:
            yield from _find_in(ast.parse(text), "", "_in_job" in path.parts)


def _find_in(parent: ast.AST, prefix: str, in_job: bool) -> Iterator[Example]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            section = (ast.get_docstring(node) or "").partition("\nExample:\n")[2]
            for block in blocks(textwrap.dedent(section)):
                yield Example(name, block, in_job)
            yield from _find_in(node, f"{name}.", in_job)


EXAMPLES = list(find_examples())


def make_script(example: Example) -> str:
    text = example.block.text
    if example.in_job:
        options = SLICES.get(example.name, '"cpu"')
        body = textwrap.indent(STATE + text, "    ")
        return f"import kinetic\n\n@kinetic.run({options})\ndef function():\n{body}\nfunction()\n"
    for shown, real in IDS.items():
        text = text.replace(shown, real)
    for name, line in reversed(LINES.items()):
        if name in find_missing(compile_script(text)):
            text = f"{line}\n{text}"
    return f"import kinetic\n{text}"


def compile_script(text: str, file: str = "example.py") -> CodeType:
    return compile(text, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def find_missing(code: CodeType) -> set[str]:
    """Return the names that a script reads before it defines them."""
    first: dict[str, str] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL", "STORE_NAME"):
            first.setdefault(step.argval, step.opname)
        if isinstance(step.argval, CodeType):
            first = dict.fromkeys(find_missing(step.argval), "LOAD_NAME") | first
    return {name for name, opname in first.items() if opname != "STORE_NAME"}


def names(examples: list[Example]) -> list[Any]:
    return [pytest.param(example, id=example.name) for example in examples]


@pytest.mark.parametrize("example", names([e for e in EXAMPLES if not e.block.mark]))
def test_an_example_runs(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()  # makes the folder a project of its own
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINETIC_BACKEND", "local")
    monkeypatch.setattr(start, "_servers", {})
    script = tmp_path / "example.py"
    script.write_text(make_script(example))
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    try:
        waiting = eval(compile_script(script.read_text(), str(script)), main.__dict__)
        if inspect.iscoroutine(waiting):
            asyncio.run(waiting)
    finally:
        for server in start._servers.values():
            server.close()


@pytest.mark.parametrize("example", names([e for e in EXAMPLES if e.block.mark]))
def test_an_example_that_is_not_run_uses_names_and_arguments_that_exist(example: Example) -> None:
    assert example.block.why
    for node in ast.walk(ast.parse(example.block.text)):
        called = resolve(node.func) if isinstance(node, ast.Call) else resolve(node)
        if isinstance(node, ast.Call) and called is not None:
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(called).bind_partial(*node.args, **given)


def resolve(node: ast.AST) -> Any:
    """Return the object of kinetic that an expression names; None for all else."""
    if isinstance(node, ast.Name):
        objects = {"kinetic": kinetic, "slice": kinetic.compile_for("tpu-v6e-16")}
        return objects.get(node.id, kinetic.CompileReport if node.id == "report" else None)
    if not isinstance(node, ast.Attribute) or (owner := resolve(node.value)) is None:
        return None
    return callbacks() if (owner, node.attr) == (kinetic, "keras") else getattr(owner, node.attr)


def callbacks() -> SimpleNamespace:
    """Return the names of `kinetic.keras`, made without Keras, which takes seconds to import."""
    file = PACKAGE / "_in_job/checkpoint/callback.py"
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(callbacks=SimpleNamespace(Callback=object))
        patch.setitem(sys.modules, "keras", stand_in)  # type: ignore[arg-type]
        made = runpy.run_path(str(file))
    return SimpleNamespace(Checkpointer=made["KerasCheckpointer"], Metrics=made["KerasMetrics"])


def test_examples_of_all_kinds_are_found() -> None:
    by_name = {example.name: example for example in EXAMPLES}
    assert {"run", "JobHandle", "JobHandle.logs", "attempt", "KerasMetrics"} <= by_name.keys()
    assert by_name["attempt"].in_job
    assert len([e for e in EXAMPLES if e.block.mark]) * 4 <= len(EXAMPLES)


def test_what_an_example_lacks_is_completed_and_nothing_else() -> None:
    missing = find_missing(compile_script("job = train()\nfor batch in job.x(): print(batch)"))
    assert missing & LINES.keys() == {"train"}
    assert find_missing(compile_script("def f(): return os.x")) == {"os"}
    attached = make_script(
        Example("attach", blocks('```python\nattach("job-1a2b3c4d")\n```\n')[0], False)
    )
    assert (
        attached.index("def train") < attached.index("job = train") < attached.index("(job.job_id)")
    )
