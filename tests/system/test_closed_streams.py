"""Callers whose standard streams are closed, in every combination, or cannot encode all characters:
values arrive, and commands do their work."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

CLOSED = [closed for number in (1, 2, 3) for closed in itertools.combinations((0, 1, 2), number)]

CALLER = """
import os, sys
import kinetic

@kinetic.run(accelerator=sys.argv[1], joins_jax=False)  # nor imports it, which takes longest
def add(x):
    print("printed")
    return x + 1

with open("told", "w") as told:
    try:
        print(add(1), add.run_async(2).result(), file=told)
    except BaseException as error:
        print(repr(error), file=told)
"""


def run(folder, closed, *words):
    closing = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    opened = {
        name: subprocess.DEVNULL
        for fd, name in enumerate(("stdin", "stdout", "stderr"))
        if fd not in closed
    }
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, *words], cwd=folder, **opened
    ).returncode


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
def test_a_call_works_with_closed_standard_streams(closed, accelerator, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(CALLER)
    assert run(tmp_path, closed, "main.py", accelerator) == 0
    assert (tmp_path / "told").read_text() == "2 3\n"


@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_works_with_closed_standard_streams(closed, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(
        "print(1)\nopen(__import__('sys').argv[1], 'w').write('told')"
    )
    assert (
        run(
            tmp_path, closed, "-m", "kinetic", "run", "-a", "cpu", "main.py", str(tmp_path / "told")
        )
        == 0
    )
    assert (tmp_path / "told").read_text() == "told"
    assert run(tmp_path, closed, "-m", "kinetic", "jobs", "list") == 0
    assert run(tmp_path, closed, "-m", "kinetic", "jobs", "status", "job-none") == 3


@pytest.mark.parametrize("words", [["config"], ["config", "--json"]])
def test_letters_that_stdout_cannot_encode_are_escaped(words, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("KINETIC_QUEUE", "größe")
    kinetic = "import sys; from kinetic.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", kinetic, *words], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in words:
        assert "größe" in str(json.loads(done.stdout))
    else:
        assert rb"gr\xf6\xdfe" in done.stdout


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("ascii", rb"gr\xf6\xdf" + b"e \xff"), ("utf-8", "größe ".encode() + b"\xff")],
)
def test_in_the_c_locale_bytes_of_file_names_are_printed_as_they_are(
    encoding, expected, monkeypatch
):
    monkeypatch.setenv("PYTHONIOENCODING", f"{encoding}:surrogateescape")
    code = r"from kinetic._system import streams; streams.escape(); print('gr\xf6\xdfe \udcff')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (expected, b"")


CLOSES = """
import os
import kinetic

@kinetic.run(accelerator="cpu", joins_jax=False)
def add(x):
    return x + 1

answers = [add(1)]
os.closerange(3, 1 << 10)
opened = [open("held", "a+") for _ in range(40)]
answers += [add(2), add(3)]
print(*answers, all(os.fstat(file.fileno()).st_size == 0 for file in opened))
"""


def test_calls_after_the_program_has_closed_all_descriptors(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(CLOSES)
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2 3 4 True\n", done.stderr
    assert "Traceback" not in done.stderr
