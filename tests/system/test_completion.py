"""Tab completion in real shells, each on its own terminal; shells not installed are skipped."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import kinetic
from kinetic._config import profiles, settings
from kinetic._core import layout
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.local import LocalStore

ROOT = Path(kinetic.__file__).parent.parent
PATIENCE_S = 200.0
SHELLS = {
    "bash": (("bash", "--norc", "--noprofile", "-i"), "source <(kinetic completion bash)"),
    "zsh": (
        ("zsh", "-f", "-i"),
        "autoload -U compinit; compinit -u -D; source <(kinetic completion zsh)",
    ),
    "fish": (("fish", "--no-config", "-i"), "kinetic completion fish | source"),
}
WRITTEN = {
    "jo": "jobs",
    "jobs stat": "jobs status",
    "jobs logs job-a": "jobs logs job-a0000003",
    "jobs logs b00": "jobs logs b0000002",
    "jobs logs job-c": "jobs logs job-c0000001",
    "jobs list --state fa": "jobs list --state failed",
    "run -a tpu-v6e-25": "run -a tpu-v6e-256",
    "run -a cpu --det": "run -a cpu --detach",
    "run -a cpu train": "run -a cpu train_all.py",
    "run --output-dir work": "run --output-dir workspace",
    "--profile sta": "--profile staging",
    "profile use de": "profile use dev",
}


class Terminal:
    """A shell on a pseudo-terminal, driven by typed keys."""

    def __init__(self, argv: tuple[str, ...], cwd: Path, env: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        self._screen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Read the output until the pattern matches it; forget the output up to the match's end."""
        deadline = time.monotonic() + PATIENCE_S
        while (match := re.search(pattern, self._screen)) is None:
            ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {pattern!r} in {self._screen!r}"
            self._screen += os.read(self._fd, 65536).decode(errors="replace")
        self._screen = self._screen[match.end() :]
        return match

    def close(self) -> None:
        """Hang up, and wait until the shell has ended."""
        os.kill(self.pid, signal.SIGHUP)
        os.close(self._fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@pytest.fixture
def place(tmp_path: Path, home: Path) -> Path:
    store = LocalStore(home)
    for number, letter in ((3, "a"), (2, "b"), (1, "c")):
        ref = JobRef(
            f"job-{letter}000000{number}",
            Place("local", "gke"),
            "cpu",
            "f",
            "train",
            number,
            store.uri,
        )
        store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    profiles.change(
        settings.profiles_file(),
        lambda p: p.with_profile("dev", {"zone": "z"}).with_profile("staging", {"zone": "z"}),
    )
    (tmp_path / "train_all.py").touch()
    (tmp_path / "workspace").mkdir()
    (tmp_path / "bin").mkdir()
    programs = {
        "kinetic": f"#!{sys.executable}\nfrom kinetic.cli.main import main\nmain()\n",
        "shown": '#!/bin/sh\necho "{$*}"\n',
    }
    for name, code in programs.items():
        (tmp_path / "bin" / name).write_text(code)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_what_is_meant(shell: str, place: Path) -> None:
    argv, load = SHELLS[shell]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{shell} is not installed")
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{place}/bin:{os.environ['PATH']}",
        "TERM": "xterm",
        "HOME": str(place),
    }
    terminal = Terminal(
        argv, place, env | {"INPUTRC": os.devnull, "EDITOR": "", "VISUAL": "", "COLUMNS": "200"}
    )
    try:
        terminal.type(f"{load}; echo read''y\r")
        terminal.until("ready")
        for begun, meant in WRITTEN.items():
            terminal.type(f"kinetic {begun}\t\x01shown \r")  # Ctrl-A: go to the start.
            # zsh removes the slash after a folder's name.
            words = terminal.until(r"\{([^}]*?)/?\}")[1]
            assert words.split() == ["kinetic", *meant.split()], begun
    finally:
        terminal.close()
