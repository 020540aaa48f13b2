"""The program of `kinetic run`: parsed from the command line, checked, and wrapped in a function
for the hosts; hints for options that were written after it.

In: the words after `kinetic run`. Out: the words that are options, and a `Program`; messages.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kinetic._core.values import dataclass
from kinetic._source.project import MODULES, WORDS
from kinetic.errors import KineticError, UsageError

_OF_FOLDER = "__main__.py"
_SHELLS = ("bash", "zsh", "fish", "dash", "ksh", "sh")
_LINE_BYTES = 512
_HANDED_OVER = "'''exec'"


class ProgramKind(StrEnum):
    """How a program is started."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


@dataclass(frozen=True)
class Program:
    """A program and its arguments.

    Attributes:
        kind: script, module or command.
        target: path of the script as written, name of the module, or name of the command.
        args: the words after it.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name shown in the list of jobs: of a folder that is run, the folder's."""
        path = Path(self.target)
        if self.kind is ProgramKind.SCRIPT and path.name == _OF_FOLDER:
            path = path.parent.absolute()
        return path.name or self.target


def split(words: Sequence[str], value_options: Collection[str]) -> tuple[list[str], Program | None]:
    """Split `kinetic run` OPTIONS from the program: at the first word that is not an option, after
    `-m NAME`, or at `--`.

    Everything after it belongs to the program, even what looks like an option of kinetic.
    `value_options` names the options that take a value ("-a", "--accelerator"): the word after one
    is not the program.
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
    """Whether the option's value is the next word: "--name x" and "-a x" and "-da x", but not
    "--name=x" or "-ax"."""
    if word.startswith("--"):
        return word in value_options
    letters = [f"-{letter}" for letter in word[1:]]
    first = next((i for i, letter in enumerate(letters) if letter in value_options), None)
    return first == len(letters) - 1


def _program(kind: ProgramKind, words: Sequence[str]) -> Program | None:
    return Program(kind, words[0], tuple(words[1:])) if words else None


def check(program: Program | None) -> Program:
    """Refuse what cannot run, before anything is created; of a folder, return the program in it."""
    if program is None:
        raise UsageError("Nothing to run: name a script, -m MODULE, or a command after --.")
    if program.kind is ProgramKind.SCRIPT:
        program = Program(program.kind, _find_script(program.target), program.args)
    if any("\0" in word for word in (program.target, *program.args)) or not program.target:
        raise UsageError(f"{program.target!r} cannot be the name of a {program.kind}.")
    return program


def _find_script(target: str) -> str:
    """Return the path of the file; of a folder, that of what `python FOLDER` runs."""
    path = Path(target)
    if path.is_dir():
        if not (path / _OF_FOLDER).is_file():
            raise UsageError(f"{target} is a folder without {_OF_FOLDER}. Name a file in it.")
        return str(path / _OF_FOLDER)
    if not path.is_file():
        remedy = (
            ""
            if target.endswith(".py")
            else f" To run a command, put -- before it: kinetic run … -- {target}"
        )
        raise UsageError(f"There is no file {target}.{remedy}")
    if shell := _find_shell(path):
        raise UsageError(
            f"{target} is a script of {shell}, and kinetic run SCRIPT runs files of Python. "
            f"Write: kinetic run … -- {shell} {target}"
        )
    return target


def _find_shell(path: Path) -> str:
    """Return the shell whose script this is, by its first line, or by the file's name if that names
    no interpreter; or "". What a shell begins and hands to Python, as pip writes it, is none."""
    try:
        with path.open("rb") as file:
            first, second = (file.readline(_LINE_BYTES).decode(errors="replace") for _ in range(2))
    except OSError:  # Who packs it says so.
        return ""
    if path.suffix == ".py" or second.startswith(_HANDED_OVER):
        return ""
    words = first[2:].split() if first.startswith("#!") else [path.suffix.removeprefix(".")]
    named = {Path(word).name for word in words}
    return next((shell for shell in _SHELLS if shell in named), "")


def script_path(program: Program, cwd: Path) -> Path | None:
    """Return the real path of the script, where the search for the source tree starts; None for
    other programs."""
    return (cwd / program.target).resolve() if program.kind is ProgramKind.SCRIPT else None


def function(program: Program, cwd: Path) -> Callable[[], None]:
    """Return the function that hosts call. It closes over text only and imports its code by name,
    so nothing else of this process is pickled."""
    script = script_path(program, cwd)
    kind, args, written = str(program.kind), program.args, program.target
    target = program.target if script is None else os.path.relpath(script, cwd.resolve())

    def run_program() -> None:
        from importlib import import_module

        import_module("kinetic._host.worker.command").run(kind, target, args, written)

    # frames of this file name are left out of tracebacks
    run_program.__code__ = run_program.__code__.replace(co_filename="<kinetic>")
    run_program.__module__ = _module_for(program, script)
    run_program.__name__ = run_program.__qualname__ = program.name
    return run_program


def _module_for(program: Program, script: Path | None) -> str:
    """Make a module for the function: the source tree is searched from its file, or from the
    working directory if it has none.

    It must not be `__main__`: that is the console script in the `bin` of some environment.
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


_BEFORE = {ProgramKind.SCRIPT: (), ProgramKind.MODULE: ("-m",), ProgramKind.COMMAND: ("--",)}
_EXAMPLE = Program(ProgramKind.SCRIPT, "train.py")


class OptionNames(NamedTuple):
    """The names of the options of `kinetic run`: those that take a value, and those that do not."""

    values: Collection[str]
    flags: Collection[str]


def _split_args(args: Sequence[str], known: OptionNames) -> tuple[list[str], list[str]]:
    """Split the arguments of a program into those that look like options of `kinetic run`, with
    their values, and the rest."""
    moved: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(args):
        word, name = args[at], args[at].partition("=")[0]
        if word in known.values and at + 1 < len(args):
            moved += args[at : at + 2]
            at += 2
            continue
        (moved if word in known.flags or (name in known.values and name != word) else rest).append(
            word
        )
        at += 1
    return moved, rest


def explain_missing_accelerator(
    words: Sequence[str], program: Program | None, known: OptionNames
) -> str:
    """Say that -a is missing, with a line that works: the user's own if -a came too late. Nothing
    is moved silently: a program may have an `-a` of its own."""
    moved, rest = _split_args(program.args, known) if program else ([], [])
    if program is not None and _names_a_slice(moved):
        line = _line([*words, *moved], program, rest)
        return (
            f"Options come before the program; what follows {program.target} belongs to it. "
            f"Write:\n  {line}"
        )
    shown = program or _EXAMPLE
    line = _line(["-a", "cpu", *words], shown, shown.args)
    return (
        "Missing option -a / --accelerator: name the slice to run on, before the program. For "
        f"example:\n  {line}"
    )


def find_misplaced(program: Program, known: OptionNames) -> str:
    """Return a hint for a program that refused its arguments; "" if none looks like an option of
    `kinetic run`."""
    moved, _ = _split_args(program.args, known)
    if not moved:
        return ""
    return (
        f"{shlex.join(moved)} went to {program.name}: options of `kinetic run` come before the "
        "program."
    )


def _names_a_slice(words: Sequence[str]) -> bool:
    from kinetic._core.accelerators.resolve import resolve

    named = [after for word, after in itertools.pairwise(words) if word in ("-a", "--accelerator")]
    named += [word.partition("=")[2] for word in words if word.startswith("--accelerator=")]
    try:
        return bool([resolve(name) for name in named])
    except KineticError:
        return False


def _line(options: Sequence[str], program: Program, args: Sequence[str]) -> str:
    return shlex.join(["kinetic", "run", *options, *_BEFORE[program.kind], program.target, *args])
