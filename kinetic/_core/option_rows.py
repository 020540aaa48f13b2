"""What the table of options says of each.

In: nothing. Out: `Option`, one row; the field of `Options` that carries it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from enum import Enum, auto
from typing import Any, NamedTuple


class Takes(Enum):
    """What a flag of the command line takes."""

    TEXT = auto()
    COUNT = auto()
    SLICES = auto()
    DURATION = auto()
    VARIABLES = auto()
    NAMES = auto()
    SWITCH = auto()


class Flag(NamedTuple):
    """The flag of `kinetic run` for an option.

    Attributes:
        names: of the flag.
        metavar: the value's name in the help.
        takes: what kind of value; a switch takes none.
        offers: the name of what a shell completes it with.
        required: whether it must be given.
    """

    names: tuple[str, ...]
    metavar: str = "NAME"
    takes: Takes = Takes.TEXT
    offers: str = ""
    required: bool = False


class Option(NamedTuple):
    """One row of the table.

    Attributes:
        name: as users write it.
        check: takes the name and the value as written, and returns the value to store.
        help: for `help(kinetic.run)`, the reference and the command line.
        default: as documented.
        flag: of `kinetic run`; None if it has none.
        becomes: the part of the plan that it determines, together with the settings and the call;
            "" if it is sent to the hosts, in `Plan.options`.
    """

    name: str
    check: Callable[[str, object], Any]
    help: str
    default: Any = None
    flag: Flag | None = None
    becomes: str = ""


def option(
    check: Callable[[str, Any], Any],
    help: str,
    default: Any = None,
    *,
    name: str = "",
    flag: Flag | None = None,
    becomes: str = "",
    unset: Any = MISSING,
) -> Any:
    """Make a field of `Options`.

    Args:
        name: of the option, if it is not the field's.
        unset: the stored value when the option is not given, if it is not the default.
    """
    row = Option(name, check, help, default, flag, becomes)
    value = default if unset is MISSING else unset
    if isinstance(value, dict):
        return field(default_factory=dict, metadata={"option": row})
    return field(default=value, metadata={"option": row})
