"""Write the reference of all commands: what each of them prints for `--help`.

In: the page with the line `<!-- commands -->`. Out: the page with a section for each command.
Called by mkdocs for every page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PLACE = "<!-- commands -->"
WIDTH = 88


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands in their place."""
    if PLACE not in markdown:
        return markdown
    from kinetic.cli.root import root

    return markdown.replace(PLACE, "\n\n".join(_sections(root, "kinetic", None)))


def _sections(command: Any, name: str, parent: Any) -> Iterator[str]:
    ctx = command.make_context(
        name.rpartition(" ")[2], [], parent=parent, resilient_parsing=True, max_content_width=WIDTH
    )
    ctx.terminal_width = WIDTH
    yield f"## {name}\n\n```text\n{command.get_help(ctx)}\n```"
    for each in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        yield from _sections(command.get_command(ctx, each), f"{name} {each}", ctx)
