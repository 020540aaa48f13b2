"""`kinetic profile`: named settings of clusters, one of which is current."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kinetic._client.board import text
from kinetic._config import profiles, settings
from kinetic._config.profiles import CLUSTER_FIELDS, FIELDS, Profiles
from kinetic.cli import output
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import confirm, json_option, yes_option
from kinetic.errors import UsageError

_COLUMNS = ("", "NAME", *map(str.upper, FIELDS))
_FIELD_HELP = {
    "project": "Google Cloud project of the cluster.",
    "zone": "Zone of the cluster.",
    "cluster": "Name of the cluster.",
    "namespace": "Kubernetes namespace for the jobs.",
    "address": "Address of a Ray cluster.",
    "store": "Store for the jobs: a folder or a gs:// URI.",
    "prices": "Prices per chip and hour, in dollars, as for KINETIC_PRICES.",
    "session": "Session that runs the calls.",
}

_GROUP_HELP = """Save cluster settings under names and switch between them.

A profile has a project, zone, cluster, namespace, address (of a Ray cluster), store and session.
Options and KINETIC_ variables override it. The profiles are in KINETIC_PROFILES_FILE; `kinetic
config` shows its path.

\b
Examples:
  kinetic profile create dev --project p --zone us-central2-b --cluster c
  kinetic profile use dev
  kinetic --profile staging jobs list      uses it for one command
"""

_CREATE_HELP = """Create a profile. The first profile becomes the current one.

Values without an option are taken from KINETIC_PROJECT, KINETIC_ZONE, KINETIC_CLUSTER,
KINETIC_NAMESPACE and KINETIC_STORE. On a terminal, if you give no option, you are asked for the
missing values.

\b
Examples:
  kinetic profile create dev --project p --zone us-central2-b --cluster c
  kinetic profile create dev --project q --force      replaces it
"""

_LS_HELP = """List the profiles. A star marks the current one.

\b
Examples:
  kinetic profile ls
  kinetic profile ls --json
"""

_USE_HELP = """Make a profile the current one.

\b
Example:
  kinetic profile use dev
"""

_UNSET_HELP = """Use no profile. Profiles are not removed.

\b
Example:
  kinetic profile unset
"""

_SHOW_HELP = """Show a profile; without NAME, the current one.

\b
Examples:
  kinetic profile show
  kinetic profile show dev --json
"""

_RM_HELP = """Remove a profile. If it is the current one, no profile is used afterwards.

\b
Example:
  kinetic profile rm dev --yes
"""


class _Ordered(click.Group):
    """A group that lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Accept `list` for `ls`, like `kinetic jobs`."""
        return super().get_command(ctx, "ls" if cmd_name == "list" else cmd_name)


@click.group(
    cls=_Ordered,
    help=_GROUP_HELP,
    short_help="Save cluster settings under names and switch between them.",
)
def profile() -> None:
    """Commands for profiles."""


def _field_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(FIELDS):
        metavar = "FAMILY=DOLLARS,..." if name == "prices" else "NAME"
        command = click.option(f"--{name}", metavar=metavar, help=_FIELD_HELP[name])(command)
    return command


def check_readers(path: Path, values: Mapping[str, str]) -> None:
    """If keras-kinetic shares the file, refuse a profile that it could not read."""
    fits = {"project", "zone", "cluster"} <= values.keys() <= set(CLUSTER_FIELDS)
    if fits or path.parent.name != ".kinetic":
        return
    raise UsageError(
        f"The profile was not created. keras-kinetic also reads {path}, so a profile in it needs "
        "project, zone and cluster, and may add only a namespace. To add other settings, copy the "
        "file to ~/.config/kinetic/profiles.json, which only kinetic reads, and try again."
    )


@profile.command("create", help=_CREATE_HELP, short_help="Create a profile.")
@click.argument("name", required=False)
@_field_options
@click.option("--force", is_flag=True, help="Replace an existing profile of this name.")
def create(name: str | None, force: bool, **options: str | None) -> None:
    """Add a profile."""
    path = settings.profiles_file()
    name = profiles.check_name(name or _ask_for_name())
    if name in profiles.read(path).by_name and not force:  # Check before any prompt.
        raise UsageError(
            f"The profile {name!r} already exists. Choose another name, or replace it with --force."
        )
    values = _collect_values(options)
    check_readers(path, values)
    stored = profiles.change(path, lambda before: before.with_profile(name, values, force=force))
    output.line(
        f"Created profile {name} in {path}."
        + (" It is the current profile." if stored.current == name else "")
    )
    if stored.current != name:
        output.notice(f"To use it: kinetic profile use {name}")


def _collect_values(options: dict[str, str | None]) -> dict[str, str]:
    """Return the profile's values: from options, else from the environment, else from prompts."""
    loaded = settings.load(flags=options, profile={})
    explicit = (settings.Origin.FLAG, settings.Origin.ENVIRONMENT)
    values = {
        n: _format_setting(s.value)
        for n in FIELDS
        if (s := loaded.setting(n)).value and s.source.origin in explicit
    }
    if sys.stdin.isatty() and not any(options.values()):
        for name in CLUSTER_FIELDS:
            values[name] = values.get(name) or click.prompt(
                f"{name.capitalize()} (empty for none)", default="", show_default=False
            )
    values = {name: value.strip() for name, value in values.items() if value.strip()}
    if not values:
        *others, last = (f"--{name}" for name in FIELDS)
        raise UsageError(f"A profile needs at least one of {', '.join(others)} and {last}.")
    return values


def _format_setting(value: object) -> str:
    """Return a setting as text, as profiles store it: prices as "v6e=2.1,l4=0.5"."""
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{name}={amount}" for name, amount in value.items())


def _ask_for_name() -> str:
    if not sys.stdin.isatty():
        raise UsageError(
            "NAME is missing: kinetic profile create NAME --project … --zone … --cluster …"
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
            "There are no profiles yet. To create one: kinetic profile create NAME --project … "
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


@profile.command("use", help=_USE_HELP, short_help="Make a profile the current one.")
@click.argument("name", shell_complete=complete_with("profiles"))
def use(name: str) -> None:
    """Make a profile the current one."""
    profiles.change(settings.profiles_file(), lambda before: before.with_current(name))
    output.line(f"The current profile is {name}.")
    _report_override(name)


def _report_override(current: str | None) -> None:
    chosen = settings.chosen_profile()
    if chosen is not None and chosen.value != current:
        by = "--profile" if chosen.source.origin is settings.Origin.FLAG else "KINETIC_PROFILE"
        output.notice(
            f"{by} selects profile {chosen.value}; without it, the current profile is "
            f"{current or 'none'}."
        )


@profile.command("unset", help=_UNSET_HELP, short_help="Use no profile.")
def unset() -> None:
    """Use no profile."""
    path = settings.profiles_file()
    if profiles.read(path).current is not None:
        profiles.change(path, lambda before: before.with_current(None))
    output.line("There is no current profile now.")
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
            "There is no current profile. Name one: kinetic profile show NAME; `kinetic profile "
            "ls` lists them."
        )
    values = stored.get(name)
    if as_json:
        return output.json_document({"name": name, "in_use": name == used, **values})
    facts = [("Profile", f"{name}{' (current)' if name == used else ''}")]
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
    confirm(f"remove the profile {name}", yes=yes)
    current = profiles.read(path).current
    profiles.change(path, lambda before: before.without(name))
    output.line(
        f"Removed profile {name}."
        + (" There is no current profile now." if current == name else "")
    )
