"""The program of `kinetic run`: parsed from the command line, checked, and wrapped in a function
for the hosts.

In: the words after `kinetic run`. Out: the words that are options, and a `Program`; messages.
"""

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

_OF_FOLDER = "__main__.py"


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


def refuse_late(program: Program | None, words: Collection[str]) -> None:
    """Refuse a switch of `kinetic run` behind a script that does not know it; `words` are before.

    Raises:
        UsageError: the job would run without it.
    """
    script = program.target if program and program.kind is ProgramKind.SCRIPT else ""
    if program is None or not Path(script).is_file():
        return
    text = Path(script).read_text(errors="replace").replace("_", "-")
    late = {"--dry-run", "--detach", "--all-hosts"}.intersection(program.args).difference(words)
    for switch in sorted(each for each in late if each[2:] not in text):
        raise UsageError(
            f"{switch} follows {script}, whose text does not have it. Nothing was run; for "
            f"kinetic, write\n  kinetic run {switch} … {script}\nand for the program\n"
            f"  kinetic run … -- python {script} {switch}"
        )


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
    return target


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


def explain_missing_accelerator(program: Program | None) -> str:
    """Say that -a is missing, or came too late: nothing is moved silently, because a program may
    have an `-a` of its own."""
    named = program or Program(ProgramKind.SCRIPT, "train.py")
    before = {ProgramKind.SCRIPT: [], ProgramKind.MODULE: ["-m"], ProgramKind.COMMAND: ["--"]}
    example = shlex.join(["kinetic", "run", "-a", "cpu", *before[named.kind], named.target])
    late = ("-a", "--accelerator")
    if any(word.partition("=")[0] in late for word in named.args):
        return (
            f"Options come before the program; what follows {named.target} belongs to it. Write "
            f"for example:\n  {example} …"
        )
    return (
        "Missing option -a / --accelerator: name the slice to run on, before the program. For "
        f"example:\n  {example}"
    )
