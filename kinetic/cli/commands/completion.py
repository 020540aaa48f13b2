"""`kinetic completion`: what makes a shell complete `kinetic` commands.

In: the name of a shell. Out: a script for that shell. Called by `main`.
"""

from __future__ import annotations

import click

from kinetic.cli import output
from kinetic.errors import UsageError

SHELLS = ("bash", "zsh", "fish")

_HELP = """Print what makes a shell complete `kinetic` commands: options, ids of jobs, accelerators and profiles.

\b
To switch it on for good:
  bash   kinetic completion bash >> ~/.bashrc
  zsh    kinetic completion zsh > "${fpath[1]}/_kinetic"
  fish   kinetic completion fish > ~/.config/fish/completions/kinetic.fish

\b
Example, for this shell only:
  source <(kinetic completion bash)
"""


@click.command("completion", help=_HELP, short_help="Print what makes a shell complete `kinetic` commands.")
@click.argument("shell", metavar="{bash|zsh|fish}", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, /, *, shell: str) -> None:
    """Print the script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"This version of click cannot complete in {shell}. Update click.")
    output.line(kind(ctx.find_root().command, {}, "kinetic", "_KINETIC_COMPLETE").source())
