"""What tests of payloads pickle."""

from __future__ import annotations

import subprocess
import sys
import threading


def double(x):
    return 2 * x


def in_main(source: str) -> dict:
    """Run source as if it were a script: its functions and classes are pickled by value."""
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(source, space)
    return space


def elsewhere(code: str, data: bytes) -> str:
    """Run code in a fresh process that cannot import this project's modules; `data` is at hand."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; data = sys.stdin.buffer.read()\n" + code],
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


LOCK = threading.Lock()
