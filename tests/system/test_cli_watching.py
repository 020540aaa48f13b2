"""Watching and cleaning up on real processes: `kinetic jobs top` on a terminal, and `kinetic
doctor` after a process was killed."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from gangs import PATIENCE_S

import kinetic
from kinetic._core import layout
from kinetic._store.local import LocalStore

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
LINE = "echo 'step 1'; while :; do sleep 0.05; done"


def kn(*argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*KINETIC, *argv], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


def until(done: str, job: str) -> dict[str, object]:
    """Wait until the last line of host 0 is `done`; return the host's entry in `jobs top`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = json.loads(kn("jobs", "top", "--json", job).stdout)
        if rows and rows[0]["members"] and rows[0]["members"][0]["last_line"] == done:
            return dict(rows[0]["members"][0])
        time.sleep(0.2)
    raise AssertionError(f"{job} has not printed {done!r}")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return kn("run", "-a", "cpu", "--detach", "--", "sh", "-c", LINE).stdout.strip()


def read(terminal: int, word: bytes) -> bytes:
    output, deadline = b"", time.monotonic() + PATIENCE_S
    while word not in output and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            output += os.read(terminal, 65536)
    return output


def run_on_terminal(kind: str) -> tuple[int, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": kind, "COLUMNS": "100"}
        os.execve(KINETIC[0], [*KINETIC, "jobs", "top"], env)
    return pid, terminal


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_top_shows_a_job_and_leaves_quietly(job: str, key: bytes) -> None:
    host = until("step 1", job)
    assert host["state"] == "running"
    assert int(str(host["rss_bytes"])) > 0
    pid, terminal = run_on_terminal("xterm")
    assert b"step 1" in read(terminal, b"step 1")
    os.write(terminal, key)
    after = read(terminal, b"\x1b[?1049l")  # leave the alternate screen
    assert b"\x1b[?1049l" in after
    assert b"Traceback" not in after
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    pid, terminal = run_on_terminal("dumb")
    assert b"step 1" in read(terminal, b"step 1"), "once, and it ends"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert kn("jobs", "cancel", job).returncode == 0
    assert kn("jobs", "wait", job).returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_top_gives_the_terminal_back_when_it_is_ended(job: str, signum: int) -> None:
    until("step 1", job)
    pid, terminal = run_on_terminal("xterm")
    before = termios.tcgetattr(terminal)[3]
    read(terminal, b"step 1")
    assert termios.tcgetattr(terminal)[3] & before & termios.ECHO == 0
    os.kill(pid, signum)
    assert b"\x1b[?1049l" in read(terminal, b"\x1b[?1049l")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signum
    assert termios.tcgetattr(terminal)[3] & termios.ECHO
    os.close(terminal)
    assert kn("jobs", "cancel", job).returncode == 0


@pytest.mark.long
def test_a_job_whose_supervisor_was_killed_is_found_and_judged(job: str, home: Path) -> None:
    until("step 1", job)
    store = LocalStore(home)
    record = json.loads(store.get(f"{layout.JobKeys(job).prefix}/local/supervisor.json"))
    os.kill(record["pid"], signal.SIGKILL)
    ref = json.loads(store.get(layout.JobKeys(job).ref))
    store.put(layout.JobKeys(job).ref, json.dumps(ref | {"created_at": time.time() - 120}).encode())
    deadline = time.monotonic() + PATIENCE_S
    while (levels := checks())["orphans"] is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert levels["orphans"] == "warn"
    assert json.loads(kn("jobs", "status", "--json", job).stdout)["state"] == "FAILED"
    assert checks()["orphans"] is None


def checks() -> dict[str, str | None]:
    done = kn("doctor", "--json")
    levels = {f["check"]: f["level"] for f in json.loads(done.stdout)["findings"]}
    return {name: levels.get(name) for name in ("orphans", "zygote")}
