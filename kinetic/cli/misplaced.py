"""Hints for options of `kinetic run` that were written after the program. Pure.

In: the words before the program, the program, the names of options. Out: messages to the user.

Nothing is moved silently: a program may have an `-a` of its own. The corrected line is suggested
only when kinetic's own -a is missing.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kinetic.cli.program import Program, ProgramKind
from kinetic.errors import KineticError

_BEFORE = {ProgramKind.SCRIPT: (), ProgramKind.MODULE: ("-m",), ProgramKind.COMMAND: ("--",)}
_EXAMPLE = Program(ProgramKind.SCRIPT, "train.py")


class OptionNames(NamedTuple):
    """The names of the options of `kinetic run`: those that take a value, and those that do not."""

    values: Collection[str]
    flags: Collection[str]


def split_args(args: Sequence[str], known: OptionNames) -> tuple[list[str], list[str]]:
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


def missing_accelerator(words: Sequence[str], program: Program | None, known: OptionNames) -> str:
    """Say that -a is missing, with a line that works: the user's own if -a came too late."""
    moved, rest = split_args(program.args, known) if program else ([], [])
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


def went_to_the_program(program: Program, known: OptionNames) -> str:
    """Return a hint for a program that refused its arguments; "" if none looks like an option of
    `kinetic run`."""
    moved, _ = split_args(program.args, known)
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
