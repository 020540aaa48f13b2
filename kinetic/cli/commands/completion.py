"""`kinetic completion`: click's completion script for a shell, which calls `kinetic` itself."""

from __future__ import annotations

import click

from kinetic.cli import output

_HELP = """Print a script that completes `kinetic` commands in your shell.

It completes commands and options, and IDs of jobs, accelerators and profiles.

\b
To enable it permanently:
  bash   kinetic completion bash >> ~/.bashrc
  zsh    kinetic completion zsh >> ~/.zshrc
  fish   kinetic completion fish > ~/.config/fish/completions/kinetic.fish

\b
Example, for this shell only:
  source <(kinetic completion bash)
"""


@click.command(
    "completion",
    help=_HELP,
    short_help="Print a completion script for your shell.",
)
@click.argument("shell", metavar="{bash|zsh|fish}", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, /, *, shell: str) -> None:
    """Print click's completion script for a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    output.line(kind(ctx.find_root().command, {}, "kinetic", "_KINETIC_COMPLETE").source())
