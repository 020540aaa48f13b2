"""The function of jobs from `kinetic run`: run a script, a module or a command on every host.

Called in the worker's main thread, with the caller's folder as working directory. A failure is
raised as a `SystemExit` with the program's exit code.
"""

from __future__ import annotations

import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn, Self

from kinetic._host import identity
from kinetic._host.worker import interpreter, worlds
from kinetic._host.worker.report import ProgramExited, short_repr
from kinetic._host.worker.signals import Terminated

_runpy: Any = runpy
"""`runpy` without types: the functions that `python -m` uses are private."""
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_VARIABLE = re.compile(r"\$(?:(KINETIC_[A-Z_]+)|\{(KINETIC_[A-Z_]+)\})")
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "fish"))
_IS_C = re.compile(r"-[a-z]*c\Z")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run(kind: str, target: str, args: Sequence[str], written: str = "") -> None:
    """Run `target`, which is a "script", a "module" or a "command" (`kind`).

    In the arguments `$KINETIC_OUTPUT_DIR` and other variables of the job are replaced by their
    values on this host. `written` is the script's path as the user wrote it.
    """
    args = fill_in_args(target if kind == "command" else "", args, identity.variables_of_the_job())
    try:
        if kind == "script":
            run_script(target, args, written)
        elif kind == "module":
            run_module(target, args)
        else:
            run_command([target, *args])
    except (Terminated, ProgramExited):
        raise
    except SystemExit as ended:
        detail = f"The {kind} called sys.exit({short_repr(ended.code)})."
        raise ProgramExited(ended.code, detail).with_traceback(ended.__traceback__) from None


def fill_in_args(command: str, args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments with `$KINETIC_NAME` and `${KINETIC_NAME}` replaced by values in
    `environ`.

    If `command` is a shell, the code after `-c` is not changed: the shell itself replaces variables
    that are not quoted.
    """
    is_shell = command.rpartition("/")[2] in _SHELLS
    code = next((at + 1 for at, word in enumerate(args) if is_shell and _IS_C.match(word)), None)

    def fill_word(word: str) -> str:
        return _VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), word)

    return [word if at == code else fill_word(word) for at, word in enumerate(args)]


def run_script(path_rel: str, args: Sequence[str], written: str) -> None:
    """Run a Python file as `python FILE ARGS…` does: as `__main__`, with its folder first on
    sys.path.

    Args:
        path_rel: path of the file, relative to the caller's working directory. If that directory is
            not in the source tree, the file is found by its name on sys.path.
        args: arguments of the script.
        written: path of the file as the user wrote it; `sys.argv[0]` if it names the file here,
            too.
    """
    path = _find(path_rel)
    if path is None:
        _leave(
            f"{path_rel} was not sent with the source tree. Is it excluded by .gitignore or "
            ".kineticignore?",
            _NOT_FOUND,
        )
    is_same = not Path(written).is_absolute() and Path(written).resolve() == path
    sys.argv = [written if is_same else str(path), *args]
    _put_first(str(path.parent))

    def execute() -> None:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        _run_code(code, None, str(path))

    _as_main(execute)


def _find(path_rel: str) -> Path | None:
    path = Path(path_rel).resolve()
    if path.is_file() and str(path.parent) in map(_resolve_path, sys.path):
        return path
    files = [Path(_resolve_path(entry)) / path.name for entry in sys.path]
    return next((file for file in files if file.is_file()), path if path.is_file() else None)


def _resolve_path(entry: str) -> str:
    return str(Path(entry).resolve())


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as `python -m NAME ARGS…` does."""
    sys.argv = [name, *args]
    _put_first(str(Path.cwd()))

    def execute() -> None:
        _, spec, code = _runpy._get_module_details(name)
        sys.argv[0] = spec.origin
        _run_code(code, spec, spec.origin)

    try:
        _as_main(execute)
    except ImportError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # The module itself raised it.
        _leave(f"{error}. `kinetic run --dry-run` lists the files that are sent.", 1, "module")


def run_command(argv: Sequence[str]) -> None:
    """Run a command with this process's streams and folder; raise `ProgramExited` unless its exit
    code is 0."""
    code = call(argv)
    if code:
        raise ProgramExited(code, f"The command exited with code {code}.")


def call(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 128 + N if signal N ended it, 127 if it does not
    exist."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _Forwarding() as forwarding:
            # No new process group, so that the command is killed together with the worker.
            process = forwarding.to(subprocess.Popen(list(argv)))
            code = process.wait()
    except FileNotFoundError:
        return _print_error(_explain_missing(argv[0]), _NOT_FOUND)
    except OSError as error:
        return _print_error(f"{argv[0]} cannot be started: {error}", _NOT_EXECUTABLE)
    if code == 0 and signal.SIGTERM in forwarding.received:
        # A command that exits with 0 after SIGTERM has not succeeded.
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def _explain_missing(command: str) -> str:
    missing = f"{command}: no such command on this host"
    if any(letter.isspace() for letter in command):
        return f"{missing}. For a line of a shell, write: -- sh -c {shlex.quote(command)}"
    if "/" not in command and Path(command).is_file():
        how = f"leave out --, or write -- python {command}" if command.endswith(".py") else ""
        return f"{missing}. There is a file of that name: {how or f'write -- ./{command}'}"
    if "/" not in command or command.startswith("/"):
        return missing
    return (
        f"{missing}. It is not in the source tree: ignored files and virtual environments are not "
        "sent (`kinetic run --dry-run` lists what is). Give the absolute path of a command that is "
        "installed on the host."
    )


class _Forwarding:
    """Forwards termination signals to a command, which decides how to end.

    Enter it before the command starts: a signal that arrives in between is forwarded, too.
    Otherwise the command could outlive this process.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._forward) for signum in _FORWARDED}
        return self

    def __exit__(self, *raised: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def to(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Forward to this process from now on, earlier signals included."""
        self._process = process
        for signum in tuple(self.received):
            process.send_signal(signum)
        return process

    def _forward(self, signum: int, frame: types.FrameType | None) -> None:
        self.received.append(signum)
        if self._process is not None:
            self._process.send_signal(signum)


def _put_first(folder: str) -> None:
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def _as_main(run: Callable[[], Any]) -> None:
    """Run code; drop the frames that started it from the traceback of its exception."""
    try:
        run()
    except BaseException as error:
        error.with_traceback(_without_machinery(error.__traceback__))
        raise


def _run_code(code: types.CodeType, spec: ModuleSpec | None, file: str) -> None:
    """Run code as `__main__`, and wait for its threads unless it fails. `runpy.run_path` would
    remove `__main__` too early: threads need it until they end, for pickling for example."""
    before, program = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = program
    package = "" if spec is None else spec.parent
    try:
        _runpy._run_code(code, vars(program), None, "__main__", spec, package, file)
        _wait_for_rest()
    except SystemExit as end:
        # Other hosts must not wait for the threads of a failed host.
        if not end.code:
            _wait_for_rest()
        raise
    finally:
        sys.modules["__main__"] = before


def _wait_for_rest() -> None:
    """Wait for saves of checkpoints, which use thread pools; then for the pools and all threads."""
    worlds.finish(returned=True)
    interpreter.wait_for_threads()


def _without_machinery(trace: types.TracebackType | None) -> types.TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen ")
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename.startswith(ours):
        at = at.tb_next
    return at


def _print_error(text: str, code: int) -> int:
    print(f"kinetic: {text}", file=sys.stderr)  # noqa: T201 - this is the host's stderr, which the caller reads
    return code


def _leave(words: str, code: int, kind: str = "script") -> NoReturn:
    raise ProgramExited(_print_error(words, code), f"The {kind} exited with code {code}.") from None
