"""The program of `kinetic run`: parsed from the command line, checked, wrapped in a function."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType

from kinetic._core.values import dataclass
from kinetic._source.project import MODULES, WORDS
from kinetic.errors import UsageError

_MAIN_FILE = "__main__.py"


class ProgramKind(StrEnum):
    """The kinds of programs: how Python or the shell starts them."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


@dataclass(frozen=True)
class Program:
    """A program and its arguments.

    Attributes:
        kind: script, module or command.
        target: path of the script as written, name of the module, or name of the command.
        args: the program's arguments.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The job's display name: the name of the file, or of the folder if a folder is run."""
        path = Path(self.target)
        if self.kind is ProgramKind.SCRIPT and path.name == _MAIN_FILE:
            path = path.parent.absolute()
        return path.name or self.target


def split(words: Sequence[str], value_options: Collection[str]) -> tuple[list[str], Program | None]:
    """Split the options of `kinetic run` from the program, which starts at the first word that is
    not an option, after `-m`, or after `--`.

    All later words belong to the program, even if they look like options of kinetic.
    `value_options` names the options that take a value ("-a", "--accelerator"): the word after such
    an option is not the program.
    """
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), _program(ProgramKind.COMMAND, words[at + 1 :])
        if word in ("-m", "--module"):
            return list(words[:at]), _program(ProgramKind.MODULE, words[at + 1 :])
        if word.startswith("--module=") or (word.startswith("-m") and not word.startswith("--")):
            name = word.removeprefix("--module=") if word.startswith("--") else word[2:]
            return list(words[:at]), _program(ProgramKind.MODULE, [name, *words[at + 1 :]])
        if not word.startswith("-") or word == "-":
            return list(words[:at]), _program(ProgramKind.SCRIPT, words[at:])
        at += 2 if _takes_next(word, value_options) else 1
    return list(words), None


def _takes_next(word: str, value_options: Collection[str]) -> bool:
    """True if the option's value is the next word: for "--name x", "-a x" and "-da x", but not for
    "--name=x" or "-ax"."""
    if word.startswith("--"):
        return word in value_options
    letters = [f"-{letter}" for letter in word[1:]]
    first = next((i for i, letter in enumerate(letters) if letter in value_options), None)
    return first == len(letters) - 1


def _program(kind: ProgramKind, words: Sequence[str]) -> Program | None:
    return Program(kind, words[0], tuple(words[1:])) if words else None


def check(program: Program | None) -> Program:
    """Check that the program can run, before anything is created. Return the program. If it is a
    folder, return it with the path of the file in the folder that Python runs."""
    if program is None:
        raise UsageError("Nothing to run. Name a script, -m MODULE, or a command after --.")
    if program.kind is ProgramKind.SCRIPT:
        program = Program(program.kind, _find_script(program.target), program.args)
    if any("\0" in word for word in (program.target, *program.args)) or not program.target:
        raise UsageError(
            f"The {program.kind} {program.target!r} cannot be run: its name is empty, or a NUL "
            "byte is in the name or in an argument."
        )
    return program


def refuse_late(program: Program | None, words: Collection[str]) -> None:
    """Refuse an option of `kinetic run` that was written after the script, unless the text of the
    script mentions that option. `words` are the words before the script.

    Raises:
        UsageError: the script would get the option, and the job would run without it.
    """
    script = program.target if program and program.kind is ProgramKind.SCRIPT else ""
    if program is None or not Path(script).is_file():
        return
    text = Path(script).read_text(errors="replace").replace("_", "-")
    late = {"--dry-run", "--detach", "--all-hosts"}.intersection(program.args).difference(words)
    for switch in sorted(word for word in late if word[2:] not in text):
        raise UsageError(
            f"{switch} comes after {script}, which has no such option, so nothing was run. To pass "
            f"it to kinetic, write\n  kinetic run {switch} … {script}\nTo pass it to the program, "
            f"write\n  kinetic run … -- python {script} {switch}"
        )


def _find_script(target: str) -> str:
    """Return the path of the script; for a folder, of the file that `python FOLDER` runs."""
    path = Path(target)
    if path.is_dir():
        if not (path / _MAIN_FILE).is_file():
            raise UsageError(f"The folder {target} has no {_MAIN_FILE}. Name a file in it.")
        return str(path / _MAIN_FILE)
    if not path.is_file():
        remedy = (
            ""
            if target.endswith(".py")
            else f" To run a command, write -- before it: kinetic run … -- {target}"
        )
        raise UsageError(f"The file {target} does not exist.{remedy}")
    return target


def script_path(program: Program, cwd: Path) -> Path | None:
    """Return the real path of the script, where the search for the source tree starts; None for
    modules and commands."""
    return (cwd / program.target).resolve() if program.kind is ProgramKind.SCRIPT else None


def make_function(program: Program, cwd: Path) -> Callable[[], None]:
    """Return the function that hosts call. It refers only to strings and imports code by name, so
    that nothing else of this process is pickled."""
    script = script_path(program, cwd)
    kind, args, written = str(program.kind), program.args, program.target
    target = program.target if script is None else os.path.relpath(script, cwd.resolve())

    def run_program() -> None:
        from importlib import import_module

        import_module("kinetic._host.worker.command").run(kind, target, args, written)

    # Tracebacks leave out frames of this file name.
    run_program.__code__ = run_program.__code__.replace(co_filename="<kinetic>")
    run_program.__module__ = _register_module(program, script)
    run_program.__name__ = run_program.__qualname__ = program.name
    return run_program


def _register_module(program: Program, script: Path | None) -> str:
    """Create a module for the function and return its name. The search for the source tree then
    starts at the script, or in the working directory if there is no script.

    The module must not be `__main__`: in some environments that is the console script in `bin`.
    """
    name = f"kinetic {program.kind} {script or program.target}"
    module = ModuleType(name)
    if script is not None:
        module.__file__ = str(script)
    vars(module)[WORDS] = (
        *((program.target,) if program.kind is ProgramKind.COMMAND else ()),
        *program.args,
    )
    vars(module)[MODULES] = (program.target,) if program.kind is ProgramKind.MODULE else ()
    sys.modules[name] = module
    return name


def explain_missing_accelerator(program: Program | None) -> str:
    """Return the message for a missing -a. If -a stands after the program, where it may be the
    program's own option, the message says so."""
    shown_program = program or Program(ProgramKind.SCRIPT, "train.py")
    before = {ProgramKind.SCRIPT: [], ProgramKind.MODULE: ["-m"], ProgramKind.COMMAND: ["--"]}
    example = shlex.join(
        ["kinetic", "run", "-a", "cpu", *before[shown_program.kind], shown_program.target]
    )
    late = ("-a", "--accelerator")
    if any(word.partition("=")[0] in late for word in shown_program.args):
        return (
            "Write -a before the program: all words after it are the program's own. For example:\n"
            f"  {example} …"
        )
    return (
        "Missing option -a / --accelerator (or --session): name the slice to run on before the "
        f"program. For example:\n  {example}"
    )
