"""A runner for programs with mistakes, for the tests of kinetic's errors about bad input."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PATIENCE_S = 200.0


def run(project: Path, program: str, **how) -> subprocess.CompletedProcess[str]:
    (project / "program.py").write_text(textwrap.dedent(program))
    command = [*how.pop("before", ()), sys.executable, "program.py"]
    return subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=PATIENCE_S, **how
    )


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.lstat().st_mode) for p in folder.rglob("*"))
