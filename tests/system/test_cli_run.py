"""The command line on the local backend, with real processes: run, logs, wait, cancel, prune."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import PATIENCE_S

import kinetic

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "sub/friend.py").write_text(
        "class Oops(Exception): pass\ndef go(how):\n    if how == 'oops': raise Oops('no')\n"
        "    return how\n"
    )
    (folder / "sub/train.py").write_text(
        "import sys, os, friend\nprint(os.path.exists('sub/train.py'), __name__, "
        "friend.go(sys.argv[1]))\n"
        "print('warned', file=sys.stderr)\nsys.exit(int(sys.argv[2]))\n"
    )
    return folder


def kn(project: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*KINETIC, *argv],
        cwd=project,
        env=env,
        input="piped\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_script_runs_as_if_it_ran_here(project: Path) -> None:
    done = kn(project, "run", "-a", "cpu", "sub/train.py", "--epochs", "0")
    assert (done.stdout, done.returncode) == ("True __main__ --epochs\n", 0)
    assert done.stderr.endswith("\nwarned\n")
    done = kn(project, "run", "-a", "cpu", "sub/train.py", "x", "7")
    assert done.returncode == 7
    assert "train.py exited with code 7" in done.stderr


def test_a_program_ends_as_it_does_though_nobody_reads_it_any_more(project: Path) -> None:
    (project / "talk.py").write_text(
        "import sys, time\nfor n in range(40):\n    print(n, flush=True)\n    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*KINETIC, "run", "-a", "cpu", "talk.py"]
    with subprocess.Popen(
        command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 7


def test_a_script_that_leaves_with_a_truth_value_leaves_with_a_number(project: Path) -> None:
    (project / "check.py").write_text("import sys\n\nsys.exit(not False)  # as unittest does\n")
    done = kn(project, "run", "-a", "cpu", "check.py")
    assert done.returncode == 1
    assert "check.py exited with code 1 " in done.stderr


def test_what_is_piped_in_does_not_reach_a_program(project: Path) -> None:
    done = kn(project, "run", "-a", "cpu", "--", "sh", "-c", "cat; echo end")
    assert (done.stdout, done.returncode) == ("end\n", 0)


def test_a_script_may_be_named_from_anywhere(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = kn(tmp_path / "elsewhere", "run", "-a", "cpu", str(project / "sub/train.py"), "x", "0")
    assert (done.stdout, done.returncode) == ("False __main__ x\n", 0)


def test_the_error_of_a_script_shows_the_script_and_nothing_of_ours(project: Path) -> None:
    done = kn(project, "run", "-a", "cpu", "sub/train.py", "oops", "0")
    assert done.returncode == 1
    assert "friend.Oops: no" in done.stderr
    assert f'File "{project}/sub/train.py", line 2' in done.stderr
    assert str(ROOT / "kinetic") not in done.stderr


THREADS = """
import sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

def work(name):
    time.sleep(0.1)
    print("did", name, flush=True)

def begin_another():
    threading.Thread(target=work, args=["last"]).start()

if __name__ == "__main__":
    pools = ThreadPoolExecutor(2), ProcessPoolExecutor(1)
    for n in range(6):
        pools[n % 2].submit(work, n)
    threading.Thread(target=begin_another).start()
    if sys.argv[1:]:
        sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("program", [("work.py",), ("-m", "work")])
@pytest.mark.parametrize("code", [(), ("0",)])
def test_a_program_ends_once_its_threads_have_ended(
    project: Path, program: tuple[str, ...], code: tuple[str, ...]
) -> None:
    (project / "work.py").write_text(THREADS)
    done = kn(project, "run", "-a", "cpu", *program, *code)
    assert sorted(done.stdout.split()) == [*"012345", *["did"] * 7, "last"], done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise LookupError", 1)])
def test_nobody_waits_for_threads_of_a_program_that_has_failed(
    project: Path, end: str, code: int
) -> None:
    (project / "never.py").write_text(
        "import sys, threading; threading.Thread(target=threading.Event().wait).start(); " + end
    )
    done = kn(project, "run", "-a", "cpu", "never.py")
    assert (done.returncode, "LookupError" in done.stderr) == (code, "raise" in end)


@pytest.mark.parametrize("end", ["", "; sys.exit(0)"])
def test_threads_that_never_end_count_against_the_timeout(project: Path, end: str) -> None:
    (project / "never.py").write_text(
        "import sys, threading; threading.Thread(target=threading.Event().wait).start(); "
        f"print('at its end'){end}\n"
    )
    done = kn(project, "run", "-a", "cpu", "--timeout", "5s", "never.py")
    assert (done.stdout, done.returncode) == ("at its end\n", 1)
    assert "longer than its timeout" in done.stderr


@pytest.mark.parametrize("program", [("broken.py",), ("uses.py",), ("-m", "broken")])
def test_a_syntax_error_is_shown_once_and_where_the_user_has_it(
    project: Path, program: tuple[str, ...]
) -> None:
    (project / "broken.py").write_text("values = (1\n")
    (project / "uses.py").write_text("import broken\n")
    done = kn(project, "run", "-a", "cpu", *program)
    assert done.returncode == 1
    assert "<frozen " not in done.stderr
    assert done.stderr.count("SyntaxError: ") == 1, done.stderr
    assert done.stderr.count(f'File "{project}/broken.py", line 1') == 1
    assert "Remote traceback (host 0 of 1, job-" in done.stderr


@pytest.mark.parametrize("name", ["no.such.mod", "nothing_such"])
def test_a_module_that_is_not_there_is_said_in_one_line(project: Path, name: str) -> None:
    done = kn(project, "run", "-a", "cpu", "-m", name)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "traceback" not in done.stderr
    assert done.stderr.count(name) == 2, "what is missing, and what has ended"
    assert "`kinetic run --dry-run` lists the files that are" in done.stderr


def test_a_module_and_its_arguments(project: Path) -> None:
    done = kn(project / "sub", "run", "-a", "cpu", "-m", "train", "-d", "0")
    assert (done.stdout, done.returncode) == ("False __main__ -d\n", 0)


@pytest.mark.parametrize(("cwd", "named"), [(".", "my app"), ("my app", ".")])
def test_a_folder_runs_as_python_runs_it(project: Path, cwd: str, named: str) -> None:
    (project / "my app").mkdir()
    (project / "my app/friend.py").write_text("NAME = 'friend'\n")
    (project / "my app/__main__.py").write_text(
        "import sys, friend\nprint(__name__, friend.NAME, *sys.argv[1:])\nsys.exit(3)\n"
    )
    done = kn(project / cwd, "run", "-a", "cpu", named, "-d")
    assert (done.stdout, done.returncode) == ("__main__ friend -d\n", 3)
    assert "my app exited with code 3 " in done.stderr


def test_a_folder_without_a_program_is_refused(project: Path) -> None:
    done = kn(project, "run", "-a", "cpu", "sub")
    assert (done.stdout, done.returncode) == ("", 2)
    assert "The folder sub has no __main__.py. Name a file in it." in done.stderr


def test_a_command_sees_the_callers_project_wherever_the_console_script_lies(
    project: Path, tmp_path: Path
) -> None:
    console = tmp_path / "env/bin/kinetic"
    console.parent.mkdir(parents=True)
    console.write_text("from kinetic.cli.main import main; main()")
    (tmp_path / "kinetic").symlink_to(console)
    env = os.environ | {"PYTHONPATH": str(ROOT), "KINETIC_PACKAGE_ROOT": str(project)}
    command = [sys.executable, str(tmp_path / "kinetic"), "run", "-a", "cpu", "--", "ls"]
    done = subprocess.run(
        command, cwd=project / "sub", env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.returncode) == ("friend.py\ntrain.py\n", 0)


PROGRAMS = {
    "script": ["sub/keep.py"],
    "module": ["-m", "sub.keep"],
    "command": ["--", "python3", "sub/keep.py"],
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_is_kept_and_what_is_not(project: Path, kind: str) -> None:
    """A program imports the sources that were sent. Files that it writes outside of its output
    folder are kept with the job, and are not sent with the next one."""
    (project / "sub/keep.py").write_text(
        "import os, sys, pathlib\nsys.path.append('sub')\nimport friend\n"
        "print(os.path.relpath(friend.__file__))\n"
        "pathlib.Path(sys.argv[1], 'kept').write_text('x')\n"
        "pathlib.Path('model').write_text('y' * 2000)\n"
        "pathlib.Path('sub/friend.py').write_text('')\nos.makedirs('__pycache__', exist_ok=True)\n"
    )
    out = project / "out"
    done = kn(
        project, "run", "-a", "cpu", "--output-dir", "out", *PROGRAMS[kind], "$KINETIC_OUTPUT_DIR"
    )
    assert (done.stdout, done.returncode) == ("sub/friend.py\n", 0)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "kinetic: kept 2 files of the work folder: model, sub/friend.py (2 KiB)."
    )
    assert sorted(os.listdir(out)) == ["CACHEDIR.TAG", "kept"]
    assert (project / "sub/friend.py").read_text() != ""
    assert kn(project, "run", "-a", "cpu", "--", "ls").stdout == "pyproject.toml\nsub\n", (
        "results are not sent"
    )


def test_a_dry_run_shows_what_would_be_sent_largest_first(project: Path, home: Path) -> None:
    (project / "sub/data.bin").write_bytes(b"x" * 5000)
    for number in range(30):
        (project / f"n{number}").write_text("")
    done = kn(project, "run", "-a", "tpu-v6e-8", "--dry-run", "sub/train.py", "--dry-run")
    lines = done.stdout.splitlines()
    assert lines[0] == "Plan of train.py on tpu-v6e-8 (nothing was created)"
    at = next(index for index, line in enumerate(lines) if line.startswith("FILE"))
    assert lines[at + 1].split() == ["sub/data.bin", "4.9", "KiB"]
    assert lines[-1].endswith("--json lists all of them.")
    assert "… and 14 smaller files (0 B)" in lines[-1]
    report = json.loads(kn(project, "run", "-a", "cpu", "--dry-run", "--json", "--", "ls").stdout)
    assert (report["plan"]["name"], report["files"][0], len(report["files"])) == (
        "ls",
        {"path": "sub/data.bin", "size_bytes": 5000},
        34,
    )
    assert not home.exists()
    assert kn(project, "run", "-a", "cpu", "--json", "--", "ls").returncode == 2


def test_programs_import_what_was_sent(project: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{project / 'sub'}{os.pathsep}{ROOT}"}
    ask = "import friend, subprocess, sys; print(friend.__file__)"
    command = [*KINETIC, "run", "-a", "cpu", "--", sys.executable, "-c", ask]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("/tree/sub/friend.py\n"), done.stderr


def test_a_command_is_that_of_the_environment_which_need_not_be_active(
    project: Path, tmp_path: Path
) -> None:
    other, own = tmp_path / "other/bin/python", Path(sys.executable).parent
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\necho another python\n")
    other.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    env |= {"PYTHONPATH": str(ROOT), "PATH": f"{other.parent}:/usr/bin:/bin"}
    program = "import shutil, sys; print(sys.executable); print(shutil.which('ruff'))"
    done = subprocess.run(
        [*KINETIC, "run", "-a", "cpu", "--", "python", "-c", program],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.splitlines() == [str(own / "python"), str(own / "ruff")], done.stderr


def test_a_command_on_two_hosts(project: Path) -> None:
    line = 'echo "$A $KINETIC_HOST_INDEX"; [ "$KINETIC_HOST_INDEX" != 1 ] || exit "$CODE"; '
    run = ("run", "-a", "tpu-v6e-8", "--all-hosts", "--env", "A=b", "--env")
    done = kn(project, *run, "CODE=0", "--", "sh", "-c", line)
    assert (sorted(done.stdout.splitlines()), done.returncode) == (
        ["[host 0] b 0", "[host 1] b 1"],
        0,
    )
    done = kn(project, *run, "CODE=9", "--", "sh", "-c", line + "sleep 60")
    assert done.returncode == 9
    assert "[host 1] b 1\n" in done.stdout
    assert "sh exited with code 9 on host 1 of 2" in done.stderr
    assert "Last lines of host 1" not in done.stderr, "--all-hosts has shown them"
    assert "More:" not in done.stderr


@pytest.mark.parametrize("how", ["command", "script"])
def test_the_last_lines_of_a_host_that_was_not_shown(project: Path, how: str) -> None:
    (project / "fails.py").write_text(
        "import os, sys, time\n"
        "if os.environ['KINETIC_HOST_INDEX'] == '1':\n"
        "    print('the real cause', file=sys.stderr)\n"
        "    sys.exit(9)\n"
        "time.sleep(300)\n"
    )
    command = ["--", "sh", "-c", "python fails.py"] if how == "command" else ["fails.py"]
    done = kn(project, "run", "-a", "tpu-v6e-8", *command)
    assert done.returncode == 9
    assert "exited with code 9 on host 1 of 2" in done.stderr
    assert "\nLast lines of host 1:\n  the real cause\nMore: kinetic jobs logs job-" in done.stderr
    assert done.stderr.endswith(" --host 1\n"), "what came before them is one command away"


def test_a_detached_job_is_found_again(project: Path) -> None:
    job = kn(
        project,
        "run",
        "-a",
        "cpu",
        "--detach",
        "--name",
        "mine",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit 3",
    ).stdout.strip()
    assert kn(project, "jobs", "logs", "-f", job).stdout == "out\nerr\n"
    assert kn(project, "jobs", "wait", job[4:]).returncode == 1
    (listed,) = json.loads(kn(project, "jobs", "list", "--json").stdout)
    assert (listed["job_id"], listed["state"], listed["display_name"]) == (job, "FAILED", "mine")
    assert kn(project, "jobs", "prune", "--older-than", "1ms", "--yes").returncode == 0
    assert json.loads(kn(project, "jobs", "list", "--json").stdout) == []
    assert kn(project, "jobs", "logs", job).returncode == 3


def test_ctrl_c_leaves_the_job_and_cancel_stops_it(project: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [
        *KINETIC,
        "run",
        "-a",
        "cpu",
        "--",
        "sh",
        "-c",
        "trap 'echo cleaned; exit 0' TERM; echo up; while :; do sleep 0.05; done",
    ]
    with subprocess.Popen(
        command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    job = err.split("kinetic jobs cancel ")[1].split()[0]
    assert json.loads(kn(project, "jobs", "status", "--json", job).stdout)["state"] == "RUNNING"
    assert kn(project, "jobs", "wait", "--timeout", "100ms", job).returncode == 124
    assert kn(project, "jobs", "cancel", job).returncode == 0
    assert kn(project, "jobs", "wait", job).returncode == 1
    assert (
        kn(project, "jobs", "logs", job).stdout == "up\ncleaned\nkinetic: The job was cancelled.\n"
    )
    assert json.loads(kn(project, "jobs", "status", "--json", job).stdout)["state"] == "CANCELLED"


def test_annotations_of_a_script_are_what_python_makes_of_them(project: Path) -> None:
    (project / "typed.py").write_text("def f(n: int): pass\nprint(f.__annotations__['n'](3.5))\n")
    done = kn(project, "run", "-a", "cpu", "typed.py")
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_a_command_that_misses_a_file_which_was_not_sent_is_told_so(project: Path) -> None:
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data/x.py").touch()
    for code in ("import data.x", "open('data/x.py')"):
        done = kn(project, "run", "-a", "cpu", "--", "python", "-c", code)
        assert done.returncode == 1
        assert re.search("the line !data(/x.py)? in", done.stderr)
        assert "kinetic.Data" not in done.stderr
    done = kn(project, "run", "-a", "cpu", "--", "python", "-c", "open('data/y.py')")
    assert "exists on this machine" not in done.stderr
