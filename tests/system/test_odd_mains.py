"""Scripts that start in unusual ways (`-m`, stdin, spawn …), or whose file has changed since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300)]

SCRIPT = """
import dataclasses, jax, kinetic

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: int

@kinetic.run(accelerator="cpu")
def job(point):
    assert type(point) is Point
    assert jax.tree.leaves((point, Point(5))) == [1, 5]
    return Point(point.x + 1)
"""
CALL = """
got = job(Point(1))
print("got:", type(got) is Point, got.x)
"""
SPAWN = """
import multiprocessing

def child(answers):
    got = job(Point(1))
    answers.put((type(got) is Point, got.x))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    process.join()
    print("got:", *(answers.get() if process.exitcode == 0 else ()))
"""


@pytest.mark.parametrize(
    ("how", "main"),
    [
        (["-m", "cProfile", "-o", "/dev/null", "main.py"], SCRIPT + CALL),
        (["-c", SCRIPT + CALL], ""),
        (
            [
                "-c",
                "exec(compile(open('main.py').read(), 'main.py', 'exec'), {'__name__': "
                "'__main__'})",
            ],
            SCRIPT + CALL,
        ),
        (["-c", "import runpy; runpy.run_module('main', run_name='__main__')"], SCRIPT + CALL),
        (["main.py"], SCRIPT + SPAWN),
        (
            ["main.py"],
            SCRIPT
            + "text = open(__file__).read()\nopen(__file__, 'w').write('# edited\\n' * 5 + text)\n"
            + CALL,
        ),
        (["main.py"], SCRIPT + "import os\nos.remove(__file__)\n" + CALL),
    ],
    ids=["profiled", "command", "executed", "run-module", "spawned", "edited", "removed"],
)
def test_classes_of_the_script_are_registered(how: list[str], main: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(main)
    done = subprocess.run(
        [sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "got: True 2\n", done.stdout + done.stderr
