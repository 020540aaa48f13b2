"""`kinetic run` over fake backends, the command `kinetic` itself, and errors of commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cli_fakes import NOW, ROOT, Capture, World, chunk, run

import kinetic
from kinetic._core.exits import Exit
from kinetic._core.log_format import STDERR
from kinetic._core.outcome import HostReport
from kinetic._core.state import JobStatus
from kinetic.cli.context import AppContext
from kinetic.cli.root import call, root
from kinetic.errors import HostLost


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def test_run_passes_its_options_on(world: World, capsys: Capture, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = [
        "--env",
        "A=1=2",
        "--env",
        "B=",
        "--secret",
        "HF_TOKEN",
        "--timeout",
        "2h",
        "--start-timeout",
        "30s",
    ]
    more = [
        "--slices",
        "1",
        "--hang-timeout",
        "5m",
        "--retries",
        "2",
        "--name",
        "exp 1",
        "--output-dir",
        "out",
        "--backend",
        "local",
        "--queue",
        "team",
        "--priority",
        "high",
        "--memory",
        "16Gi",
        "--privileged",
        "-d",
    ]
    assert run(world, *options, *more, str(script), "--env", "C=3") == 0
    assert capsys.readouterr().out == "job-00000001\n"
    function, passed = world.submitted[0]
    assert passed == {
        "accelerator": "tpu-v6e-8",
        "slices": 1,
        "controller": "multi",
        "env": {"A": "1=2", "B": ""},
        "secrets": ["HF_TOKEN"],
        "timeout": 7200.0,
        "start_timeout": 30.0,
        "hang_timeout": 300.0,
        "retries": 2,
        "name": "exp 1",
        "output_dir": "out",
        "backend": "local",
        "queue": "team",
        "priority": "high",
        "reservation": None,
        "local_storage": None,
        "network_devices": None,
        "service_account": None,
        "cpu": None,
        "memory": "16Gi",
        "shm": None,
        "privileged": True,
        "pathways_flags": {},
        "joins_jax": "lazy",
        "compile_check": False,
        "budget": None,
        "max_failures": None,
        "slice_timeout": None,
        "start_wait": None,
        "on_slice_loss": None,
        "session": None,
        "keep": None,
    }
    assert function.__name__ == "train.py"


def test_run_prints_what_the_leader_prints_where_it_printed_it(
    world: World, capfd: Capture
) -> None:
    world.backend.output["job-00000001"] = [
        chunk(b"out\n"),
        chunk(b"err\n", stream=STDERR),
        chunk(b"other\n", 1),
        None,
    ]
    world.backend.at_end = lambda: world.succeed("job-00000001")
    assert run(world, "--", "ls") == 0
    assert capfd.readouterr() == ("out\n", "err\n")
    assert run(world, "--all-hosts", "--", "ls") == 0
    assert capfd.readouterr() == ("[host 0] out\n[host 1] other\n", "[host 0] err\n")
    assert world.submitted[0][1]["joins_jax"] == "program"


def test_run_ends_with_the_code_of_the_program(world: World, capfd: Capture) -> None:
    exited = HostReport(1, Exit.SYS_EXIT, exit_code=42, detail="The function called sys.exit(42).")
    world.backend.at_end = lambda: world.fail("job-00000001", exited)
    assert run(world, "--", "make", "all") == 42
    out, err = capfd.readouterr()
    assert (out, err) == ("", "error: make exited with code 42 on host 1 of 2 (job-00000001).\n")
    world.backend.at_end = lambda: world.fail(
        "job-00000001", HostReport(1, Exit.SIGNAL, signal=9, detail="Killed by SIGKILL.")
    )
    assert run(world, "--", "make") == 137
    assert "SIGKILL" in capfd.readouterr().err


def test_ctrl_c_says_how_to_come_back(world: World, capfd: Capture) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    world.backend.at_end = interrupt
    assert run(world, "--", "ls") == 130
    err = capfd.readouterr().err
    assert "kinetic jobs logs -f job-00000001" in err
    assert "kinetic jobs cancel job-00000001" in err
    assert world.backend.cancelled == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--"],
        ["-m"],
        ["absent.py"],
        ["ls", "-l"],
        ["--env", "A", "--", "ls"],
        ["--env", "=x", "--", "ls"],
        ["--timeout", "0", "--", "ls"],
        ["--retries", "-1", "--", "ls"],
        ["--hang-timeout", "5m", "--", "ls"],
        ["--unknown", "--", "ls"],
        ["--detach", "--all-hosts", "--", "ls"],
    ],
)
def test_a_wrong_command_line_creates_nothing(
    world: World, argv: list[str], capsys: Capture
) -> None:
    assert run(world, *argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert world.submitted == []


def test_an_accelerator_is_needed(world: World, capsys: Capture) -> None:
    assert world("run", "--", "ls") == 2
    assert "--accelerator" in capsys.readouterr().err


def test_run_in_a_folder_that_is_gone(
    world: World, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "gone"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert world("run", "-a", "cpu", "--", "ls") == 2
    assert "The working directory no longer exists" in capsys.readouterr().err


# -- accelerators, the root, and errors ------------------------------------------------------------


def test_prices_are_told_with_their_region_and_list(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world("accelerators", "v6e") == 0
    out, err = capsys.readouterr()
    assert err.startswith("Prices in us-central1: Google Cloud's price list")
    assert "SPOT" not in out.splitlines()[0]
    monkeypatch.setenv("KINETIC_PRICES", "v6e:spot=0.5")
    assert world("accelerators", "v6e-16") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(), row.split(), strict=False))["SPOT"] == "8.00"


def test_accelerators(world: World, capsys: Capture) -> None:
    assert world("accelerators", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"tpu-v6e-16", "cpu"} <= {row["name"] for row in rows}
    assert world("accelerators", "V6E-16") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["tpu-v6e-16", "tpu", "16", "4"]
    assert world("accelerators", "trillium-8") == 0
    assert "tpu-v6e-8" in capsys.readouterr().out
    assert world("accelerators", "v5e", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 8, "all slices of what it is another name of"
    assert world("accelerators", "tpu-v6e-13") == 2
    assert "tpu-v6e-16" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_only_names_are_cut(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    world.job("job-00000001", name="a" * 60)
    world.job("job-00000002", name="[red]bracket :smile:")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert world("jobs", "list") == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= columns
    assert len(out.splitlines()) == 3
    assert out.count("job-0000000") == 2
    assert out.count("tpu-v6e-8") == 2
    assert out.count("RUNNING") == 2
    assert "[red]bracket :smile:" in out
    assert ("a" * 60 in out) is (columns == 200)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_reasons_stand_below_their_jobs(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    world.job("job-00000001", name="train_the_model")
    world.job("job-00000002", name="waits", age=30)
    world.backend.phases["job-00000001"] = JobStatus.PENDING
    world.backend.reasons["job-00000001"] = "no node has room: " + "words that say why " * 30
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert world("jobs", "list") == 0
    head, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert "REASON" not in head
    assert ("ACCELERATOR" in head) is (columns > 60)
    assert max(map(len, lines)) <= columns
    jobs = [index for index, each in enumerate(lines) if each.startswith("job-")]
    assert [lines[index].split()[0] for index in jobs] == ["job-00000002", "job-00000001"]
    assert "train_the_model" in lines[jobs[1]]
    below = lines[jobs[1] + 1 :]
    assert below[0].startswith("  no node has room: words")
    assert (len(below), below[-1][-1]) == (3, "…")


def test_a_table_that_is_too_wide_says_that_it_is_cut(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert world("accelerators", "v6e") == 0
    _, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= 45 and line.rstrip().endswith("…") for line in lines), lines


def test_help_fits_on_a_terminal_of_80_columns(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = [("kinetic",), *_commands(root, ())]
    assert len(commands) > 20
    for command in commands:
        assert world(*command[1:], "--help") == 0
        wide = [each for each in capsys.readouterr().out.splitlines() if len(each) > 80]
        assert wide == [], command


def _commands(group: click.Command, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield ("kinetic", *above, name)
            yield from _commands(command, (*above, name))


def test_typing_errors_get_a_hint(world: World, capsys: Capture) -> None:
    assert world("jbos") == 2
    assert "Did you mean 'jobs'?" in capsys.readouterr().err
    assert world("jobs", "lst") == 2
    assert "Did you mean 'list'?" in capsys.readouterr().err
    assert world("jobs", "list", "--josn") == 2


def test_help_is_whole(world: World, capsys: Capture) -> None:
    for argv in (
        [],
        ["jobs"],
        ["run"],
        ["accelerators"],
        *(["jobs", c] for c in ("list", "status", "logs", "result", "wait")),
    ):
        assert world(*argv, "--help") == 0
        out = capsys.readouterr().out
        assert "Example" in out
        assert max(map(len, out.splitlines())) <= 100
    assert world("--help") == 0
    out = capsys.readouterr().out
    assert all(code in out for code in ("124", "130", "  5 "))
    assert world("--version") == 0
    assert capsys.readouterr().out == f"kinetic {kinetic.__version__}\n"


def test_an_error_shows_its_traceback_only_when_debugging(
    world: World, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    world.job("job-00000001")
    app = AppContext(world.store, fault, fault, submit=world._submit)
    assert call(["jobs", "wait", "job-0"], app) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ZeroDivisionError: a fault of ours\n")
    assert "Run it again as `kinetic -v …`" in err
    assert call(["-v", "jobs", "wait", "job-0"], app) == 1
    assert "Traceback" in capsys.readouterr().err
    assert call(["jobs", "wait", "job-0"], app) == 1
    assert "Traceback" not in capsys.readouterr().err, "the option holds for one command"
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "debug")
    assert call(["jobs", "wait", "job-0"], app) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_lost_host_is_a_failure_of_the_job(world: World, capsys: Capture) -> None:
    def lost(*_: Any) -> Any:
        raise HostLost("host 3 died", job_id="job-00000001", hosts=[3])

    world.job("job-00000001")
    assert (
        call(["jobs", "wait", "job-0"], AppContext(world.store, lost, lost, submit=world._submit))
        == 1
    )
    assert capsys.readouterr().err == "error: host 3 died\n"


def loaded_by(*argv: str) -> set[str]:
    code = (
        "import sys; from kinetic.cli.root import call; code = call(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "argv", [("--help",), ("jobs", "list"), ("accelerators",), ("run", "--help"), ("--version",)]
)
def test_light_commands_load_no_heavy_package(argv: tuple[str, ...]) -> None:
    heavy = {
        "rich",
        "grpc",
        "google",
        "cloudpickle",
        "tblib",
        "jax",
        "numpy",
        "pathspec",
        "asyncio",
        "multiprocessing",
    }
    assert not {name.partition(".")[0] for name in loaded_by(*argv)} & heavy


@pytest.mark.starts_processes
def test_a_list_loads_what_reads_jobs_and_nothing_that_runs_them() -> None:
    ours = {name for name in loaded_by("jobs", "list") if name.startswith("kinetic.")}
    rooms = {".".join(name.split(".")[:2]) for name in ours}
    assert rooms <= {
        "kinetic._client",
        "kinetic._config",
        "kinetic._core",
        "kinetic._shadows",
        "kinetic._store",
        "kinetic._system",
        "kinetic.cli",
        "kinetic.errors",
        "kinetic.version",
    }
    assert {name for name in ours if name.startswith("kinetic._client.")} == {
        "kinetic._client.access",
        "kinetic._client.board",
        "kinetic._client.board.reader",
        "kinetic._client.board.text",
    }
    assert len(ours) <= 38


@pytest.mark.starts_processes
def test_help_of_the_root_loads_click_and_little_of_ours() -> None:
    ours = {name for name in loaded_by("--help") if name.startswith("kinetic.")}
    assert ours <= {
        "kinetic.version",
        "kinetic._shadows",
        "kinetic.errors",
        "kinetic.cli",
        "kinetic.cli.root",
        "kinetic.cli.lazy",
        "kinetic.cli.output",
        "kinetic._client",
        "kinetic._client.board",
        "kinetic._client.board.text",
        "kinetic._system",
        "kinetic._system.streams",
        "kinetic.cli.exit_codes",
    }


def test_the_configured_store_is_read(home: Path, capsys: Capture) -> None:
    World(home).job("job-00000007")
    assert time.time() > NOW
    assert call(["jobs", "list", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert (job["job_id"], job["state"]) == ("job-00000007", "UNKNOWN")


@pytest.mark.starts_processes
@pytest.mark.parametrize("command", ["jobs list --all --json", "accelerators --json"])
def test_a_full_disk_below_stdout_is_told(command: str, tmp_path: Path) -> None:
    code = "from kinetic.cli.main import main; main()"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()],
            cwd=ROOT,
            env={**os.environ, "KINETIC_STORE": str(tmp_path / "empty"), "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    wanted = "error: The output could not be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, wanted)
