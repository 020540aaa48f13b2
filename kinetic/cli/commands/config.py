"""`kinetic config`: every setting and the source of its value."""

from __future__ import annotations

from typing import Any

import click

from kinetic._config import settings as configuration
from kinetic.cli import output
from kinetic.cli.context import place_options
from kinetic.cli.options import json_option

_COLUMNS = ("SETTING", "VALUE", "SOURCE")

_HELP = """Show every setting and where its value comes from.

The first source that sets a value wins: an option (or an argument of kinetic.run), a KINETIC_
variable, the current profile, the default.

\b
Examples:
  kinetic config
  kinetic --profile staging config show
  kinetic config --json
"""


@click.command(
    "config", help=_HELP, short_help="Show every setting and where its value comes from."
)
@place_options
@json_option
@click.argument("action", metavar="[show]", type=click.Choice(["show"]), required=False)
def config(action: str | None, as_json: bool, **flags: str | None) -> None:
    """Print all settings."""
    loaded = configuration.load(flags=flags)
    values = {name: loaded.setting(name) for name in configuration.names()}
    if as_json:
        return output.json_document(
            {
                name: {"value": _simplify(s.value), "source": str(s.source)}
                for name, s in values.items()
            }
        )
    return output.table(
        _COLUMNS,
        [(name, _format_value(s.value), str(s.source)) for name, s in values.items()],
        wrap="VALUE",
    )


def _simplify(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _format_value(value: Any) -> str:
    if value in (None, "", {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
