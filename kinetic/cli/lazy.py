"""Command groups that import commands and completions only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Lazy(NamedTuple):
    """A command that is imported when it is used.

    Attributes:
        import_path: "module:attribute".
        help: one line, so that `--help` of the group imports no command.
    """

    import_path: str
    help: str


class LazyGroup(click.Group):
    """A group that lists its commands without importing them.

    Args:
        lazy: the commands by name.
        aliases: names of commands, by alias.
        elsewhere: commands outside of this group, such as "kinetic jobs list", by the name under
            which users may look for them here.
    """

    def __init__(
        self,
        *args: Any,
        lazy: dict[str, Lazy],
        aliases: dict[str, str] | None = None,
        elsewhere: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy
        self.aliases = aliases or {}
        self.elsewhere = elsewhere or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of definition."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if the group does not have it."""
        entry = self.lazy.get(self.aliases.get(cmd_name, cmd_name))
        if entry is None:
            return None
        module, _, attribute = entry.import_path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions for the commands without importing them."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=entry.help)
            for name, entry in self.lazy.items()
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.lazy.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with a suggestion."""
        name = args[0] if args else "-"
        if (
            self.get_command(ctx, name) is None
            and not name.startswith("-")
            and not ctx.resilient_parsing
        ):
            if name in self.elsewhere:
                raise click.UsageError(
                    f"No such command {name!r}. Did you mean `{self.elsewhere[name]}`?"
                )
            from difflib import get_close_matches

            names = (*self.lazy, *self.aliases)
            near = get_close_matches(name, names, n=1)
            hint = (
                f"Did you mean {near[0]!r}?" if near else f"The commands are: {', '.join(names)}."
            )
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def complete_with(what: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Return a completion callback. It calls the function `what` of the module `suggestions`, which
    it imports only then."""

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from kinetic.cli import suggestions

        words: list[Any] = getattr(suggestions, what)(ctx, param, incomplete)
        return words

    return offer
