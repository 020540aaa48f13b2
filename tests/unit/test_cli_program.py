"""Programs that a host runs: scripts, modules, commands."""

import os
import pickle
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import kinetic
from kinetic._host.worker import command, report, signals
from kinetic._source import shipment
from kinetic.cli import program
from kinetic.cli.program import Program, ProgramKind

ROOT = Path(kinetic.__file__).parent.parent


@pytest.fixture(autouse=True)
def own_interpreter_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The real function would also shut down the thread pools of the test process.
    monkeypatch.setattr(command.interpreter, "wait_for_threads", lambda: None)
    monkeypatch.chdir(tmp_path)


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return path


def test_a_script_runs_as_main_with_its_folder_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "sub/friend.py", "NAME = 'friend'")
    script = str(tmp_path / "sub/s.py")
    write(
        tmp_path / "sub/s.py",
        "import sys, friend; print(__name__, friend.NAME, sys.argv, __file__)",
    )
    command.run("script", "sub/s.py", ("--x", "1"))
    assert capfd.readouterr().out == f"__main__ friend [{script!r}, '--x', '1'] {script}\n"
    assert sys.path[0] == str(tmp_path / "sub")
    del sys.modules["friend"]


@pytest.mark.parametrize("written", ["sub/s.py", "./sub/s.py", "{}/sub/s.py", "gone/s.py"])
def test_a_script_is_called_as_it_was_written(
    written: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path / "sub/s.py", "import sys; print(sys.argv[0], __file__)")
    written = written.format(tmp_path)
    command.run("script", "sub/s.py", (), written)
    is_here = not written.startswith(("/", "gone"))
    assert capfd.readouterr().out == f"{written if is_here else script} {script}\n"


def test_what_is_sent_says_how_the_script_was_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "s.py", "import sys; print(sys.argv)")
    program.make_function(Program(ProgramKind.SCRIPT, "./s.py", ("a",)), tmp_path)()
    assert capfd.readouterr().out == "['./s.py', 'a']\n"


def test_a_script_is_found_by_its_folder_when_the_caller_was_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write(tmp_path / "tree/entry/s.py", "print('right')").parent
    write(tmp_path / "tree/entry/elsewhere/s.py", "print('wrong')")
    sys.path.insert(0, str(entry))
    monkeypatch.chdir(entry)
    command.run("script", "elsewhere/s.py", ())
    assert capfd.readouterr().out == "right\n"


def test_a_script_that_was_not_sent_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run("script", "gone.py", ())
    assert caught.value.code == 127
    assert ".kineticignore" in capfd.readouterr().err


def test_the_traceback_of_a_script_begins_in_it(tmp_path: Path) -> None:
    write(tmp_path / "s.py", "def f():\n    1 / 0\nf()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        command.run("script", "s.py", ())
    files = [Path(str(entry.path)).name for entry in caught.traceback]
    assert "runpy.py" not in files
    assert "<frozen runpy>" not in files
    assert files[-2:] == ["s.py", "s.py"]


def test_a_script_that_cannot_be_compiled_has_no_traceback_of_what_compiled_it(
    tmp_path: Path,
) -> None:
    write(tmp_path / "s.py", "x = = 1\n")
    with pytest.raises(SyntaxError) as caught:
        command.run("script", "s.py", ())
    assert not {"runpy.py", "<frozen runpy>"} & {
        Path(str(entry.path)).name for entry in caught.traceback
    }


def test_a_script_that_exits_keeps_its_code(tmp_path: Path) -> None:
    write(tmp_path / "s.py", "import sys; sys.exit(5)")
    with pytest.raises(SystemExit) as caught:
        command.run("script", "s.py", ())
    assert caught.value.code == 5


def test_a_module_runs_as_main(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "kn_pkg/__init__.py", "")
    write(tmp_path / "kn_pkg/mod.py", "import sys; print(__name__, __package__, sys.argv[1:])")
    command.run("module", "kn_pkg.mod", ("-v",))
    assert capfd.readouterr().out == "__main__ kn_pkg ['-v']\n"
    del sys.modules["kn_pkg"]


@pytest.mark.starts_processes
def test_a_command_has_our_streams(capfd: pytest.CaptureFixture[str]) -> None:
    command.run("command", "sh", ("-c", "echo out; echo err >&2"))
    assert capfd.readouterr() == ("out\n", "err\n")


@pytest.mark.starts_processes
@pytest.mark.parametrize(("line", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)])
def test_a_command_ends_with_its_own_code(line: str, code: int) -> None:
    assert command.call(["sh", "-c", line]) == code


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("kind", "target", "args", "sentence"),
    [
        ("command", "sh", ("-c", "exit 5"), "The command exited with code 5."),
        ("command", "no-such-command-here", (), "The command exited with code 127."),
        ("script", "s.py", (), "The script called sys.exit(5)."),
        ("module", "kn_exits", (), "The module called sys.exit('no')."),
        ("script", "gone.py", (), "The script exited with code 127."),
    ],
)
def test_what_ended_is_called_what_it_is(
    tmp_path: Path, kind: str, target: str, args: tuple[str, ...], sentence: str
) -> None:
    write(tmp_path / "s.py", "import sys; sys.exit(5)")
    write(tmp_path / "kn_exits.py", "import sys; sys.exit('no')")
    with pytest.raises(SystemExit) as caught:
        command.run(kind, target, args)
    assert report.exit_detail(caught.value) == sentence


def test_a_script_that_is_stopped_by_sigterm_is_stopped(tmp_path: Path) -> None:
    stop = "from kinetic._host.worker.signals import Terminated; raise Terminated(143)"
    write(tmp_path / "s.py", stop)
    with pytest.raises(signals.Terminated):
        command.run("script", "s.py", ())


@pytest.mark.starts_processes
def test_a_command_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run("command", "no-such-command-here", ())
    assert caught.value.code == 127
    assert command.call([str(write(tmp_path / "not-executable", ""))]) == 126
    assert "no-such-command-here" in capfd.readouterr().err


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("words", "explained"),
    [("venv/bin/python", True), ("./tool", True), ("/no/such/tool", False), ("no-such", False)],
)
def test_a_command_that_was_left_out_of_the_source_tree(
    words: str, explained: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.call([words]) == 127
    assert ("virtual environments are not sent" in capfd.readouterr().err) == explained


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("args.py", "leave out --, or write -- python args.py"),
        ("tool", "write -- ./tool"),
        ("echo a && echo b", "write: -- sh -c 'echo a && echo b'"),
        ("gone", "no such command on this host\n"),
    ],
)
def test_a_command_that_is_none_is_told_how_to_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    write(tmp_path / "args.py", "")
    write(tmp_path / "tool", "")
    assert command.call([words]) == 127
    assert hint in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command_name", "args", "filled"),
    [
        ("", ["--out=$KINETIC_OUTPUT_DIR/x", "${KINETIC_OUTPUT_DIR}y"], ["--out=/out/x", "/outy"]),
        (
            "",
            ["$HOME", "$KINETIC_NO", "$$", "KINETIC_OUTPUT_DIR"],
            ["$HOME", "$KINETIC_NO", "$$", "KINETIC_OUTPUT_DIR"],
        ),
        ("python", ["-c", "print('$KINETIC_OUTPUT_DIR')"], ["-c", "print('/out')"]),
        (
            "/bin/sh",
            ["-ec", "echo '$KINETIC_OUTPUT_DIR'", "$KINETIC_OUTPUT_DIR"],
            ["-ec", "echo '$KINETIC_OUTPUT_DIR'", "/out"],
        ),
    ],
)
def test_arguments_may_name_what_only_the_host_knows(
    command_name: str, args: list[str], filled: list[str]
) -> None:
    assert (
        command.fill_in_args(command_name, args, {"KINETIC_OUTPUT_DIR": "/out", "HOME": "/h"})
        == filled
    )


@pytest.mark.starts_processes
@pytest.mark.parametrize(("own", "code_of_all"), [(9, 9), (0, 143)])
def test_sigterm_is_handed_on_and_the_command_tidies_up(own: int, code_of_all: int) -> None:
    """A host's process gets SIGTERM while its command traps the signal. The process exits with the
    command's code, or with 143 if that is 0."""
    script = f"trap 'echo cleaned; exit {own}' TERM; echo ready; while :; do sleep 0.02; done"
    code = (
        "from kinetic._host.worker import command; command.run('command', 'sh', ('-c', "
        f"{script!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "cleaned\n"
    assert process.returncode == code_of_all


@pytest.mark.starts_processes
def test_a_signal_that_comes_before_the_command_has_started_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = subprocess.Popen

    def interrupted(argv: list[str]) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        return real(argv)

    monkeypatch.setattr(command.subprocess, "Popen", interrupted)
    assert command.call(["sleep", "60"]) == 143


@pytest.mark.starts_processes
def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    command.call(["true"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.starts_processes
@pytest.mark.parametrize("kind", list(ProgramKind))
def test_what_is_sent_needs_no_module_of_the_command_line(
    kind: ProgramKind, tmp_path: Path
) -> None:
    """Unpickling the function on a host imports no module of kinetic, so hosts need no click."""
    import cloudpickle

    script = write(tmp_path / "s.py", "print('ran')")
    target = {"script": str(script), "module": "this", "command": "true"}[kind]
    data = cloudpickle.dumps(program.make_function(Program(kind, target), tmp_path))
    check = (
        "import sys, pickle; f = pickle.load(sys.stdin.buffer); print([m for m in sys.modules if "
        "'kinetic' in m]); f()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", check],
        input=data,
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env=env,
    )
    assert done.stdout.splitlines()[0] == b"[]"
    assert pickle.loads(data).__name__ == Path(target).name


def test_the_tree_of_a_script_is_looked_for_around_the_script(tmp_path: Path) -> None:
    script = write(tmp_path / "project/s.py", "")
    func = program.make_function(Program(ProgramKind.SCRIPT, "project/s.py"), tmp_path)
    assert sys.modules[func.__module__].__file__ == str(script)
    del sys.modules[func.__module__]


@pytest.mark.parametrize("kind", [ProgramKind.COMMAND, ProgramKind.MODULE])
def test_the_tree_of_a_command_is_looked_for_around_the_callers_folder(
    kind: ProgramKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for the source tree begins in the caller's folder, because `__main__` is a console
    script in an environment's bin folder."""
    console = write(tmp_path / "env/bin/kinetic", "")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(console), raising=False)
    func = program.make_function(Program(kind, "json.tool"), tmp_path)
    assert shipment.entry_dir(func, tmp_path / "project") == tmp_path / "project"
    del sys.modules[func.__module__]


def test_a_function_of_a_console_script_belongs_to_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that embeds kinetic may start from a script in an environment's bin folder, or from
    a link to it. The project is still the caller's folder."""
    (tmp_path / "env/conda-meta").mkdir(parents=True)
    (tmp_path / "local/bin").mkdir(parents=True)
    console = write(tmp_path / "env/bin/tool", "")
    (tmp_path / "local/bin/tool").symlink_to(console)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    for file in (console, tmp_path / "local/bin/tool"):
        module = types.ModuleType("console")
        module.__file__ = str(file)
        exec("def f(): pass", vars(module))
        monkeypatch.setitem(sys.modules, "console", module)
        assert shipment.entry_dir(module.f, tmp_path) == tmp_path


def test_a_script_from_a_pipe_belongs_to_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python <(…)` runs a script in /dev/fd, but the project is the caller's folder."""
    read, write_end = os.pipe()
    module = types.ModuleType("from_a_pipe")
    module.__file__ = f"/dev/fd/{read}"
    exec("def f(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "from_a_pipe", module)
    assert shipment.entry_dir(module.f, tmp_path) == tmp_path
    os.close(read)
    os.close(write_end)
