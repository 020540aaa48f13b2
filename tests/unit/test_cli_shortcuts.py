"""Shortcuts of the command line: the order of options, aliases, the newest job, durations, a
running job's hosts."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fakes import NOW, World, chunk

from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.outcome import HostReport, Outcome, Verdict

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


# -- options of run come first ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train.py -a cpu", "kinetic run -a cpu train.py …"),
        ("train.py --accelerator=cpu -v", "kinetic run -a cpu train.py …"),
        ("-m pkg.train -a cpu", "kinetic run -a cpu -m pkg.train …"),
        ("--env A=1 -- 'two words' all -a v6e-16", "kinetic run -a cpu -- 'two words' …"),
    ],
)
def test_options_behind_the_program_are_pointed_out(
    world: World, capsys: Capture, words: str, line: str
) -> None:
    assert world("run", *shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Write -a before the program" in err
    assert err.splitlines()[-1] == f"  {line}"
    assert world.submitted == []


@pytest.mark.parametrize("switch", ["--dry-run", "--detach", "--all-hosts"])
def test_a_switch_behind_a_script_that_does_not_know_it_runs_nothing(
    world: World, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)")
    assert world("run", "-a", "cpu", "train.py", "--epochs", "3", switch) == 2
    _, err = capsys.readouterr()
    assert f"  kinetic run {switch} … train.py\n" in err
    assert f"  kinetic run … -- python train.py {switch}\n" in err
    assert world.submitted == []
    world.succeed("job-00000001")
    name = switch.removeprefix("--").replace("-", "_")
    Path("train.py").write_text(f"add_argument('{name}')")
    world("run", "-a", "cpu", "train.py", switch)
    world("run", "-a", "cpu", "--", "python", "train.py", switch)
    world("run", "-a", "cpu", "-m", "train", switch)
    assert len(world.submitted) == 3, "it is the program's own, or may be"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "kinetic run -a cpu train.py"),
        (("go.py", "--epochs", "3"), "kinetic run -a cpu go.py"),
        (("--", "ls", "/tmp"), "kinetic run -a cpu -- ls"),
    ],
)
def test_a_missing_accelerator_gets_a_line_to_write(
    world: World, capsys: Capture, words: tuple[str, ...], line: str
) -> None:
    assert world("run", *words) == 2
    err = capsys.readouterr().err
    assert "-a / --accelerator" in err
    assert err.splitlines()[-1] == f"  {line}"


def test_an_option_of_the_programs_own_is_never_taken(world: World, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert world("run", "-a", "tpu-v6e-8", "-d", str(script), "-a", "cpu", "--timeout", "5") == 0
    function, options = world.submitted[0]
    assert (options["accelerator"], options["timeout"]) == ("tpu-v6e-8", None)
    code = function.__closure__
    assert code is not None
    assert ("-a", "cpu", "--timeout", "5") in [cell.cell_contents for cell in code]


# -- names of commands and of jobs -----------------------------------------------------------------


def test_aliases(world: World, capfd: Capture) -> None:
    world.job("job-00000001")
    assert world("jobs", "list") == 0
    assert world("jobs", "ls") == 0
    listed = capfd.readouterr().out.splitlines()
    assert listed[:2] == listed[2:]
    world.backend.output["job-00000001"] = [chunk(b"line\n")]
    assert world("logs", "job-00000001") == world("jobs", "logs", "job-00000001") == 0
    assert capfd.readouterr().out == "line\nline\n"
    assert world("profile", "list") == 0


@pytest.mark.parametrize(
    ("word", "meant"), [("ps", "list"), ("ls", "list"), ("cancel", "cancel"), ("wait", "wait")]
)
def test_a_command_about_jobs_is_named_in_full(
    world: World, capsys: Capture, word: str, meant: str
) -> None:
    assert world(word) == 2
    assert f"Did you mean `kinetic jobs {meant}`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("stop", "`kinetic jobs cancel` or `kinetic session stop`?"),
        ("version", "`kinetic --version`?"),
    ],
)
def test_commands_that_kinetic_names_otherwise_are_named(
    world: World, capsys: Capture, word: str, meant: str
) -> None:
    assert world(word) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize("newest", ["-", "--last"])
def test_the_newest_job_needs_no_id(world: World, capfd: Capture, newest: str) -> None:
    for job_id, age in (("job-00000001", 20.0), ("job-00000002", 10.0), ("job-00000003", 30.0)):
        world.job(job_id, age=age)
        world.backend.output[job_id] = [chunk(f"{job_id}\n".encode())]
    assert world("jobs", "logs", newest) == 0
    assert capfd.readouterr().out == "job-00000002\n"
    for job_id in ("job-00000002", "job-00000003"):
        world.succeed(job_id, 5)
    assert world("jobs", "result", newest) == 0
    assert capfd.readouterr().out == "5\n"
    assert world("jobs", "status", newest) == world("jobs", "wait", newest) == 0
    assert world("jobs", "cleanup", newest, "job-00000003") == 0
    assert {"job-00000002", "job-00000003"} == set(world.backend.cleaned)


@pytest.mark.parametrize(
    "command", ["status", "logs", "result", "wait", "stacks", "cancel", "cleanup", "debug"]
)
def test_without_jobs_there_is_no_newest(world: World, capsys: Capture, command: str) -> None:
    assert world("jobs", command, "--last") == 3
    assert capsys.readouterr().err == "error: There are no jobs yet.\n"
    assert world("jobs", command) == 2
    assert "--last" in capsys.readouterr().err


def test_an_id_and_last_are_one_too_many(world: World, capsys: Capture) -> None:
    world.job("job-00000001")
    assert world("jobs", "status", "--last", "job-00000001") == 2
    assert "either an ID or --last" in capsys.readouterr().err


# -- durations -------------------------------------------------------------------------------------


def test_list_shows_how_long_the_function_ran(world: World, capsys: Capture) -> None:
    for number, (started, ended) in enumerate(((1000.0, 999.6), (900.0, 100.0))):
        world.job(f"job-0000000{number}", age=2000 - number)
        reports = tuple(
            HostReport(host, Exit.RETURNED, started_at=NOW - started + host, ended_at=NOW - ended)
            for host in (0, 1)
        )
        world.end(
            f"job-0000000{number}",
            Outcome(Verdict.SUCCEEDED, reports=reports, ended_at=NOW - ended),
        )
    world.job("job-00000002", age=1000)
    world.store.put(
        layout.JobKeys("job-00000002").events, b'{"time": %f, "kind": "ready"}\n' % (NOW - 65)
    )
    world.job("job-00000003", age=10)
    assert world("jobs", "list") == 0
    rows = [line.split()[-2] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["TIME", "-", "65s", "13m20s", "0.4s"]
    assert world("jobs", "list", "--json") == 0
    times = [(job["started_at"], job["ended_at"]) for job in json.loads(capsys.readouterr().out)]
    assert times == [
        (None, None),
        (NOW - 65, None),
        (NOW - 900, NOW - 100),
        (NOW - 1000, NOW - 999.6),
    ]


def test_status_of_an_ended_job_says_how_long_it_ran(world: World, capsys: Capture) -> None:
    world.job("job-00000001", age=60)
    report = HostReport(0, Exit.RETURNED, started_at=NOW - 50, ended_at=NOW - 49.6)
    world.end(
        "job-00000001",
        Outcome(Verdict.SUCCEEDED, reports=(report,), ended_at=NOW - 49.6, result_digest="x"),
    )
    assert world("jobs", "status", "--last") == 0
    assert "(ran for 0.4s)" in capsys.readouterr().out


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_that_is_not_there_exits_with_3(world: World, capsys: Capture) -> None:
    for number, group in enumerate(("grp-aa000001", "grp-aa000002", None)):
        ref = replace(world.job(f"job-0000000{number}"), group_id=group)
        world.store.put(layout.JobKeys(ref.job_id).ref, json.dumps(ref.to_json()).encode())
    world.store.put(layout.GroupKeys("grp-bb000001").batch, b"{}")  # nothing submitted yet
    for unknown in ("grp-0000000x", "x", "", "../x", "grp-bb"):
        assert world("jobs", "list", "--group", unknown) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: The store {world.store.uri} has no batch ")
    assert world("jobs", "list", "--group", "grp-aa") == 2
    assert "grp-aa000001, grp-aa000002" in capsys.readouterr().err
    for group_id, rows in (("grp-aa000001", 1), ("aa000002", 1), ("grp-bb000001", 0)):
        assert world("jobs", "list", "--json", "--group", group_id) == 0
        assert len(json.loads(capsys.readouterr().out)) == rows


@pytest.mark.parametrize(
    ("word", "instead"),
    [("rm", "cleanup"), ("show", "status"), ("exec", "debug"), ("stop", "cancel")],
)
def test_commands_of_other_tools_lead_to_those_that_serve(
    world: World, capsys: Capture, word: str, instead: str
) -> None:
    assert world("jobs", word, "job-0") == 2
    assert f"Did you mean `kinetic jobs {instead}`?" in capsys.readouterr().err


def test_the_help_of_run_has_first_what_most_need_and_last_what_clusters_use(
    world: World, capsys: Capture
) -> None:
    world("run", "--help")
    options, clusters = capsys.readouterr().out.split("\nOptions for clusters:\n")
    flags = [
        line.split()[0] for line in options.split("\nOptions:\n")[1].splitlines() if "--" in line
    ]
    assert flags[:4] == ["-a,", "--env", "--timeout", "-d,"]
    for flag in ("--queue", "--memory", "--cluster"):
        assert f"  {flag} " in clusters
        assert f"  {flag} " not in options


def test_a_long_name_leaves_the_list_readable(world: World, capsys: Capture) -> None:
    world.job("job-00000001", name="n" * 300)
    world("jobs", "list")
    assert max(map(len, capsys.readouterr().out.splitlines())) < 180
    world("jobs", "list", "--json")
    assert "n" * 300 in capsys.readouterr().out
