"""Parameter types and options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kinetic._core.ref import NEWEST, JobRef
from kinetic.cli.lazy import complete_with
from kinetic.errors import UsageError

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
    _PairType = click.ParamType[tuple[str, str]]
    _SlicesType = click.ParamType[int | tuple[int, int]]
else:  # Older versions of click have no type parameter.
    _FloatType = _PairType = _SlicesType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])


class Duration(_FloatType):
    """A parameter type for a duration with a unit; it is converted to seconds."""

    name = "DURATION"

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the duration in seconds."""
        if isinstance(value, int | float):
            return float(value)
        from kinetic._core.duration import parse_duration_s  # Few commands need it.

        try:
            return parse_duration_s(value, may_be_zero=self._may_be_zero)
        except ValueError:
            least = "0 or more" if self._may_be_zero else "more than 0"
            units = "Write seconds, or a number and a unit: 30s, 5m, 2h, 1h30m, 7d."
            self.fail(f"{value!r} is not a duration of {least}. {units}", param, ctx)


class Assignment(_PairType):
    """A parameter type for a variable and its value: NAME=VALUE."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Return the name and the value."""
        if isinstance(value, tuple):
            return value
        name, equals, content = str(value).partition("=")
        if not equals or not name:
            wanted = (param and param.metavar) or self.name
            secret = (
                "To pass a variable of your environment without showing its value, use --secret"
            )
            advice = f" {secret} {name}." if name and wanted == self.name else ""
            self.fail(f"{value!r} is not {wanted}.{advice}", param, ctx)
        return name, content


class SlicesParam(_SlicesType):
    """A parameter type for a number of slices, or minimum and maximum of an elastic job: 1:3."""

    name = "N|LEAST:MOST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, int]:
        """Return one number, or (minimum, maximum)."""
        if not isinstance(value, str):
            return cast("int | tuple[int, int]", value)
        least, colon, most = value.partition(":")
        try:
            return (int(least), int(most)) if colon else int(least)
        except ValueError:
            self.fail(
                f"{value!r} is not a number of slices. Write for example 2, or 1:3 for an elastic "
                "job with 1 to 3 slices.",
                param,
                ctx,
            )


DURATION = Duration()
AGE = Duration(may_be_zero=True)
SLICES = SlicesParam()
ASSIGNMENT = Assignment()


_LAST = "kinetic.last"


def job_argument(offer: str) -> Callable[[F], F]:
    """Return a decorator that adds the argument ID, which may be "-", and --last. `offer` names the
    function of the module `suggestions` that completes the ID."""
    return _with_last(
        "job_id", "ID", offer, lambda job_id, last: job_id or (NEWEST if last else None)
    )


def jobs_argument(offer: str, *, required: bool) -> Callable[[F], F]:
    """Return a decorator that adds the arguments ID..., each of which may be "-", and --last.
    `offer` names the function of the module `suggestions` that completes the ids."""
    metavar = "ID..." if required else "[ID]..."
    return _with_last(
        "job_ids",
        metavar,
        offer,
        lambda job_ids, last: (*job_ids, *([NEWEST] if last else [])) or None,
        many=True,
        required=required,
    )


def _with_last(
    name: str,
    metavar: str,
    offer: str,
    choose: Callable[[Any, bool], Any],
    *,
    many: bool = False,
    required: bool = True,
) -> Callable[[F], F]:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[_LAST] = value

    def choose_job(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        last = bool(ctx.meta.get(_LAST))
        if last and value and not many:
            raise click.UsageError("Give either an ID or --last, not both.", ctx)
        chosen = choose(value, last)
        if chosen is None and required and value != "" and not ctx.resilient_parsing:
            raise click.UsageError(
                "Missing argument ID: name a job, or use --last for the newest one.", ctx
            )
        return chosen if chosen is not None else value

    option = click.option(
        "--last",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Use the newest job. ID can also be `-` for it.",
    )
    argument = click.argument(
        name,
        metavar=metavar,
        nargs=-1 if many else 1,
        required=False,
        callback=choose_job,
        shell_complete=complete_with(offer),
    )
    return lambda command: option(argument(command))


def host_options(*, all_hosts: str, attempt: str) -> Callable[[F], F]:
    """Return a decorator that adds --host, --all-hosts and --attempt. The arguments are the help
    texts of the last two."""
    options = (
        click.option(
            "--host",
            "hosts",
            metavar="N",
            type=click.IntRange(min=0),
            multiple=True,
            help="Read this host instead of the leader (host 0). Repeatable.",
        ),
        click.option("--all-hosts", is_flag=True, help=all_hosts),
        click.option(
            "--attempt",
            metavar="N",
            type=click.IntRange(min=1),
            shell_complete=complete_with("attempts"),
            help=attempt,
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def json_option(command: F) -> F:
    """Add --json."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
    )(command)


def ignore_option(*names: str, is_flag: bool = False) -> Callable[[F], F]:
    """Return a decorator that accepts and ignores an option of keras-kinetic's command lines."""
    return click.option(*names, hidden=True, expose_value=False, is_flag=is_flag)


def yes_option(command: F) -> F:
    """Add --yes."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(action: str, *, yes: bool) -> None:
    """Ask the user before an action, such as "remove the profile dev". With `yes`, do not ask.

    Raises:
        UsageError: there is no terminal on which to ask.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"This would {action}. Add --yes to confirm.")
    click.confirm(f"{action[0].upper()}{action[1:]}?", abort=True, err=True)


def check_hosts(ref: JobRef, hosts: Sequence[int]) -> tuple[int, ...]:
    """Return the hosts without duplicates.

    Raises:
        UsageError: the job does not have one of the hosts.
    """
    from kinetic._client.board import shape  # Few commands need it.

    return tuple(dict.fromkeys(shape.check_host(ref, host) for host in hosts))
