"""`kinetic completion`: shell completion.

In: the name of a shell. Out: a script for that shell, or completions, for that script.
"""

from __future__ import annotations

import click

from kinetic.cli import output, shells

_HELP = """Print a script that makes a shell complete `kinetic` commands: options, ids of jobs,
accelerators and profiles.

\b
To switch it on permanently:
  bash   kinetic completion bash >> ~/.bashrc
  zsh    kinetic completion zsh > "${fpath[1]}/_kinetic"
  fish   kinetic completion fish > ~/.config/fish/completions/kinetic.fish

\b
Example, for this shell only:
  source <(kinetic completion bash)
"""


@click.command(
    "completion", help=_HELP, short_help="Print a script for shell completion of `kinetic`."
)
@click.argument("shell", metavar="{bash|zsh|fish}", type=click.Choice(tuple(shells.SCRIPTS)))
@click.option(
    "--line",
    hidden=True,
    help="Used by the script: print completions for the end of this line.",
)
@click.pass_context
def completion(ctx: click.Context, /, *, shell: str, line: str | None) -> None:
    """Print the script, or completions for it."""
    if line is None:
        return output.line(shells.SCRIPTS[shell].rstrip())
    for answer in shells.answers(ctx.find_root().command, line):
        output.line(answer)
    return None
