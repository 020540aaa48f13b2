"""`kinetic session` by the console script: start, a call, the list, a refused stop, a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gangs import PATIENCE_S

import kinetic

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
ENV = {"PYTHONPATH": str(ROOT)}


def kn(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KINETIC, *argv],
        cwd=folder,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def status(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(kn(folder, "session", "status", "dev", "--json").stdout)
    return document


def test_a_session_is_held_used_and_stopped_from_a_terminal(tmp_path: Path) -> None:
    """A session runs programs of several commands. Stopping it while one runs needs --force."""
    (tmp_path / "where.py").write_text("import os\nprint(os.environ['KINETIC_JOB_ID'])\n")
    started = kn(tmp_path, "session", "start", "cpu:2", "--name", "dev", "--idle-timeout", "5m")
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith(
        "The session dev holds cpu:2; it ends after 5 min without a call"
    )
    assert "still holds" not in started.stderr
    try:
        _use(tmp_path)
    finally:
        stopped = kn(tmp_path, "session", "stop", "dev", "--force")
    assert stopped.stdout.startswith("The session dev has ended")
    assert stopped.returncode == 0
    assert status(tmp_path)["state"] == "CANCELLED"
    ended = kn(tmp_path, "run", "--session", "dev", "--", "true")
    assert ended.returncode == 4
    assert "kinetic session start cpu:2 --name dev" in ended.stderr


def _use(folder: Path) -> None:
    session_id = status(folder)["job_id"]
    script = kn(folder, "run", "--session", "dev", "where.py")
    assert (script.returncode, script.stdout.startswith("job-")) == (0, True), script.stderr
    assert script.stdout.strip() != session_id
    sleeper = kn(folder, "run", "--session", "dev", "--detach", "--", "sleep", "600").stdout.strip()
    until = time.monotonic() + PATIENCE_S
    while status(folder)["calls"] != [sleeper] and time.monotonic() < until:
        time.sleep(0.1)
    head, row = kn(folder, "session", "list").stdout.splitlines()
    assert head.split()[0] == "NAME"
    assert row.split()[:3] == ["dev", "cpu:2", "RUNNING"]
    assert row.endswith("2, 1 running")
    refused = kn(folder, "session", "stop", "dev")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert f"The session dev runs {sleeper}" in refused.stderr
    assert status(folder)["state"] == "RUNNING"


def test_a_script_that_ends_names_the_session_that_it_has_started(tmp_path: Path) -> None:
    """The line comes at exit from the process that started the session, and from no other."""
    (tmp_path / "hold.py").write_text(
        "import sys, kinetic\n"
        "with kinetic.session('cpu:2', name='dev') as session: session.wait_until_ready()\n"
        "if sys.argv[1:]: session.stop()\n"
    )
    line = (
        "kinetic: the session dev still holds cpu:2; it ends after 30 min without a call. kinetic "
        "session stop dev ends it now."
    )
    for words, says in (((), True), ((), False), (("stop",), False), (("stop",), False)):
        done = subprocess.run(
            [sys.executable, "hold.py", *words],
            cwd=tmp_path,
            env=os.environ | ENV,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert (line in done.stderr.splitlines()) == says, done.stderr
        if words:
            kn(tmp_path, "jobs", "wait", "--last")
