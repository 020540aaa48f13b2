"""`kinetic jobs logs` from argv to exit code, over a real local store and a fake backend."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fakes import ROOT, Capture, World, chunk

from kinetic._backends.base import LogRequest
from kinetic._core import layout
from kinetic._core.log_format import STDERR, Position


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def test_logs_are_the_bytes_that_were_printed(
    world: World, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    world.job("job-00000001")
    odd = b"\x00\xff[rank0] [/tmp/x] arr[i] \x1b[31m\r\n" + b"x" * 500 + b"\nno end"
    world.backend.output["job-00000001"] = [chunk(odd[:7]), None, chunk(odd[7:], stream=STDERR)]
    assert world("jobs", "logs", "job-0") == 0
    assert capfdbinary.readouterr() == (odd, b"")


def test_logs_pass_on_what_was_asked_for(world: World) -> None:
    world.job("job-00000001", hosts=4)
    world("jobs", "logs", "job-0")
    world("jobs", "logs", "job-0", "-n", "5", "--host", "3")
    world("jobs", "logs", "job-0", "--host", "3", "--host", "1", "--host", "3")
    world("jobs", "logs", "job-0", "--all-hosts")
    world("jobs", "logs", "job-0", "--attempt", "1")
    assert world.backend.requests == [
        LogRequest((0,), False, None),
        LogRequest((3,), False, 5),
        LogRequest((3, 1), False, None),
        LogRequest(None, False, None),
        LogRequest((0,), False, None, attempt=1),
    ]
    assert world("jobs", "logs", "job-0", "--host", "4") == 2
    assert world("jobs", "logs", "job-0", "--attempt", "2") == 2
    assert world("jobs", "logs", "job-0", "-n", "-1") == 2


def test_a_log_without_a_line_is_told_apart_from_no_log(world: World, capfd: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = []
    assert world("jobs", "logs", "job-0") == 0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        "job-00000001 has no output yet. `kinetic jobs status job-00000001` shows its state.\n",
    )
    assert world("jobs", "logs", "-n", "0", "job-0") == 0
    assert capfd.readouterr().err == ""
    world.succeed("job-00000001")
    assert world("jobs", "logs", "job-0") == 0
    assert "job-00000001 has no output. `kinetic" in capfd.readouterr().err


def test_logs_of_all_hosts_name_the_host(world: World, capfd: Capture) -> None:
    world.job("job-00000001", hosts=2)
    world.backend.output["job-00000001"] = [chunk(b"a\nb\n"), chunk(b"c", 1)]
    assert world("jobs", "logs", "job-0", "--all-hosts") == 0
    assert capfd.readouterr().out == "[host 0] a\n[host 0] b\n[host 1] c\n"
    assert world("jobs", "logs", "job-0", "--timestamps") == 0
    assert capfd.readouterr().out == "2001-09-09T01:46:40.000Z a\n2001-09-09T01:46:40.000Z b\n"


def test_logs_always_begin_at_the_beginning_also_when_that_is_asked_for(
    world: World, capfd: Capture
) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [chunk(b"one\n")]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert world("jobs", "logs", "--follow", "--no-resume", "job-00000001") == 0
    assert capfd.readouterr().out == "one\n"


def test_following_ends_with_the_job(world: World, capfd: Capture) -> None:
    world.job("job-00000001")
    world.backend.output["job-00000001"] = [None, chunk(b"a\n"), None]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert world("jobs", "logs", "-f", "job-0") == 0
    assert capfd.readouterr().out == "a\n"
    begin, rest = world.backend.requests
    assert begin == LogRequest((0,), True, None)
    assert rest == replace(begin, after={0: Position(1, 2)}), "what is left after the verdict"


@pytest.mark.starts_processes
def test_a_reader_that_goes_away_is_no_error(world: World) -> None:
    """`kinetic jobs logs ID | head -1` exits with 0 and prints no error."""
    ref = world.job("job-00000001")
    big = b"line\n" * 100_000
    world.store.put(layout.JobKeys(ref.job_id).outcome, b"{}")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from cli_fakes import World, chunk; "
        "from pathlib import Path\n"
        "world = World(Path(sys.argv[2])); world.backend.output['job-00000001'] = "
        "[chunk(b'line\\n' * 100_000)] * 3\n"
        "sys.exit(world('jobs', 'logs', 'job-0'))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), world.store.uri]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == big[:5]
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
