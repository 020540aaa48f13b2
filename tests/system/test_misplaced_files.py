"""A FIFO, a socket or a folder stands in place of a job's record: no reader hangs, and errors name
the record."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import wait_until

import kinetic
from kinetic import errors
from kinetic._store import files

PATIENCE_S = 300
READ = """
import sys
import kinetic
from kinetic import errors

def ask(what):
    try:
        print(what())
    except errors.KineticError as error:
        print(type(error).__name__)

print(len(kinetic.list_jobs()))
try:
    job = kinetic.attach(sys.argv[1])
except errors.KineticError as error:
    sys.exit(f"{type(error).__name__}: {error}")
ask(job.status)
ask(lambda: job.outcome().verdict)
ask(job.result)
ask(job.logs)
ask(job.events)
ask(job.cancel)
"""
COMMANDS = [
    ["jobs", "list"],
    ["jobs", "status"],
    ["jobs", "logs"],
    ["jobs", "logs", "-f"],
    ["jobs", "result"],
    ["doctor"],
]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    folder = Path.cwd()
    os.chdir(path.parent)  # A socket's path has at most 107 bytes.
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(folder)


def folder(path: Path) -> None:
    path.mkdir()


def zeroes(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, listening, folder, zeroes])
def test_only_regular_files_are_read(make, tmp_path):
    make(tmp_path / "it")
    with pytest.raises(IsADirectoryError):
        files.content(tmp_path / "it")


@pytest.mark.parametrize("make", [fifo, listening, zeroes])
def test_every_reader_answers(make, home):
    """Put a FIFO, socket or endless file in place of each record in turn: reading the job must
    return or fail in time. Restore the record afterwards."""

    @kinetic.run(accelerator="cpu")
    def function():
        print("printed")
        return "value"

    handle = function.run_async()
    assert handle.result() == "value"
    wait_until(lambda: not (home / f"jobs/{handle.job_id}/local/work").exists(), "it stays")
    records = [
        p for p in home.rglob("*") if p.is_file() and ("jobs" in p.parts or "refs" in p.parts)
    ]
    records.append(home / f"jobs/{handle.job_id}/local/supervisor.json")
    assert len(records) > 8
    for place in records:
        backup = home.parent / "kept"
        if place.exists():
            shutil.move(place, backup)
        make(place)
        answer = run("-c", READ, handle.job_id)
        assert answer.stdout.startswith(("0\n", "1\n")), answer.stderr
        assert "Traceback" not in answer.stderr, (place, answer.stderr)
        place.unlink()
        if backup.exists():
            shutil.move(backup, place)


@pytest.mark.parametrize("name", ["outcome.json", "attempts/1/hosts/0/log", "local/lock"])
def test_every_command_answers(name, home):
    handle = kinetic.run(accelerator="cpu")(lambda: print("value")).run_async()
    handle.wait()
    place = home / "jobs" / handle.job_id / name
    place.unlink()
    fifo(place)
    for command in COMMANDS:
        words = command if command[-1] in {"list", "doctor"} else [*command, handle.job_id]
        answer = run("-m", "kinetic", *words)
        assert answer.returncode in (0, 1, 3, 5), (words, answer)
        assert "Traceback" not in answer.stderr


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_fifo_that_the_function_makes_where_its_last_word_is_looked_for(home):
    """The function closes the channel to its agent, and puts a FIFO where the agent then looks for
    the worker's last message: the agent must not block on it."""

    @kinetic.run(accelerator="cpu")
    def function():
        scratch = os.path.dirname(os.getcwd())
        for folder in (scratch, os.path.dirname(scratch)):
            os.mkfifo(f"{folder}/end.json")
        os.closerange(3, 1 << 16)
        os._exit(3)

    with pytest.raises(errors.HostLost, match="exit code 3"):
        function()
