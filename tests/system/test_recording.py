"""The picture of a terminal session in the README shows what its script really prints.

The README's `train.py` is run, and its output compared with `docs/assets/session.svg`, apart from
ids, durations and folders, which differ from run to run. KINETIC_REGENERATE_GOLDEN=1 writes the
picture.
"""

from __future__ import annotations

import html
import inspect
import io
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from test_docs import DOCS, ROOT, blocks

# Read the variable at import: the fixtures hide it from tests.
REGENERATES = os.environ.get("KINETIC_REGENERATE_GOLDEN") == "1"
PICTURE = DOCS / "assets/session.svg"
COMMANDS = ["python train.py", "kinetic jobs list", "kinetic logs --last --host 3"]
COLUMNS = 88
JOBS = ["job-31c4e09a", "job-98b70d57"]
"""The job ids in the picture, in the order in which the jobs were submitted."""
ROW_END = re.compile(r" +\d[\d.]*s +\d+s$", re.MULTILINE)
TRIES = 3  # On a busy machine, a line about a late host may come.

pytestmark = [pytest.mark.timeout(600)]


def run_on_terminal(command: str, folder: Path) -> str:
    """Run a shell command on a pseudo-terminal; return its output."""
    pid, terminal = pty.fork()
    if pid == 0:
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        settings = {"PYTHONPATH": str(ROOT), "PATH": paths, "PYTHON_COLORS": "0"}
        settings |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        os.chdir(folder)
        os.execve("/bin/sh", ["sh", "-c", command], os.environ | settings)
    output = b""
    try:
        while piece := os.read(terminal, 65536):
            output += piece
    except OSError:  # EIO marks the end of a terminal's output on Linux.
        pass
    os.close(terminal)
    os.waitpid(pid, 0)
    return output.decode().replace("\r\n", "\n")


def normalize(session: str, folder: Path) -> str:
    """Replace ids, durations and folders by fixed ones, because they differ from run to run."""
    newest_first = list(dict.fromkeys(re.findall(r"^(job-\w{8})", session, re.MULTILINE)))
    for job, name in zip(reversed(newest_first), JOBS, strict=True):
        session = session.replace(job, name)
    times = iter(["  0.7s   1s", "  0.9s   3s"])
    session = ROW_END.sub(lambda _: next(times), session)
    session = re.sub(r"\[1m *(TIME|AGE) *\x1b", r"[1m\1" + "\x1b", session)
    return session.replace(str(folder), "/home/me")


def draw(session: str) -> str:
    """Render the session as an SVG that uses installed fonts only."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="256"
    )
    console.print(Text.from_ansi(session.rstrip()), soft_wrap=True)
    usual = inspect.signature(Console.export_svg).parameters["code_format"].default
    form = re.sub(r"@font-face {{.*?}}", "", usual, flags=re.DOTALL)
    svg = console.export_svg(title="4 hosts, simulated", code_format=form, unique_id="session")
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def read(svg: str) -> list[str]:
    """Return the words in the picture; its markup depends on the version of rich."""
    return html.unescape(" ".join(re.findall(r">([^<>]*)</text>", svg))).split()


def record(folder: Path) -> str:
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    [script] = [b for b in blocks((ROOT / "README.md").read_text()) if b.title == "train.py"]
    (folder / "train.py").write_text(script.text)
    output = [
        f"\x1b[1m$ {command}\x1b[0m\n" + run_on_terminal(command, folder) for command in COMMANDS
    ]
    return draw(normalize("".join(output), folder))


def test_the_session_in_the_readme_is_what_its_script_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(TRIES):
        monkeypatch.setenv("KINETIC_HOME", str(tmp_path / f"home-{number}"))
        recorded = record(tmp_path / f"project-{number}")
        if REGENERATES:
            PICTURE.write_text(recorded)
        if read(recorded) == read(PICTURE.read_text()):
            return
    assert read(recorded) == read(PICTURE.read_text()), (
        "to write the picture again: KINETIC_REGENERATE_GOLDEN=1"
    )
