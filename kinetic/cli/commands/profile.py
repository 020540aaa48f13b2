"""`kinetic profile`: named clusters, and which one is in use.

In: names, and the settings of a cluster. Out: the changed file of profiles; tables or JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kinetic._client.board import text
from kinetic._config import profiles, settings
from kinetic._config.profiles import FIELDS, OF_THE_CLUSTER, Profiles
from kinetic.cli import output
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import json_option, yes_option
from kinetic.errors import UsageError

_COLUMNS = ("", "NAME", *map(str.upper, FIELDS))

_GROUP_HELP = """Name clusters, and choose which one is in use.

A profile holds project, zone, cluster, namespace, address (of a Ray cluster) and store under one
name. Flags and KINETIC_ variables override it. Profiles are kept in KINETIC_PROFILES_FILE; `kinetic
config` shows where that is.

\b
Examples:
  kinetic profile create dev --project p --zone us-central2-b --cluster c
  kinetic profile use dev
  kinetic --profile staging jobs list      for one command
"""

_CREATE_HELP = """Create a profile. The first one is put in use.

Values without an option are taken from KINETIC_PROJECT, KINETIC_ZONE, KINETIC_CLUSTER,
KINETIC_NAMESPACE and KINETIC_STORE. On a terminal and without any option, missing ones are
prompted for.

\b
Examples:
  kinetic profile create dev --project p --zone us-central2-b --cluster c
  kinetic profile create dev --project q --force      replace it
"""

_LS_HELP = """List the profiles. The one in use is marked with a star.

\b
Examples:
  kinetic profile ls
  kinetic profile ls --json
"""

_USE_HELP = """Use a profile from now on.

\b
Example:
  kinetic profile use dev
"""

_UNSET_HELP = """Stop using a profile. The profiles stay.

\b
Example:
  kinetic profile unset
"""

_SHOW_HELP = """Show a profile; without NAME, the one in use.

\b
Examples:
  kinetic profile show
  kinetic profile show dev --json
"""

_RM_HELP = """Remove a profile. If it is in use, none is in use after that.

\b
Example:
  kinetic profile rm dev --yes
"""


class _Ordered(click.Group):
    """Lists its commands in the order in which they are used, which is that of their code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Accept `list` for `ls`, as `kinetic jobs` has it."""
        return super().get_command(ctx, "ls" if cmd_name == "list" else cmd_name)


@click.group(
    cls=_Ordered, help=_GROUP_HELP, short_help="Name clusters, and choose which one is in use."
)
def profile() -> None:
    """Commands about profiles."""


def _field_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(FIELDS):
        metavar = "FAMILY=DOLLARS,..." if name == "prices" else "NAME"
        command = click.option(f"--{name}", metavar=metavar, help=f"Its {name}.")(command)
    return command


def _check_readers(path: Path, values: Mapping[str, str]) -> None:
    """Refuse a profile that keras-kinetic, whose file this may be, could not read."""
    fits = {"project", "zone", "cluster"} <= values.keys() <= set(OF_THE_CLUSTER)
    if fits or path.parent.name != ".kinetic":
        return
    raise UsageError(
        f"keras-kinetic reads {path}, too: each profile in it needs project, zone and cluster, and "
        "can have a namespace besides. To have a file of your own, copy it to "
        "~/.config/kinetic/profiles.json."
    )


@profile.command("create", help=_CREATE_HELP, short_help="Create a profile.")
@click.argument("name", required=False)
@_field_options
@click.option("--force", is_flag=True, help="Replace a profile of this name.")
def create(name: str | None, force: bool, **options: str | None) -> None:
    """Add a profile."""
    path = settings.profiles_file()
    name = profiles.check_name(name or _ask_for_name())
    if name in profiles.read(path).by_name and not force:  # before any prompt
        raise UsageError(
            f"There is a profile {name!r} already. Choose another name, or replace it with --force."
        )
    values = _complete(options)
    _check_readers(path, values)
    stored = profiles.change(path, lambda before: before.with_profile(name, values, force=force))
    output.line(
        f"Profile {name} is kept in {path}" + (" and in use." if stored.current == name else ".")
    )
    if stored.current != name:
        output.notice(f"To use it: kinetic profile use {name}")


def _complete(options: dict[str, str | None]) -> dict[str, str]:
    """Values from options, then the environment, then prompts."""
    loaded = settings.load(flags=options, profile={})
    explicit = (settings.Origin.FLAG, settings.Origin.ENVIRONMENT)
    values = {
        n: _in_one_word(s.value)
        for n in FIELDS
        if (s := loaded.setting(n)).value and s.source.origin in explicit
    }
    if sys.stdin.isatty() and not any(options.values()):
        for name in OF_THE_CLUSTER:
            values[name] = values.get(name) or click.prompt(
                f"{name.capitalize()} (empty for none)", default="", show_default=False
            )
    values = {name: value.strip() for name, value in values.items() if value.strip()}
    if not values:
        *others, last = (f"--{name}" for name in FIELDS)
        raise UsageError(f"A profile needs at least one of {', '.join(others)} and {last}.")
    return values


def _in_one_word(value: object) -> str:
    """A setting as profiles keep it."""
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{name}={amount}" for name, amount in value.items())


def _ask_for_name() -> str:
    if not sys.stdin.isatty():
        raise UsageError(
            "the NAME is missing: kinetic profile create NAME --project … --zone … --cluster …"
        )
    return str(click.prompt("Name of the profile"))


@profile.command("ls", help=_LS_HELP, short_help="List the profiles.")
@json_option
def ls(as_json: bool) -> None:
    """Print one line for each profile."""
    stored = profiles.read(settings.profiles_file())
    used = _name_in_use(stored)
    if as_json:
        rows = [
            {"name": name, "in_use": name == used, **stored.by_name[name]}
            for name in sorted(stored.by_name)
        ]
        return output.json_document(rows)
    if not stored.by_name:
        return output.notice(
            "There are no profiles yet. To make one: kinetic profile create NAME --project … "
            "--cluster …"
        )
    cells = [
        ("*" if name == used else "", name, *(values.get(field, "-") for field in FIELDS))
        for name, values in sorted(stored.by_name.items())
    ]
    output.table(_COLUMNS, cells)
    return _report_override(stored.current)


def _name_in_use(stored: Profiles) -> str | None:
    chosen = settings.chosen_profile()
    return stored.current if chosen is None else str(chosen.value)


@profile.command("use", help=_USE_HELP, short_help="Use a profile from now on.")
@click.argument("name", shell_complete=complete_with("profiles"))
def use(name: str) -> None:
    """Make a profile the current one."""
    profiles.change(settings.profiles_file(), lambda before: before.with_current(name))
    output.line(f"Profile {name} is in use.")
    _report_override(name)


def _report_override(current: str | None) -> None:
    chosen = settings.chosen_profile()
    if chosen is not None and chosen.value != current:
        by = "--profile" if chosen.source.origin is settings.Origin.FLAG else "KINETIC_PROFILE"
        output.notice(
            f"{chosen.value} is used here, because {by} says so; otherwise it is "
            f"{current or 'none'}."
        )


@profile.command("unset", help=_UNSET_HELP, short_help="Stop using a profile.")
def unset() -> None:
    """Put no profile in use."""
    path = settings.profiles_file()
    if profiles.read(path).current is not None:
        profiles.change(path, lambda before: before.with_current(None))
    output.line("No profile is in use.")
    _report_override(None)


@profile.command("show", help=_SHOW_HELP, short_help="Show a profile.")
@json_option
@click.argument("name", required=False, shell_complete=complete_with("profiles"))
def show(name: str | None, as_json: bool) -> None:
    """Print one profile."""
    path = settings.profiles_file()
    stored = profiles.read(path)
    used = _name_in_use(stored)
    name = name or used
    if name is None:
        raise UsageError(
            "No profile is in use. Name one: kinetic profile show NAME; `kinetic profile ls` lists "
            "them."
        )
    values = stored.get(name)
    if as_json:
        return output.json_document({"name": name, "in_use": name == used, **values})
    facts = [("Profile", f"{name}{' (in use)' if name == used else ''}")]
    output.line(
        text.align_pairs(
            [*facts, *((f.capitalize(), values.get(f, "-")) for f in FIELDS), ("File", str(path))]
        )
    )
    return None


@profile.command("rm", help=_RM_HELP, short_help="Remove a profile.")
@click.argument("name", shell_complete=complete_with("profiles"))
@yes_option
def rm(name: str, yes: bool) -> None:
    """Remove one profile."""
    path: Path = settings.profiles_file()
    profiles.read(path).get(name)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"The profile {name} would be removed. Add --yes to remove it without being asked."
            )
        click.confirm(f"Remove the profile {name}?", abort=True, err=True)
    was = profiles.read(path).current
    profiles.change(path, lambda before: before.without(name))
    output.line(
        f"Profile {name} is removed." + (" No profile is in use now." if was == name else "")
    )
