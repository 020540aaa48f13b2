"""Programs that are forked from one process with imported libraries, so that imports run once: for
tests that end or kill many programs in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SERVER = """
import json, os, sys
exec(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    if isinstance(request, int):
        print(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]), flush=True)
    elif child := os.fork():
        print(child, flush=True)
    else:
        break
else:
    sys.exit()
program, argv, cwd, env, out, err = request
sys.argv[1:] = argv
os.chdir(cwd)
os.environ.clear()
os.environ |= env
for path, stream in ((out, 1), (err, 2)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
exec(program)
"""


class Forks:
    """A process that has imported modules, and forks programs with the environment of the test."""

    def __init__(self, imports: str, **env: str):
        self._env = env
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, imports],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, program: str, folder: Path, *argv: str, cwd: Path | None = None) -> int:
        """Fork a process that runs a program's text and prints to the files "out" and "err" of the
        folder; return its process id."""
        streams = [str(folder / name) for name in ("out", "err")]
        for stream in streams:
            Path(stream).write_text("")
        request = [program, argv, str(cwd or Path.cwd()), os.environ | self._env, *streams]
        self._last = self._ask(request)
        return self._last

    def wait(self, pid: int = 0) -> int:
        """Wait for a program, by default the last one, and return its exit code."""
        return self._ask(pid or self._last)

    def _ask(self, request: list[object] | int) -> int:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())
