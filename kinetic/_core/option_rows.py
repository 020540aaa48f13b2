"""The rows of the options table. Each row is stored in a field of `Options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from enum import Enum, auto
from typing import Any, NamedTuple


class Takes(Enum):
    """The kind of value that a flag of the command line takes."""

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
        names: spellings of the flag.
        metavar: the value's name in the help.
        takes: the kind of value; a switch takes none.
        offers: name of the list with which a shell completes the value.
        required: True if the command needs the flag, except on a session.
    """

    names: tuple[str, ...]
    metavar: str = "NAME"
    takes: Takes = Takes.TEXT
    offers: str = ""
    required: bool = False


class Option(NamedTuple):
    """One row of the table.

    Attributes:
        name: the option's name, as users write it.
        check: function of the name and the value as written, which returns the value to store.
        help: text for `help(kinetic.run)`, the reference and the command line.
        default: the documented default.
        flag: the flag of `kinetic run`; None if the option has none.
        becomes: the part of the plan that the option determines, together with the settings and
            the call; "" if the option is sent to the hosts, in `Plan.options`.
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
        name: the option's name, if it differs from the field's.
        unset: the value to store when users leave the option out, if it differs from the default.
            check, help, default, flag, becomes: see `Option`.
    """
    row = Option(name, check, help, default, flag, becomes)
    value = default if unset is MISSING else unset
    if isinstance(value, dict):
        return field(default_factory=dict, metadata={"option": row})
    return field(default=value, metadata={"option": row})
